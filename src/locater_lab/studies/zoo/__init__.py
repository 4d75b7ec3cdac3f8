"""The zoo: every attention mechanism, same model, data and seeds, each at the better of two learning rates."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.studies.zoo import losses, maps, sinks, step_times

PAPER = Paper(
    "zoo",
    "Every attention mechanism on the same footing",
    "All mechanisms of this project: one model, one text, the same seeds",
    (losses.STUDY, *maps.STUDIES, step_times.STUDY, sinks.STUDY),
    Path(__file__).parent,
    kinds={"experiment": "a b c d e f"},
    within={(0.0, None): "f2 f3 f4 f5 f12", (0.0, 1.0): "f1 f6 f7 f15 f16", (-1.0, 1.0): "c4"},
)

__all__ = ["PAPER"]
