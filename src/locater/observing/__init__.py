"""A model under observation: what is heard of its attention, and what is kept of it."""

from locater.observing.collecting import statistics
from locater.observing.observation import Observation, observe
from locater.observing.rows import SeenHead
from locater.observing.stream import SeenLayer

__all__ = ["Observation", "SeenHead", "SeenLayer", "observe", "statistics"]
