"""StableLM: the plain decoder with LayerNorm, a quarter of the channels turns, queries and keys may have a norm for
each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Block, Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.build import norm_layout, normed_rows
from locater.layers.layout import AttentionLayout, rotary_layout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    eps = config.get("layer_norm_eps", 1e-5)
    for layer in decoder_layers(weights, {"num_key_value_heads": 32, **config}):
        before = norm_layout(weights, f"{layer.name.removesuffix('.self_attn')}.input_layernorm", "layer", eps)
        query, key = layer.query, layer.key
        if config.get("qk_layernorm"):
            query = normed_rows(query, _per_head(f"{layer.name}.q_layernorm", layer.heads, eps), layer.heads)
            key = normed_rows(key, _per_head(f"{layer.name}.k_layernorm", layer.kv_heads, eps), layer.kv_heads)
        rotary = rotary_layout(config, layer.head_dim, share=0.25)
        yield replace(layer, query=query, key=key, norm=before, rotary=rotary)


def _per_head(stem: str, heads: int, eps: float) -> NormLayout:
    return NormLayout("layer", tuple(f"{stem}.norms.{head}.weight" for head in range(heads)), eps=eps)


def block(config: Config) -> Block:
    if config.get("use_parallel_residual"):
        return replace(LLAMA_BLOCK, norm="layer", before_mlp=None, parallel=True)
    return replace(LLAMA_BLOCK, norm="layer")


FAMILY = Family(("stablelm",), layers, block)
