"""Qiu et al. (2025): a sigmoid gate after attention, where it stands, what it undoes, and what it does in training."""

from locater_papers.engine.papers import Paper
from locater_papers.qiu2025 import gates, judged, nonlinear, sinks, table
from locater_papers.qiu2025.page import lead, page

PAPER = Paper(
    "qiu2025",
    "Gated attention: claim by claim",
    "Qiu et al., Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free (2025, arXiv 2505.06708)",
    (gates.STUDY, nonlinear.STUDY, table.STUDY, judged.STUDY, judged.HOT_STUDY, sinks.STUDY),
    page,
    lead,
)

__all__ = ["PAPER"]
