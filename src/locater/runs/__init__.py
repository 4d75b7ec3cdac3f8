"""A training run: its records, sinks and logs, and the monitor that writes and warns."""

from locater.runs.run_monitor import RunMonitor

__all__ = ["RunMonitor"]
