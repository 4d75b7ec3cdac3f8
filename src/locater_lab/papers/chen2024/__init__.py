"""Chen and others (2024): how induction heads come about on n-gram Markov data: c, W and a, rivals, and a transformer."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.chen2024 import real_transformer, simplified_model, training_order

PAPER = Paper(
    "chen2024",
    "Induction heads on n-gram data: what a two-layer model learns, in which order, and what announces it",
    "Chen, Sheen, Wang and Yang, Unveiling Induction Heads: Provable Training Dynamics and Feature Learning in "
    "Transformers (NeurIPS 2024, arXiv 2409.10559)",
    (
        training_order.JOINT_STUDY,
        training_order.STAGES_STUDY,
        simplified_model.INFORMATION_STUDY,
        simplified_model.RIVALS_STUDY,
        real_transformer.STUDY,
    ),
    Path(__file__).parent,
    kinds={"experiment": "a b c d e", "identity": "a7 c1"},
    within={(0.0, 1.0): "b1 c4"},
    says="A two-layer transformer trained on n-gram chains learns in three stages to look up what followed the same "
    "parents, and which parents it takes follows from a modified chi-square information.",
    beliefs={
        "a1 a2 a3 b1 b2 b3": "training on n-gram chains chooses the two parents in the three stages of the paper",
        "c2": "training on n-gram chains chooses, of six sources each, the parents with the largest information",
        "d1 d3 d4": "a model trained on n-gram chains counts what followed, at lengths and priors it was not trained on",
    },
    cover="joint",
)

__all__ = ["PAPER"]
