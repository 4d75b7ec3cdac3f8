"""The inputs of attention layers (mean and covariance), and the attention that they predict for each head."""

from locater.predict.prediction_and_logit_bound import predict
from locater.predict.statistics_file import Input, Statistics

__all__ = ["Input", "Statistics", "predict"]
