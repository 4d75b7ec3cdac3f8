"""Sahiner and others (2022): attention as a convex problem with a nuclear norm."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.sahiner2022 import convex_problem, image_heads, optima, token_clusters

PAPER = Paper(
    "sahiner2022",
    "Attention as a convex problem: the optimum, the heads it takes, and what the penalty does",
    "Sahiner, Ergen, Ozturkler, Pauly, Mardani and Pilanci, Unraveling Attention via Convex Duality: Analysis and Interpretations of "
    "Vision Transformers (ICML 2022, arXiv 2205.08078)",
    (
        convex_problem.LIFTING_STUDY,
        optima.OPTIMA_STUDY,
        optima.GATED_STUDY,
        optima.RELU_STUDY,
        token_clusters.STUDY,
        image_heads.STUDY,
    ),
    Path(__file__).parent,
    kinds={"identity": "a c4", "simulation": "b c d", "experiment": "e"},
    scaled="d e",
    within={(0.0, 1.0): "b5"},
    says="Training a head of attention with a penalty on its weights is a convex problem with a nuclear norm, which "
    "promotes low rank and clusters tokens; such heads do better than linear ones and MLPs.",
    beliefs={
        "b1 b2": "the convex problem of an attention head and the best of trained heads reach the same optimum",
        "b7": "the nuclear norm of the convex problem promotes low rank",
        "d1": "attention clusters tokens where the task depends on clusters",
        "e1": "a convex attention head does better than a linear one",
        "e2": "a convex attention head does better than an MLP",
    },
    cover="heads",
)

__all__ = ["PAPER"]
