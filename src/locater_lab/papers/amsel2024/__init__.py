"""Amsel, Yehudai and Bruna (2024): what heads of full rank do that many heads of low rank do not."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.amsel2024 import encoders, published_size, untrained_heads

PAPER = Paper(
    "amsel2024",
    "Rank in attention: one full-rank head against many of low rank, on the farthest point of a sphere",
    "Amsel, Yehudai and Bruna, On the Benefits of Rank in Attention Layers (arXiv 2407.16153, 2024)",
    (untrained_heads.FULL_RANK_STUDY, untrained_heads.RANDOM_STUDY, encoders.SMALL_STUDY, *published_size.STUDIES),
    Path(__file__).parent,
    kinds={
        "construction": "a1 a2",
        "identity": "a3 b1",
        "simulation": "a4 b2 b7",
        "published": "b3 b4 b5 b6",
        "experiment": "c d e f g",
    },
    scaled="d e f g",
    says="One attention head of full rank answers a nearest-neighbour question at any number of points; heads of low "
    "rank need exponentially many of them in the dimension, unless points are few and layers deep.",
    beliefs={
        "a1 a2": "one full-rank head gives the farthest and the nearest point",
        "b3 b4 b5 b6": "random heads of rank one err by what the code of the paper prints",
        "d3 d5 d6 d8": "after fewer steps trained heads of rank one stay bad, where one full-rank head learns a multiple of -I",
        "e1 e2 e3 f1 f2": "more layers or fewer points help heads of rank one",
    },
    cover="ranks",
)

__all__ = ["PAPER"]
