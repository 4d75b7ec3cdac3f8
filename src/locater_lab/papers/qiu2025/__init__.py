"""Qiu et al. (2025): a sigmoid gate after attention, where it stands, what it undoes, and what it does in training."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.qiu2025 import gate_forms, linearity, training

PAPER = Paper(
    "qiu2025",
    "Gated attention: claim by claim",
    "Qiu et al., Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free (2025, arXiv 2505.06708)",
    (
        gate_forms.FORMS_STUDY,
        gate_forms.QWEN_STUDY,
        linearity.LINEARITY_STUDY,
        linearity.TABLE_STUDY,
        training.TRAINING_STUDY,
        training.HOT_STUDY,
        training.SINK_STUDY,
    ),
    Path(__file__).parent,
    kinds={"identity": "a b", "simulation": "b2 b3 b5", "published": "c", "experiment": "d e f"},
    scaled="d e f",
    within={(-1.0, 1.0): "d15 f9"},
    says="A sigmoid gate behind attention lowers the loss of language models, takes their attention sinks and "
    "massive activations away, and lets them train at hotter rates.",
    beliefs={
        "b2": "a gate behind attention makes a head non-linear",
        "d7 d8 d9 d12": "gates lower the first token's share of rows on text, and gates on values or without input leave more "
        "of it",
        "d1 d2": "gates lower the loss",
        "e1": "gated models stand a hot learning rate better",
    },
    cover="text",
)

__all__ = ["PAPER"]
