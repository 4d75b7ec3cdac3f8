"""gpt-oss: a learned sink per head joins every softmax, biases everywhere, yarn rotary positions, every other layer
slides a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.build import present
from locater.layers.layout import AttentionLayout, SinksLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    config = {"head_dim": 64, **config}
    types = config.get("layer_types")
    for layer in decoder_layers(weights, config):
        sliding = types[layer.index] == "sliding_attention" if types else layer.index % 2 == 0
        sinks = present(weights, f"{layer.name}.sinks")
        yield layer.with_logits(
            sinks=None if sinks is None else SinksLayout(sinks),
            window=config.get("sliding_window", 128) if sliding else None,
        )


BLOCK = replace(LLAMA_BLOCK, mlp="mlp.experts", up=None, down=None)
FAMILY = Family(("gpt_oss",), layers, BLOCK)
