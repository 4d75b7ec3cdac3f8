"""Sahiner and others (2022): attention as a convex problem with a nuclear norm."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.sahiner2022 import clusters, frozen, gated, lifting, optima

PAPER = Paper(
    "sahiner2022",
    "Attention as a convex problem: the optimum, the heads it takes, and what the penalty does",
    "Sahiner, Ergen, Ozturkler, Pauly, Mardani and Pilanci, Unraveling Attention via Convex Duality: Analysis and Interpretations of "
    "Vision Transformers (ICML 2022, arXiv 2205.08078)",
    (lifting.STUDY, optima.STUDY, gated.STUDY, gated.RELU_STUDY, clusters.STUDY, frozen.STUDY),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
