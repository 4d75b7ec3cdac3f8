"""A training run, logged and warned of."""

from locater.runs.run_monitor import Monitor

__all__ = ["Monitor"]
