"""Qwen 2 and 2.5: the plain decoder with biases on queries, keys and values; upper layers may slide a window."""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers, window_of
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    for layer in decoder_layers(weights, config):
        yield layer.with_logits(window=window(config, layer.index))


def window(config: Config, index: int) -> int | None:
    """Sliding window of a layer, in this family's way of saying it."""
    if not config.get("use_sliding_window"):
        return None
    if config.get("layer_types"):
        return window_of(config, index)
    return config.get("sliding_window") if index >= config.get("max_window_layers", 28) else None


FAMILY = Family(("qwen2",), layers, LLAMA_BLOCK)
