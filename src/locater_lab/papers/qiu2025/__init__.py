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
)

__all__ = ["PAPER"]
