"""BART: an encoder and a decoder, post-norm, so a layer's input comes out of the norm before it: the embeddings' for
layer 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.families.shared_shapes import encoder_decoder_layers
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

LARGE = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
}


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    yield from encoder_decoder_layers(weights, {**LARGE, **config}, norm_first=False)


BLOCK = Block(
    attention="self_attn",
    after_attention="self_attn_layer_norm",
    after_mlp="final_layer_norm",
    other_norms=("encoder_attn_layer_norm",),
    up="fc1",
    down="fc2",
)
FAMILY = Family(("bart",), layers, BLOCK)
