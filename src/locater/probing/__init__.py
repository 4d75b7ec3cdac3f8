"""Run a model and reduce what its attention does."""

from locater.monitor.run_monitor import Monitor
from locater.observing.observation import Observation, observe
from locater.observing.rows import SeenHead
from locater.observing.stream import SeenLayer
from locater.predict.input_statistics import Input, Statistics, statistics
from locater.predict.prediction import predict

__all__ = ["Input", "Monitor", "Observation", "SeenHead", "SeenLayer", "Statistics", "observe", "predict", "statistics"]
