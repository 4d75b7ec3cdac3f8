"""Whisper: an audio encoder and a text decoder that looks into it, pre-norm; keys have no bias."""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.families.shared_shapes import encoder_decoder_layers
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

SMALLEST = {
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
}


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    yield from encoder_decoder_layers(weights, {**SMALLEST, **config}, norm_first=True)


BLOCK = Block(
    attention="self_attn",
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    other_norms=("encoder_attn_layer_norm",),
    up="fc1",
    down="fc2",
    final="layer_norm",
)
FAMILY = Family(("whisper",), layers, BLOCK)
