"""Ding, Fan, Lan, Schuurmans and Soricut (2020): attention normalized over queries, then over keys, explains no key
away.
"""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.ding2020 import guarantee, trained_models

PAPER = Paper(
    "ding2020",
    "Attention that does not explain away: what every key is promised, and whether keys need it",
    "Ding, Fan, Lan, Schuurmans and Soricut, Attention that does not Explain Away (arXiv 2009.14308)",
    (guarantee.GUARANTEE_STUDY, guarantee.CAUSAL_STUDY, trained_models.MODELS_STUDY, trained_models.TRAINING_STUDY),
    Path(__file__).parent,
    kinds={"identity": "a b", "construction": "a8", "simulation": "b2", "experiment": "c d"},
    scaled="d",
    says="Softmax attention can explain keys away; normalized over queries first and over keys then, every key is "
    "attended to, and models do better.",
    beliefs={
        "a1": "doubly normalized, every key gets at least its share 1/S",
        "d4": "trained softmax explains keys away",
        "d1 d2": "double normalization or the hybrid lowers the loss",
    },
    cover="columns",
)

__all__ = ["PAPER"]
