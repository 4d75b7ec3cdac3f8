"""Nait Saada, Naderi and Tanner (2025): the gap in the spectrum of attention collapses tokens as sequences grow."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.saada2024 import map_spectrum, width_collapse

PAPER = Paper(
    "saada2024",
    "Mind the gap: what the outlier in attention's spectrum does, and what taking it off cures",
    "Nait Saada, Naderi and Tanner, Mind the Gap: a spectral analysis of rank collapse and signal propagation in attention layers "
    "(ICML 2025, arXiv 2410.07799)",
    (
        map_spectrum.RANDOM_STUDY,
        width_collapse.WIDTH_STUDY,
        width_collapse.GRADIENT_STUDY,
        width_collapse.CAUSAL_STUDY,
        map_spectrum.TRAINED_STUDY,
        map_spectrum.TRAINING_STUDY,
    ),
    Path(__file__).parent,
    kinds={"identity": "a1 b7 b8 c1", "simulation": "a b c d", "experiment": "e f"},
    scaled="e f",
    one_run="e1 e2",
    says="A gap opens in the spectrum of random attention maps as tokens become many, which makes tokens alike "
    "already after one layer and gradients explode; the outlier taken off, neither happens.",
    beliefs={
        "a2 a3": "a gap opens in the spectrum of random attention maps at the rates of random matrices",
        "b1 b3": "tokens of drawn layers become alike with their number, and the outlier taken off they do not",
        "c2 c3": "gradients of drawn stacks explode with the number of tokens, and the outlier taken off they are tamed",
    },
    cover="gap",
)

__all__ = ["PAPER"]
