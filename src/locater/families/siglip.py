"""SigLIP: two towers as in CLIP, neither causal; the vision tower ends in a learned query that looks at all patches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families import torch_mha
from locater.families.clip import TOWER_BLOCK, tower_layers, towers
from locater.families.record import Family
from locater.layers.build import norm_layout
from locater.layers.layout import AttentionLayout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

TOWER = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "layer_norm_eps": 1e-6}


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    for name, prefix, settings in towers(weights, config, TOWER, TOWER):
        yield from tower_layers(weights, settings, prefix, causal=False)
        if name == "vision":
            yield from _pooling(weights, settings)


def _pooling(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    """The last step is PyTorch's own attention. Its query is `head.probe`, without a norm; its keys read the norm that
    closed the tower.
    """
    for layer in torch_mha.layers(weights, config):
        tower = layer.name.removesuffix("head.attention")
        closing = norm_layout(weights, f"{tower}post_layernorm", "layer", config["layer_norm_eps"])
        yield replace(layer, index=0, kind="cross", norm=NormLayout(), memory_norm=closing, unknown_norm=None)


BLOCK = replace(TOWER_BLOCK, final=("final_layer_norm", "post_layernorm"))
FAMILY = Family(("siglip", "siglip_text_model", "siglip_vision_model"), layers, BLOCK)
