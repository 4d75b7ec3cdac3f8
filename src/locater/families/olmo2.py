"""OLMo 2 and 3: queries and keys are normalised over all heads at once, and the stream enters attention without a
norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.build import norm_layout, normed_rows
from locater.layers.layout import AttentionLayout, rotary_layout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    eps = config.get("rms_norm_eps", 1e-5)
    for layer in decoder_layers(weights, config, normed=False):
        query, key = (norm_layout(weights, f"{layer.name}.{part}_norm", "rms", eps) for part in "qk")
        layer = replace(layer, query=normed_rows(layer.query, query), key=normed_rows(layer.key, key))
        yield _windowed(layer, config) if config["model_type"] == "olmo3" else layer


def _windowed(layer: AttentionLayout, config: Config) -> AttentionLayout:
    """OLMo 3: three sliding layers to one full, with rotary positions of their own."""
    types = config.get("layer_types")
    kind = types[layer.index] if types else "sliding_attention" if (layer.index + 1) % 4 else "full_attention"
    config = {"rope_theta": 500_000.0, **config}
    # older configurations: only full layers are extended
    if kind == "sliding_attention" and not config.get("rope_parameters"):
        config = {**config, "rope_scaling": None}
    window = config.get("sliding_window", 4096) if kind == "sliding_attention" else None
    return replace(layer, rotary=rotary_layout(config, layer.head_dim, kind)).with_logits(window=window)


BLOCK = replace(
    LLAMA_BLOCK,
    before_attention=None,
    attention_out="post_attention_layernorm",
    before_mlp=None,
    mlp_out="post_feedforward_layernorm",
)
FAMILY = Family(("olmo2", "olmo3"), layers, BLOCK)
