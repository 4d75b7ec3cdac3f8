"""CLIP: a causal text tower and a vision tower, each a pre-norm encoder with settings of its own; both, or one
alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from locater.families.record import Block, Family
from locater.families.shared_shapes import layer_of_maps
from locater.layers.build import expect_layers, integer, norm_layout
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

TEXT = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 12, "layer_norm_eps": 1e-5}
VISION = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "layer_norm_eps": 1e-5}
PATTERN = r"encoder\.layers\.(?P<layer>\d+)\.self_attn\.q_proj\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    for name, prefix, settings in towers(weights, config, TEXT, VISION):
        yield from tower_layers(weights, settings, prefix, causal=name == "text")


def towers(weights: Weights, config: Config, text: Config, vision: Config) -> Iterator[tuple[str, str, Config]]:
    """(text or vision, pattern of its tensors' prefix, settings) of every tower that is there; `text` and `vision` are
    defaults.
    """
    single = re.fullmatch(r".+_(text|vision)_model", config["model_type"])
    if single:
        yield single[1], r"(.*\.)?", {**(text if single[1] == "text" else vision), **config}
        return
    pairs = [
        (name, rf"(.*\.)?{name}_model\.", sub_config(config, name, defaults))
        for name, defaults in (("text", text), ("vision", vision))
    ]
    there = [pair for pair in pairs if any(re.match(pair[1] + PATTERN, tensor) for tensor in weights.names())]
    # a model for classification has one tower; where there is none, reading the first says so
    yield from there or pairs


def sub_config(config: Config, name: str, defaults: Config) -> Config:
    """Settings of one tower. Old files may have both `text_config_dict` and `text_config`: then only the former is
    used.
    """
    old: dict[str, Any] | None = config.get(f"{name}_config_dict")
    return {**defaults, **((config.get(f"{name}_config") or {}) if old is None else old)}


def tower_layers(weights: Weights, config: Config, prefix: str, causal: bool) -> Iterator[AttentionLayout]:
    """Layers of one tower; `prefix` is a pattern."""
    heads, width = integer(config, weights, "num_attention_heads"), integer(config, weights, "hidden_size")
    matches = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, f"(?P<prefix>{prefix}){PATTERN}")]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    for where, index in matches:
        block = f"{where}encoder.layers.{index}"
        stem = f"{block}.self_attn"
        yield layer_of_maps(
            weights,
            stem,
            index,
            [f"{stem}.{part}_proj" for part in ("q", "k", "v", "out")],
            (heads, heads, width),
            ["num_attention_heads, hidden_size"] * 2,
            norm_layout(weights, f"{block}.layer_norm1", "layer", config["layer_norm_eps"]),
            causal=causal,
        )


TOWER_BLOCK = Block(
    attention="self_attn",
    before_attention="layer_norm1",
    before_mlp="layer_norm2",
    mlp="mlp",
    up="mlp.fc1",
    down="mlp.fc2",
    stack="encoder.layers",
    final=("final_layer_norm",),  # of the text tower: post_layernorm of the other sees the pooled token alone
)
FAMILY = Family(("clip", "clip_text_model", "clip_vision_model"), layers, TOWER_BLOCK)
