"""OPT: LayerNorm in front of attention, or, in the 350M model, behind the layer before; its eps is not in the
configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Block, Family
from locater.families.shared_shapes import decoder_layers
from locater.layers.build import norm_layout
from locater.layers.layout import AttentionLayout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

EPS = 1e-5  # the default of nn.LayerNorm


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    before, affine = config.get("do_layer_norm_before", True), config.get("layer_norm_elementwise_affine", True)
    for layer in decoder_layers(weights, config, out="out_proj", normed=False):
        stack = layer.name.removesuffix(f".{layer.index}.self_attn")
        if before:
            here = norm_layout(weights, f"{stack}.{layer.index}.self_attn_layer_norm", "layer", EPS, affine=affine)
        elif layer.index:
            here = norm_layout(weights, f"{stack}.{layer.index - 1}.final_layer_norm", "layer", EPS, affine=affine)
        else:  # embeddings enter the first layer as they are
            here = NormLayout()
        yield replace(layer, norm=here, rotary=None)


PRE_NORM = Block(
    attention="self_attn",
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    up="fc1",
    down="fc2",
    final=("final_layer_norm",),
)
POST_NORM = Block(
    attention="self_attn",
    after_attention="self_attn_layer_norm",
    after_mlp="final_layer_norm",
    up="fc1",
    down="fc2",
)


def block(config: Config) -> Block:
    return PRE_NORM if config.get("do_layer_norm_before", True) else POST_NORM


FAMILY = Family(("opt",), layers, block)
