"""The zoo: every attention mechanism, same model, data and seeds, each at the better of two learning rates."""

from locater_papers.engine.papers import Paper
from locater_papers.zoo import pace, sinks
from locater_papers.zoo.losses import STUDIES
from locater_papers.zoo.page import lead, page

PAPER = Paper(
    "zoo",
    "Every attention mechanism on the same footing",
    "All mechanisms of this project: one model, one text, the same seeds",
    (*STUDIES, pace.STUDY, sinks.STUDY),
    page,
    lead,
)

__all__ = ["PAPER"]
