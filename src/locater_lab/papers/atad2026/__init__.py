"""Atad, Zimerman, Katz and Wolf (2026): TensorLens, the transformer at one input as one linear operator."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.atad2026 import one_operator, perturbation, sanity

PAPER = Paper(
    "atad2026",
    "The transformer as one operator: what it is exact about, and what its scores are worth",
    "Atad, Zimerman, Katz and Wolf, TensorLens: End-to-End Transformer Analysis via High-Order Attention Tensors "
    "(arXiv 2601.17958, 2026)",
    (one_operator.STUDY, perturbation.STUDY, sanity.STUDY),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
