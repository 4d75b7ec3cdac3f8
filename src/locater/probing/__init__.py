"""Run a model and reduce what its attention does."""

from locater.probing.hidden import SeenLayer
from locater.probing.monitor import Monitor
from locater.probing.observe import Observation, observe
from locater.probing.predict import predict
from locater.probing.seen import SeenHead
from locater.probing.statistics import Input, Statistics, statistics

__all__ = ["Input", "Monitor", "Observation", "SeenHead", "SeenLayer", "Statistics", "observe", "predict", "statistics"]
