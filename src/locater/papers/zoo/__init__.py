"""The zoo: every attention mechanism, same model, data and seeds, each at the better of two learning rates."""

from locater.papers.paper import Paper
from locater.papers.zoo import pace, sinks
from locater.papers.zoo.judged import STUDIES
from locater.papers.zoo.page import lead, page

PAPER = Paper(
    "zoo",
    "Every attention mechanism on the same footing",
    "All mechanisms of this project: one model, one text, the same seeds",
    (*STUDIES, pace.STUDY, sinks.STUDY),
    page,
    lead,
)

__all__ = ["PAPER"]
