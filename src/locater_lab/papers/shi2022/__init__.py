"""Shi and others (2022): over-smoothing in BERT, tokens that grow alike with depth, and fusion of layers against it."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.shi2022 import depth_theorem, token_distance, trained_models

PAPER = Paper(
    "shi2022",
    "Over-smoothing in BERT: how alike tokens become, what the theorem promises, what fusion does",
    "Shi and others, Revisiting over-smoothing in BERT from the perspective of graph (ICLR 2022, arXiv 2202.08625)",
    (
        token_distance.COSINE_STUDY,
        token_distance.BOUNDS_STUDY,
        depth_theorem.THEOREM_STUDY,
        depth_theorem.NORM_PLACE_STUDY,
        trained_models.STUDY,
        depth_theorem.FUSION_STUDY,
    ),
    Path(__file__).parent,
    kinds={"identity": "a b c1", "simulation": "a5 b3 b4 c d", "construction": "a3 a4 c4 c5", "experiment": "e f"},
    scaled="e f",
    one_run="e1",
    within={(-1.0, 1.0): "d1"},
    says="Tokens of BERT grow alike with depth, since a block brings them closer by a factor that follows from its "
    "weights and norms; fusing layers mends it.",
    beliefs={
        "b1 b5 b6 c1": "factors from its weights and norms, in our reconstruction, bound what a block leaves of the differences between tokens",
        "c6": "a large standard deviation in front of the norms brings drawn tokens together",
        "e1": "tokens of trained encoders grow alike with depth",
        "f1 f2 f3": "fusing layers lowers the loss",
    },
    cover="models",
)

__all__ = ["PAPER"]
