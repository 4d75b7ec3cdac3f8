"""Xiao, Zhang and Zhang (2026): attention with queries and keys of one bit per channel."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.xiao2026 import flattening, one_bit, training

PAPER = Paper(
    "xiao2026",
    "BinaryAttention: what one bit per channel keeps of attention",
    "Xiao, Zhang and Zhang, BinaryAttention (CVPR 2026, arXiv 2603.09582)",
    (
        one_bit.STUDY,
        flattening.GAUSSIAN_STUDY,
        flattening.MODEL_STUDY,
        training.START_STUDY,
        training.ACCURACY_STUDY,
        training.SPEED_STUDY,
        training.IMAGE_STUDY,
    ),
    Path(__file__).parent,
    kinds={"identity": "a", "simulation": "a8 b", "construction": "a14", "experiment": "c d e f g"},
    scaled="d g",
)

__all__ = ["PAPER"]
