"""What layers read (mean and covariance), and what follows for their heads."""

from locater.predict.input_statistics import Input, Statistics
from locater.predict.prediction import predict

__all__ = ["Input", "Statistics", "predict"]
