"""A small trainer: trains a transformer on text or images, and logs every attention head as it learns.

result = locater.train.run(Plan(steps=500, control=("locater(target=2)",), out="run"))
result.report_loss, result.report_entropy
model = locater.train.load(result.model)
"""

from locater.models.loading import load
from locater.models.shape import Shape
from locater.models.transformer import Transformer
from locater.train.loop import DivergedError, run
from locater.train.plan import Plan
from locater.train.result import Result
from locater.train.sweep import sweep

__all__ = ["DivergedError", "Plan", "Result", "Shape", "Transformer", "load", "run", "sweep"]
