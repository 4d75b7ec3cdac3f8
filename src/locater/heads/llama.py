"""Llama, SmolLM and Mistral: the plain decoder; Mistral may slide a window over every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.heads.decoder import decoder_layers
from locater.heads.layer import AttentionLayer
from locater.heads.readers import Config
from locater.heads.weights import Weights

MODEL_TYPES = ("llama", "mistral")


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    window = config.get("sliding_window", 4096) if config["model_type"] == "mistral" else None
    for layer in decoder_layers(weights, config):
        yield replace(layer, window=window)
