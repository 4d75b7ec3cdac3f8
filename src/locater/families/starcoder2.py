"""StarCoder 2: the plain decoder with LayerNorm, biases everywhere and a window over every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.build import norm_layout
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    for layer in decoder_layers(weights, {"num_key_value_heads": 2, **config}):
        block = layer.name.removesuffix(".self_attn")
        norm = norm_layout(weights, f"{block}.input_layernorm", "layer", config.get("norm_epsilon", 1e-5))
        yield replace(layer, norm=norm).with_logits(window=config.get("sliding_window"))


BLOCK = replace(LLAMA_BLOCK, norm="layer", up="mlp.c_fc", down="mlp.c_proj")
FAMILY = Family(("starcoder2",), layers, BLOCK)
