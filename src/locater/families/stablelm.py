"""StableLM: the plain decoder with LayerNorm, a quarter of the channels turns, queries and keys may have a norm for
each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from locater.families.decoder import LLAMA_BLOCK, decoder_layers
from locater.families.record import Block, Family
from locater.layers.build import norm, read_floats
from locater.layers.layer import AttentionLayer, Projection
from locater.layers.norm import Norm
from locater.layers.normed import normed
from locater.layers.rotary import rotary_from_config
from locater.sources.sources import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    eps = config.get("layer_norm_eps", 1e-5)
    for layer in decoder_layers(weights, {"num_key_value_heads": 32, **config}):
        before = norm(weights, f"{layer.name.removesuffix('.self_attn')}.input_layernorm", "layer", eps)
        query, key = layer.query, layer.key
        if config.get("qk_layernorm"):
            query = _normed(weights, query, f"{layer.name}.q_layernorm", before, layer.heads)
            key = _normed(weights, key, f"{layer.name}.k_layernorm", before, layer.kv_heads)
        rotary = rotary_from_config(config, layer.head_dim, share=0.25)
        yield replace(layer, query=query, key=key, norm=before, rotary=rotary)


def _normed(weights: Weights, whole: Projection, stem: str, before: Norm, heads: int) -> Projection:
    gain = torch.stack([read_floats(weights, f"{stem}.norms.{head}.weight") for head in range(heads)])
    return normed(whole, Norm("layer", gain, None, before.eps), before, blocks=heads)


def block(config: Config) -> Block:
    if config.get("use_parallel_residual"):
        return replace(LLAMA_BLOCK, norm="layer", before_mlp=None, parallel=True)
    return replace(LLAMA_BLOCK, norm="layer")


FAMILY = Family(("stablelm",), layers, block)
