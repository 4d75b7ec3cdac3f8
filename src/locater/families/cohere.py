"""Cohere Command R, R+ and R7B: LayerNorm without bias, rotary positions on neighbouring channels.

R+ normalises queries and keys with gains of each head's own. R7B (cohere2) slides a window, and turns channels only
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.build import norm_layout, normed_rows
from locater.layers.layout import AttentionLayout
from locater.layers.rotary import halves
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    newer = config["model_type"] == "cohere2"
    config = config if newer else {"rope_theta": 500_000.0, **config}
    eps = config.get("layer_norm_eps", 1e-5)
    for layer in decoder_layers(weights, config):
        before = norm_layout(weights, f"{layer.name.removesuffix('.self_attn')}.input_layernorm", "layer", eps)
        order = halves(layer.head_dim)
        query, key = layer.query.within_heads(layer.heads, order), layer.key.within_heads(layer.kv_heads, order)
        if config.get("use_qk_norm") and not newer:
            of_query, of_key = (norm_layout(weights, f"{layer.name}.{part}_norm", "layer", eps) for part in "qk")
            query = normed_rows(query, of_query.picked(order), layer.heads)
            key = normed_rows(key, of_key.picked(order), layer.kv_heads)
        window = _window(config, layer.index) if newer else None
        rotary = layer.rotary if window is not None or not newer else None
        yield replace(layer, query=query, key=key, norm=before, rotary=rotary).with_logits(window=window)


def _window(config: Config, index: int) -> int | None:
    types = config.get("layer_types")
    sliding = (
        types[index] == "sliding_attention" if types else (index + 1) % (config.get("sliding_window_pattern") or 4)
    )
    return config.get("sliding_window", 4096) if sliding else None


BLOCK = replace(LLAMA_BLOCK, norm="layer", before_mlp=None, parallel=True)
FAMILY = Family(("cohere", "cohere2"), layers, BLOCK)
