"""Gemma 2: gains stored as w for 1 + w, soft-capped logits, a query scale of its own, every other layer slides a
window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, **config}
    types = config.get("layer_types")
    for layer in decoder_layers(weights, config, gain_offset=1.0):
        sliding = types[layer.index] == "sliding_attention" if types else layer.index % 2 == 0
        yield layer.with_logits(
            scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
            softcap=config.get("attn_logit_softcapping", 50.0),
            window=config.get("sliding_window", 4096) if sliding else None,
            causal=not config.get("use_bidirectional_attention"),
        )


GEMMA_BLOCK = replace(
    LLAMA_BLOCK,
    attention_out="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
    gain_offset=1.0,
)
FAMILY = Family(("gemma2",), layers, GEMMA_BLOCK)
