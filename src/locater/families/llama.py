"""Llama, SmolLM, Mistral and Mixtral: the plain decoder; the last two may slide a window over every layer."""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

WINDOWS = {"llama": None, "mistral": 4096, "mixtral": None}  # where the configuration does not say


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    kind = config["model_type"]
    window = None if kind == "llama" else config.get("sliding_window", WINDOWS[kind])
    for layer in decoder_layers(weights, config):
        yield layer.with_logits(window=window)


FAMILY = Family(("llama", "mistral", "mixtral"), layers, LLAMA_BLOCK)
