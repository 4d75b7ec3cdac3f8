"""DINOv2, with and without registers: a ViT whose layers scale their outputs, channel by channel, before
adding them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Block, Family
from locater.families.vit import vit_layers
from locater.layers.build import scaled_rows
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    config = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "layer_norm_eps": 1e-6, **config}
    for layer in vit_layers(weights, config, "norm1"):
        block = re.sub(r"(\.attention)+$", "", layer.name)
        assert layer.out is not None
        yield replace(layer, out=scaled_rows(weights, layer.out, f"{block}.layer_scale1.lambda1"))


BLOCK = Block(
    attention="attention",
    before_attention="norm1",
    before_mlp="norm2",
    mlp="mlp",
    up="mlp.fc1",
    down="mlp.fc2",
    mlp_scale="layer_scale2.lambda1",
    stack="encoder.layer",
    final="layernorm",
)
FAMILY = Family(("dinov2", "dinov2_with_registers"), layers, BLOCK)
