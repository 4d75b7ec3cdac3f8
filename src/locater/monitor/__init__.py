"""A training run, logged and warned of."""

from locater.monitor.run_monitor import Monitor

__all__ = ["Monitor"]
