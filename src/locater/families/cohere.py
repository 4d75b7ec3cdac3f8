"""Cohere Command R, R+ and R7B: LayerNorm without bias, rotary positions on neighbouring channels.

R+ normalises queries and keys with gains of each head's own. R7B (cohere2) slides a window, and turns channels only
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.decoder import LLAMA_BLOCK, decoder_layers
from locater.families.record import Family
from locater.layers.build import norm, within_heads
from locater.layers.layer import AttentionLayer, Projection
from locater.layers.norm import Norm
from locater.layers.normed import normed
from locater.layers.rotary import halves
from locater.sources.sources import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    newer = config["model_type"] == "cohere2"
    config = config if newer else {"rope_theta": 500_000.0, **config}
    eps = config.get("layer_norm_eps", 1e-5)
    for layer in decoder_layers(weights, config):
        before = norm(weights, f"{layer.name.removesuffix('.self_attn')}.input_layernorm", "layer", eps)
        order = halves(layer.head_dim)
        query, key = within_heads(layer.query, layer.heads, order), within_heads(layer.key, layer.kv_heads, order)
        if config.get("use_qk_norm") and not newer:
            query = _normed(query, norm(weights, f"{layer.name}.q_norm", "layer", eps), before, layer.heads, order)
            key = _normed(key, norm(weights, f"{layer.name}.k_norm", "layer", eps), before, layer.kv_heads, order)
        window = _window(config, layer.index) if newer else None
        rotary = layer.rotary if window is not None or not newer else None
        yield replace(layer, query=query, key=key, norm=before, window=window, rotary=rotary)


def _normed(whole: Projection, inner: Norm, before: Norm, heads: int, order: list[int]) -> Projection:
    assert inner.gain is not None
    return normed(whole, replace(inner, gain=inner.gain[:, order]), before, blocks=heads)


def _window(config: Config, index: int) -> int | None:
    types = config.get("layer_types")
    sliding = (
        types[index] == "sliding_attention" if types else (index + 1) % (config.get("sliding_window_pattern") or 4)
    )
    return config.get("sliding_window", 4096) if sliding else None


BLOCK = replace(LLAMA_BLOCK, norm="layer", before_mlp=None, parallel=True)
FAMILY = Family(("cohere", "cohere2"), layers, BLOCK)
