"""A model under observation: statistics of its attention heads and of its residual stream, collected while it runs."""

from locater.observing.attention_maps import attention_pattern
from locater.observing.input_covariances import statistics
from locater.observing.observation import Observation, observe
from locater.observing.residual_stream import SeenLayer
from locater.observing.seen_heads import SeenHead

__all__ = [
    "Observation",
    "SeenHead",
    "SeenLayer",
    "attention_pattern",
    "observe",
    "statistics",
]
