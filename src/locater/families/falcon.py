"""Falcon: one fused map of groups (queries of a group, its key, its value), rotary positions or ALiBi.

With ALiBi, transformers' sdpa path adds the bias once, as the model was trained, and its eager path twice: this family
reads the model as sdpa runs it. The bias is kept in bfloat16, so far keys share one value: `RoundedAlibi` follows that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.checkpoints.sources import Config
from locater.checkpoints.weights import Rows, Weights, numbered
from locater.families.bias import Alibi, alibi_slopes
from locater.families.build import expect, expect_layers, integer, norm, projection, shape_of
from locater.families.layer import AttentionLayer
from locater.families.rotary import rotary_from_config

MODEL_TYPES = ("falcon",)
PATTERN = r"(?P<prefix>(.*\.)?)h\.(?P<layer>\d+)\.self_attention\.query_key_value\.weight"


@dataclass(frozen=True)
class RoundedAlibi(Alibi):
    """scale * (slope * key position, rounded to bfloat16, less slope * query position): a staircase of -slope *
    distance.

    The steps depend on the key's own position, counted from the first real token.
    """

    scale: float = 1.0

    def __call__(self, queries: Int[Tensor, " T"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H T S"]:
        slopes = self.slopes.to(keys.device, torch.bfloat16)
        there = (slopes[:, None] * keys).double()  # (H, S); the product is rounded too
        return self.scale * (there[:, None] - slopes.double()[:, None, None] * queries[:, None])


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    heads = integer(config, weights, "num_attention_heads", "n_head")
    width = integer(config, weights, "n_embed", "hidden_size")
    head_dim, kv_heads = width // heads, _kv_heads(config, heads)
    alibi = RoundedAlibi(alibi_slopes(heads), head_dim**-0.5) if config.get("alibi") else None
    found = [(m["prefix"], int(m["layer"]), name) for m, name in numbered(weights, PATTERN)]
    expect_layers(weights, len(found), config, "num_hidden_layers", "n_layer")
    for prefix, index, name in found:
        block = f"{prefix}h.{index}"
        stem = f"{block}.self_attention"
        rows = (heads + 2 * kv_heads) * head_dim
        expect(
            weights,
            name,
            shape_of(weights, name),
            (rows, width),
            "(query heads + 2 x key heads) x head size, hidden_size",
        )
        q, k, v = (projection(weights, f"{stem}.query_key_value", rows) for rows in grouped(heads, kv_heads, head_dim))
        own = f"{block}.ln_attn"  # where attention and MLP run side by side each may have a norm of its own
        before = own if f"{own}.weight" in weights.names() else f"{block}.input_layernorm"
        yield AttentionLayer(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query=q,
            key=k,
            value=v,
            out=projection(weights, f"{stem}.dense"),
            scale=head_dim**-0.5,
            norm=norm(weights, before, "layer", config.get("layer_norm_epsilon", 1e-5)),
            rotary=None if alibi else rotary_from_config(config, head_dim),
            bias=alibi,
            causal=True,
        )


def _kv_heads(config: Config, heads: int) -> int:
    if config.get("new_decoder_architecture"):
        return config.get("num_kv_heads") or heads
    return 1 if config.get("multi_query", True) else heads


def grouped(heads: int, kv_heads: int, head_dim: int) -> tuple[Rows, Rows, Rows]:
    """Rows of queries, keys and values in a map of groups: the queries of a group, its key, its value."""
    group = heads // kv_heads
    starts = [g * (group + 2) * head_dim for g in range(kv_heads)]
    keys = [start + group * head_dim for start in starts]
    return (
        [(start, key) for start, key in zip(starts, keys, strict=True)],
        [(key, key + head_dim) for key in keys],
        [(key + head_dim, key + 2 * head_dim) for key in keys],
    )
