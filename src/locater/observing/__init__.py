"""A model under observation: statistics of its attention heads and of its residual stream, collected while it runs."""

from locater.observing.collecting import statistics
from locater.observing.map_of_heads import attention_pattern
from locater.observing.observation import Observation, observe
from locater.observing.rows import SeenHead
from locater.observing.stream import SeenLayer

__all__ = [
    "Observation",
    "SeenHead",
    "SeenLayer",
    "attention_pattern",
    "observe",
    "statistics",
]
