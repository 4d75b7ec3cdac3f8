"""The inputs of attention layers (mean and covariance), and the attention that they predict for each head."""

from locater.predict.input_statistics import Input, Statistics
from locater.predict.prediction import predict

__all__ = ["Input", "Statistics", "predict"]
