"""Dong, Cordonnier and Loukas (2021): attention alone makes tokens equal, doubly exponentially with depth."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.dong2021 import (
    bounds,
    circle,
    contraction,
    depth,
    lengths,
    products,
    slowing,
    tasks,
    two_collapses,
)

PAPER = Paper(
    "dong2021",
    "Attention is not all you need: what collapses, how fast, and what stops it",
    "Dong, Cordonnier and Loukas, Attention is not all you need: pure attention loses rank doubly exponentially with depth "
    "(ICML 2021, arXiv 2103.03404)",
    (
        contraction.STUDY,
        bounds.STUDY,
        depth.STUDY,
        products.STUDY,
        lengths.STUDY,
        tasks.STUDY,
        circle.STUDY,
        two_collapses.STUDY,
        slowing.STUDY,
    ),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
