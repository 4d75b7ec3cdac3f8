"""Phi 1, 1.5 and 2: LayerNorm in front, half of the channels turn, biases everywhere, queries and keys may be
normalised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.decoder import decoder_layers
from locater.families.record import Block, Family
from locater.layers.build import norm
from locater.layers.layer import AttentionLayer
from locater.layers.rotary import rotary_from_config
from locater.sources.sources import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    eps = config.get("layer_norm_eps", 1e-5)
    normed = config.get("qk_layernorm", False)
    for layer in decoder_layers(weights, config, out="dense"):
        block = layer.name.removesuffix(".self_attn")
        yield replace(
            layer,
            norm=norm(weights, f"{block}.input_layernorm", "layer", eps),
            query_norm=norm(weights, f"{layer.name}.q_layernorm", "layer", eps) if normed else None,
            key_norm=norm(weights, f"{layer.name}.k_layernorm", "layer", eps) if normed else None,
            rotary=rotary_from_config(config, layer.head_dim, share=0.5),
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
