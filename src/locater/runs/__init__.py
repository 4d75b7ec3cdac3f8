"""A training run, logged and warned of."""

from locater.runs.run_monitor import RunMonitor

__all__ = ["RunMonitor"]
