"""Bao, Hataya and Karakida (2024): attention localizes when the eigenvalues of the query-key map concentrate around a
mean.
"""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.bao2024 import (
    acting_judged,
    cause,
    curves,
    gaussian,
    judged,
    own_judged,
    propagation,
    softmax,
    training,
)  # fmt: skip

PAPER = Paper(
    "bao2024",
    "Self-attention networks localize when QK-eigenspectrum concentrates: claim by claim",
    "Bao, Hataya and Karakida, Self-attention Networks Localize When QK-eigenspectrum Concentrates (ICML 2024, arXiv 2402.02098)",
    (
        propagation.STUDY,
        softmax.STUDY,
        judged.LOCATER,
        training.STUDY,
        curves.PARTS_STUDY,
        judged.RIVALS_STUDY,
        judged.TASKS_STUDY,
        gaussian.STUDY,
        curves.ENTROPY_STUDY,
        judged.HOT_STUDY,
        own_judged.STUDY,
        acting_judged.STUDY,
        cause.STUDY,
        acting_judged.ONCE_STUDY,
        own_judged.LONG_STUDY,
    ),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
