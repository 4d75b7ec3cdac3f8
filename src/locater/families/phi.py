"""Phi 1, 1.5 and 2: LayerNorm in front, half of the channels turn, biases everywhere, queries and keys may be
normalised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Block, Family
from locater.families.shared_shapes import decoder_layers
from locater.layers.build import norm_layout
from locater.layers.layout import AttentionLayout, rotary_layout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    eps = config.get("layer_norm_eps", 1e-5)
    normed = config.get("qk_layernorm", False)
    for layer in decoder_layers(weights, config, out="dense"):
        block = layer.name.removesuffix(".self_attn")
        yield replace(
            layer,
            norm=norm_layout(weights, f"{block}.input_layernorm", "layer", eps),
            query_norm=norm_layout(weights, f"{layer.name}.q_layernorm", "layer", eps) if normed else None,
            key_norm=norm_layout(weights, f"{layer.name}.k_layernorm", "layer", eps) if normed else None,
            rotary=rotary_layout(config, layer.head_dim, share=0.5),
        )


BLOCK = Block(
    attention="self_attn",
    before_attention="input_layernorm",
    mlp="mlp",
    up="mlp.fc1",
    down="mlp.fc2",
    parallel=True,
    final="final_layernorm",
)
FAMILY = Family(("phi",), layers, BLOCK)
