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
    kinds={
        "simulation": "a b2 c4 c12 c13 c14 c15 c16 c21 d5 d6 h",
        "identity": "b e3 e4 h2",
        "construction": "b6",
        "published": "c d1 d2 d3 e",
        "experiment": "c17 c18 c19 c20 d4 f g h13",
    },
    scaled="a c17 c18 c19 d3 d4 f g",
    one_run="c17 c18 c19 d3 d4 f16",
    within={(0.0, 1.0): "f1 f2 f3 f6 f7 f8 f11 f12 f13 f16 g1 g2 g3 g4", (-1.0, 1.0): "h3 h4 h5 h6 h7 h9 h10"},
    says="Attention alone makes its tokens equal at a rate that is doubly exponential in depth; skip connections and "
    "MLPs stop it, and what is left is carried by short paths.",
    beliefs={
        "a1 a3": "attention without a mask takes what differs between tokens to its third power in every layer",
        "a4": "skips keep tokens of stacks of attention apart",
        "c17 c18": "the tokens of trained encoders become equal without skips, in three to seven layers",
        "f4 f9 f14": "sums of short paths through a trained model are more accurate than sums of long ones",
    },
    cover="depth",
)

__all__ = ["PAPER"]
