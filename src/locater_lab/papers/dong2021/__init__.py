"""Dong, Cordonnier and Loukas (2021): attention alone makes tokens equal, doubly exponentially with depth."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.dong2021 import (
    circle,
    contraction,
    locater_slowing,
    path_tasks,
    paths,
    residual_by_depth,
    two_collapses,
)

PAPER = Paper(
    "dong2021",
    "Attention is not all you need: what collapses, how fast, and what stops it",
    "Dong, Cordonnier and Loukas, Attention is not all you need: pure attention loses rank doubly exponentially with depth "
    "(ICML 2021, arXiv 2103.03404)",
    (
        contraction.CONTRACTION_STUDY,
        contraction.BOUNDS_STUDY,
        residual_by_depth.DEPTH_STUDY,
        paths.PRODUCT_STUDY,
        paths.LENGTH_STUDY,
        path_tasks.STUDY,
        circle.STUDY,
        two_collapses.STUDY,
        locater_slowing.STUDY,
    ),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
