"""Atad, Zimerman, Katz and Wolf (2026): TensorLens, the transformer at one input as one linear operator."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.atad2026 import linear_operator

PAPER = Paper(
    "atad2026",
    "The transformer as one operator: what it is exact about, and what its scores are worth",
    "Atad, Zimerman, Katz and Wolf, TensorLens: End-to-End Transformer Analysis via High-Order Attention Tensors "
    "(arXiv 2601.17958, 2026)",
    (linear_operator.OPERATOR_STUDY, linear_operator.PERTURBATION_STUDY, linear_operator.SANITY_STUDY),
    Path(__file__).parent,
    kinds={"identity": "a1 a5", "experiment": "a b c5", "construction": "c"},
    scaled="b",
    one_run="b1 b2 b5 b6 b7 b8",
    seen="b2 b6",
    says="At one input a whole transformer is a single linear operator, which tells more of it than maps of "
    "attention put together.",
    beliefs={
        "a1": "at one input the whole model is T x + c",
        "b3 b4": "in two pretrained models the operator orders tokens better than the best map of attention",
        "b1 b2": "in small classifiers of text and images the operator orders tokens better than the best map of "
        "attention",
    },
    cover="areas",
)

__all__ = ["PAPER"]
