"""Nait Saada, Naderi and Tanner (2025): the gap in the spectrum of attention collapses tokens as sequences grow."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.saada2024 import causal, gradients, maps, trained, width

PAPER = Paper(
    "saada2024",
    "Mind the gap: what the outlier in attention's spectrum does, and what taking it off cures",
    "Nait Saada, Naderi and Tanner, Mind the Gap: a spectral analysis of rank collapse and signal propagation in attention layers "
    "(ICML 2025, arXiv 2410.07799)",
    (maps.STUDY, width.STUDY, gradients.STUDY, causal.STUDY, trained.STUDY, trained.RUNS),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
