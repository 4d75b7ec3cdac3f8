"""Qiu et al. (2025): a sigmoid gate after attention, where it stands, what it undoes, and what it does in training."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.qiu2025 import gates, nonlinear, qwen, sinks, training, variants

PAPER = Paper(
    "qiu2025",
    "Gated attention: claim by claim",
    "Qiu et al., Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free (2025, arXiv 2505.06708)",
    (gates.STUDY, qwen.STUDY, nonlinear.STUDY, variants.STUDY, training.STUDY, training.HOT_STUDY, sinks.STUDY),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
