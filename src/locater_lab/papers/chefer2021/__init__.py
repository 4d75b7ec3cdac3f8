"""Chefer, Gur and Wolf (2021): relevance of tokens through attention maps and their gradients, for any transformer."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.chefer2021 import relevance

PAPER = Paper(
    "chefer2021",
    "Relevance through attention maps and their gradients: what it is worth beside rollout and raw attention",
    "Chefer, Gur and Wolf, Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder "
    "Transformers (ICCV 2021, arXiv 2103.15679)",
    (relevance.RULE_STUDY, relevance.PERTURBATION_STUDY, relevance.STREAM_STUDY, relevance.LARGE_STUDY),
    Path(__file__).parent,
    kinds={"identity": "a1", "simulation": "a2", "experiment": "b c d"},
    scaled="b c",
    one_run="b1 b2 b5",
    seen="b2",
    says="Relevance passed through attention maps and their gradients explains encoders, encoder-decoders and models "
    "of two streams better than methods made for self-attention alone.",
    beliefs={
        "b3 b4": "in two pretrained models relevance orders tokens better than rollout and raw attention",
        "b1 b2": "in small classifiers of text and images relevance orders tokens better than rollout and raw attention",
        "c1 c2": "relevance does better than rollout for the encoder of an encoder-decoder",
    },
    cover="areas",
)

__all__ = ["PAPER"]
