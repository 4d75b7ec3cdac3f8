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
    says="Queries and keys of one bit a channel, made from a trained model and fine-tuned, keep or exceed full "
    "precision in vision, at more than twice the speed of FlashAttention2.",
    beliefs={
        "b1 b2": "signs of Gaussian entries keep similarity in the mean and flatten logits",
        "e1 e2 e3": "fine-tuned, attention of one bit is as good as full precision on ImageNet and ADE20K",
        "d2 g6": "a learned bias helps binary attention, and a fine-tuned diffusion model loses nothing",
        "f1": "binary attention is twice as fast as FlashAttention2",
    },
    cover="flattening",
)

__all__ = ["PAPER"]
