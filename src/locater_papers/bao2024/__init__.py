"""Bao, Hataya and Karakida (2024): attention localizes when the eigenvalues of the query-key map concentrate around a
mean.
"""

from locater_papers.bao2024 import gaussian, propagation, softmax, training
from locater_papers.bao2024.judged import STUDIES
from locater_papers.bao2024.page import lead, page
from locater_papers.engine.papers import Paper

PAPER = Paper(
    "bao2024",
    "Self-attention networks localize when QK-eigenspectrum concentrates: claim by claim",
    "Bao, Hataya and Karakida, Self-attention Networks Localize When QK-eigenspectrum Concentrates (ICML 2024, arXiv 2402.02098)",
    (propagation.STUDY, softmax.STUDY, gaussian.STUDY, training.STUDY, *STUDIES),
    page,
    lead,
)

__all__ = ["PAPER"]
