"""Gerami, Hoover, Dulepet and Duraiswami (2024): a polynomial in the place of softmax's exponential, which
factorises.
"""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.gerami2024 import cost_and_training, polynomial

PAPER = Paper(
    "gerami2024",
    "Fastmax: a polynomial for the exponential, what it saves and what it cannot do",
    "Gerami, Hoover, Dulepet and Duraiswami, FAST: factorizable attention for speeding up transformers (arXiv 2402.07901)",
    (
        polynomial.FORMS_STUDY,
        polynomial.LIMIT_STUDY,
        polynomial.LEAK_STUDY,
        cost_and_training.COST_STUDY,
        cost_and_training.TRAINING_STUDY,
    ),
    Path(__file__).parent,
    kinds={
        "identity": "a b c2 d1 d2 d3 d6",
        "simulation": "a4 a5 b6 c",
        "construction": "b2 b5 b10",
        "experiment": "d e",
    },
    scaled="e",
    says="Fastmax takes powers in place of the exponential, so that the attention map factorises in full: linear in "
    "the number of tokens, with gradients bounded below, about as good as softmax.",
    beliefs={
        "a1": "the factorised attention of Fastmax equals the explicit one",
        "e4": "Fastmax does about as well as softmax on images",
    },
    cover="cost",
)

__all__ = ["PAPER"]
