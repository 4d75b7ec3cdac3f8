"""DistilBERT: BERT's layers under other names, in its tensors and in its configuration; the norms' eps is fixed in the
code.
"""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.families.shared_shapes import Names, encoder_layers
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

EPS = 1e-12
NAMES = Names(
    "transformer.layer",
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "output_layer_norm",
)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    return encoder_layers(weights, config, NAMES, EPS)


BLOCK = Block(
    attention="attention",
    after_attention="sa_layer_norm",
    after_mlp="output_layer_norm",
    mlp="ffn",
    up="ffn.lin1",
    down="ffn.lin2",
)
FAMILY = Family(("distilbert",), layers, BLOCK)
