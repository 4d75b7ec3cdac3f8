"""Qwen 3, dense and mixture-of-experts: the plain decoder with normalised queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.qwen2 import window
from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.build import norm_layout
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    eps = config.get("rms_norm_eps", 1e-6)
    for layer in decoder_layers(weights, {"head_dim": 128, **config} if config["model_type"] == "qwen3" else config):
        yield replace(
            layer,
            query_norm=norm_layout(weights, f"{layer.name}.q_norm", "rms", eps),
            key_norm=norm_layout(weights, f"{layer.name}.k_norm", "rms", eps),
        ).with_logits(window=_window(config, layer.index))


def _window(config: Config, index: int) -> int | None:
    if config["model_type"] == "qwen3_moe":  # every layer, or none
        return config.get("sliding_window") if config.get("use_sliding_window") else None
    return window(config, index)


FAMILY = Family(("qwen3", "qwen3_moe"), layers, LLAMA_BLOCK)
