"""Nguyen et al. (2026): gated attention as a hierarchical mixture of experts, and how many samples its experts take."""

from locater_papers.engine.papers import Paper
from locater_papers.nguyen2026 import mixture, places, samples
from locater_papers.nguyen2026.page import lead, page

PAPER = Paper(
    "nguyen2026",
    "Gated attention as a mixture of experts: what a gate changes, and what it does not",
    "Nguyen, Pham, Cao, Dinh, Nguyen, Ho and Rinaldo, A Statistical Theory of Gated Attention through the Lens of Hierarchical Mixture of "
    "Experts (arXiv 2602.01468, 2026)",
    (mixture.STUDY, places.STUDY, samples.STUDY),
    page, lead,
)  # fmt: skip

__all__ = ["PAPER"]
