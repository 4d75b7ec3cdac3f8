"""Hu and others (2025): softmax attention as an interpolator, and what training makes of it."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.hu2025 import constructions, trained_heads

PAPER = Paper(
    "hu2025",
    "Universal approximation with softmax attention: the head with anchors, and whether training finds it",
    "Hu, Liu, Chen, Wu and Liu, Universal Approximation with Softmax Attention (arXiv 2504.15956, 2025)",
    (constructions.HEAD_STUDY, constructions.SEQUENCE_STUDY, trained_heads.HEAD_STUDY, trained_heads.LAYER_STUDY),
    Path(__file__).parent,
    kinds={"construction": "a b", "identity": "a8", "experiment": "c d"},
    scaled="d",
    says="Softmax attention is itself a universal approximator: a head interpolates between anchors, with an error "
    "that falls as one over anchors times heads.",
    beliefs={
        "a1 a2 a3": "a softmax head made by hand interpolates between anchors with an error of 1 / (p H)",
        "b1 b2": "one or two layers made by hand approximate a function of a sequence",
        "d1 d2 d3": "errors of trained heads as interpolators go with heads, range and anchors in the same way",
    },
    cover="errors",
)

__all__ = ["PAPER"]
