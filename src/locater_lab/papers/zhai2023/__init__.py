"""Zhai and others (2023): sigma-Reparam, and the floor that spectral norms put under the entropy of attention."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.zhai2023 import floor_and_reparam, trained_models, without_norms

PAPER = Paper(
    "zhai2023",
    "Stabilizing training by preventing entropy collapse: what the bound says, and what the method does",
    "Zhai, Likhomanenko, Littwin, Busbridge, Ramapuram, Zhang, Gu and Susskind, Stabilizing Transformer Training by "
    "Preventing Attention Entropy Collapse (ICML 2023, arXiv 2303.06296)",
    (
        floor_and_reparam.FLOOR_STUDY,
        floor_and_reparam.REPARAM_STUDY,
        trained_models.HEADS_STUDY,
        trained_models.STORED_RUNS_STUDY,
        trained_models.GAMMA_STUDY,
        without_norms.WITHOUT_STUDY,
    ),
    Path(__file__).parent,
    kinds={"identity": "a b1 b4 b5", "construction": "a2 b6", "simulation": "a6 b2 b3", "experiment": "c d e f"},
    scaled="d f",
    within={(0.0, None): "d2 d3"},
    says="Entropy of attention has a floor set by the spectral norm of its weights; sigma-Reparam, which controls "
    "that norm, keeps training stable at hot rates and without norms or warm-up.",
    beliefs={
        "a1 a5": "the floor that spectral norms put under the entropy of attention is right",
        "c1": "that floor says something on trained models",
        "f1 f2": "with sigma-Reparam a model trains about as well without norms, and without warm-up",
        "d1 d2 d3": "sigma-Reparam trains with entropy at rates at which the plain model has lost it",
    },
    cover="hot",
)

__all__ = ["PAPER"]
