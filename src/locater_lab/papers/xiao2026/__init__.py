"""Xiao, Zhang and Zhang (2026): attention with queries and keys of one bit per channel."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.xiao2026 import flattening, models, published, signs, training, vision

PAPER = Paper(
    "xiao2026",
    "BinaryAttention: what one bit per channel keeps of attention",
    "Xiao, Zhang and Zhang, BinaryAttention (CVPR 2026, arXiv 2603.09582)",
    (
        signs.STUDY,
        flattening.STUDY,
        models.STUDY,
        training.STUDY,
        published.ACCURACY_STUDY,
        published.SPEED_STUDY,
        vision.STUDY,
    ),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
