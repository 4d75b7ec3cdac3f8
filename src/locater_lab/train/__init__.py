"""A small trainer: trains a transformer on text or images, and logs every attention head as it learns.

result = locater_lab.train.run(Plan(steps=500, control=("locater(target=2)",), out="run"))
result.report_loss, result.report_entropy
model = locater_lab.train.load(result.model)
"""

from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer, load
from locater_lab.train.loop import DivergedError, run
from locater_lab.train.plan import Plan
from locater_lab.train.run_folder import Result
from locater_lab.train.sweep import sweep

__all__ = ["DivergedError", "Plan", "Result", "Shape", "Transformer", "load", "run", "sweep"]
