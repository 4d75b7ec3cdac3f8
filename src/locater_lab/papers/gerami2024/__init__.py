"""Gerami, Hoover, Dulepet and Duraiswami (2024): a polynomial in the place of softmax's exponential, which
factorises.
"""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.gerami2024 import cost, forms, leak, limits, training

PAPER = Paper(
    "gerami2024",
    "Fastmax: a polynomial for the exponential, what it saves and what it cannot do",
    "Gerami, Hoover, Dulepet and Duraiswami, FAST: factorizable attention for speeding up transformers (arXiv 2402.07901)",
    (forms.STUDY, limits.STUDY, leak.STUDY, cost.STUDY, training.STUDY),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
