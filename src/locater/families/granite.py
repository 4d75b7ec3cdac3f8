"""Granite 3, dense and mixture-of-experts: the plain decoder with a logit scale of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Block, Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    for layer in decoder_layers(weights, config):
        yield layer.with_logits(scale=config.get("attention_multiplier", 1.0))


def block(config: Config) -> Block:
    mlp = "mlp" if config.get("model_type") == "granite" else "block_sparse_moe"
    multiplier = config.get("residual_multiplier", 1.0)
    return replace(LLAMA_BLOCK, mlp=mlp, experts=f"{mlp}.experts", multiplier=multiplier)


FAMILY = Family(("granite", "granitemoe"), layers, block)
