"""Granite 3, dense and mixture-of-experts: the plain decoder with a logit scale of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.checkpoints.sources import Config
from locater.checkpoints.weights import Weights
from locater.families.decoder import decoder_layers
from locater.families.layer import AttentionLayer

MODEL_TYPES = ("granite", "granitemoe")


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    for layer in decoder_layers(weights, config):
        yield replace(layer, scale=config.get("attention_multiplier", 1.0))
