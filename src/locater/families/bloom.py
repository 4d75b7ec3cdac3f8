"""BLOOM: ALiBi in place of position embeddings, one fused map whose rows are ordered head by head.

transformers adds slope * key position where the paper subtracts slope * distance; the two differ by a number per query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from locater.calls.call_and_masks import Call
from locater.calls.patching import RecordedCall, Undo, cached_keys, record_parts
from locater.errors import LocaterError
from locater.families.gpt_neox import per_head
from locater.families.record import Block, Family
from locater.kernels import Terms
from locater.layers.build import expect, expect_layers, integer, map_layout, norm_layout, shape_of
from locater.layers.layout import AlibiLayout, AttentionLayout, LogitsLayout
from locater.layers.position_biases import published_slopes
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered
from locater.torch_private import split_bloom

PATTERN = r"(?P<prefix>(.*\.)?)h\.(?P<layer>\d+)\.self_attention\.query_key_value\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    heads = integer(config, weights, "n_head", "num_attention_heads")
    width = integer(config, weights, "n_embed", "hidden_size")  # the old name wins where both are given
    head_dim = width // heads
    matches = [(m["prefix"], int(m["layer"]), name) for m, name in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "n_layer", "num_hidden_layers")
    for prefix, index, name in matches:
        block = f"{prefix}h.{index}"
        stem = f"{block}.self_attention"
        shape, why = (3 * heads * head_dim, width), "3 x n_head x head size, hidden_size"
        expect(weights, name, shape_of(weights, name), shape, why)
        q, k, v = (map_layout(weights, f"{stem}.query_key_value", per_head(heads, head_dim, 3, i)) for i in range(3))
        out = map_layout(weights, f"{stem}.dense")
        if config.get("slow_but_exact") and (config.get("pretraining_tp") or 1) > 1:
            out = replace(out, bias=None)  # this path multiplies slice by slice and leaves the bias out
        yield AttentionLayout(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=q,
            key=k,
            logits=LogitsLayout(head_dim**-0.5, bias=AlibiLayout(published_slopes(heads)), causal=True),
            value=v,
            out=out,
            norm=norm_layout(weights, f"{block}.input_layernorm", "layer", config.get("layer_norm_epsilon", 1e-5)),
        )


BLOCK = Block(
    attention="self_attention",
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    up="mlp.dense_h_to_4h",  # the module `mlp` adds the skip itself
    down="mlp.dense_4h_to_h",
    stack="h",
    final="ln_f",
)


def block(config: Config) -> Block:
    if config.get("apply_residual_connection_post_layernorm"):
        raise LocaterError("apply_residual_connection_post_layernorm takes the skip after the norm: not supported")
    if config.get("slow_but_exact") and (config.get("pretraining_tp") or 1) > 1:
        raise LocaterError("slow_but_exact multiplies outside of the block's modules: set it to false")
    return BLOCK


def tap(module: nn.Module) -> Iterator[Undo]:
    """ALiBi, mask and cache are arguments of the call."""
    yield from record_parts(module, _described, outputs=["query_key_value"], inputs=["dense"])


def _described(module: Any, recorded: RecordedCall) -> Call:
    q, k, _ = split_bloom(module, recorded.tensors["query_key_value"])
    alibi = recorded.argument(2, "alibi").detach()
    k = cached_keys(module, recorded.argument(4, "layer_past"), k, alibi.shape[-1])
    bias = module.beta * alibi.view(q.shape[0], module.num_heads, 1, -1)
    output = recorded.heads("dense", module.num_heads)  # not called with slow_but_exact
    call = Call(q, k, Terms(float(module.inv_norm_factor), bias=bias), output)
    mask = recorded.argument(3, "attention_mask")
    return call if mask is None else call.masked(mask.detach(), added=True)


FAMILY = Family(("bloom",), layers, block, tap)
