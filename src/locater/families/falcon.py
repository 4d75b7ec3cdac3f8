"""Falcon: one fused map of groups (queries of a group, its key, its value), rotary positions or ALiBi.

With ALiBi, transformers' sdpa path adds the bias once, as the model was trained, and its eager path twice: this family
reads the model as sdpa runs it. The bias is computed in bfloat16, so far keys share one value: see `RoundedAlibi`
in layers/position_biases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.patching import RecordedCall, Undo, cached_keys, record_parts
from locater.errors import LocaterError
from locater.families.record import Block, Family, Part
from locater.kernels import Terms
from locater.layers.build import expect, expect_layers, integer, map_layout, norm_layout, shape_of
from locater.layers.layout import AlibiLayout, AttentionLayout, LogitsLayout, rotary_layout
from locater.layers.position_biases import published_slopes
from locater.sources.open_source import Config
from locater.sources.weights import Rows, Weights, numbered
from locater.torch_private import attention_implementation, split_falcon

PATTERN = r"(?P<prefix>(.*\.)?)h\.(?P<layer>\d+)\.self_attention\.query_key_value\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    heads = integer(config, weights, "num_attention_heads", "n_head")
    width = integer(config, weights, "n_embed", "hidden_size")
    head_dim, kv_heads = width // heads, _kv_heads(config, heads)
    alibi = AlibiLayout(published_slopes(heads), rounded=head_dim**-0.5) if config.get("alibi") else None
    matches = [(m["prefix"], int(m["layer"]), name) for m, name in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "num_hidden_layers", "n_layer")
    for prefix, index, name in matches:
        block = f"{prefix}h.{index}"
        stem = f"{block}.self_attention"
        shape, why = (
            ((heads + 2 * kv_heads) * head_dim, width),
            "(query heads + 2 x key heads) x head size, hidden_size",
        )
        expect(weights, name, shape_of(weights, name), shape, why)
        q, k, v = (map_layout(weights, f"{stem}.query_key_value", rows) for rows in grouped(heads, kv_heads, head_dim))
        own = f"{block}.ln_attn"  # where attention and MLP run side by side each may have a norm of its own
        before = own if f"{own}.weight" in weights.names() else f"{block}.input_layernorm"
        yield AttentionLayout(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query=q,
            key=k,
            logits=LogitsLayout(head_dim**-0.5, bias=alibi, causal=True),
            value=v,
            out=map_layout(weights, f"{stem}.dense"),
            norm=norm_layout(weights, before, "layer", config.get("layer_norm_epsilon", 1e-5)),
            rotary=None if alibi else rotary_layout(config, head_dim),
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


def block(config: Config) -> Block:
    newer = config.get("new_decoder_architecture")
    parallel = bool(newer or config.get("parallel_attn", True))
    if newer and not config.get("parallel_attn", True):
        raise LocaterError("new_decoder_architecture without parallel_attn is no architecture of Falcon's")
    before_mlp: Part = None if parallel else "post_attention_layernorm"
    return Block(
        attention="self_attention",
        before_attention=("ln_attn", "input_layernorm"),
        before_mlp="ln_mlp" if newer and config.get("num_ln_in_parallel_attn") != 1 else before_mlp,
        mlp="mlp",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        parallel=parallel,
        stack="h",
        final="ln_f",
    )


def tap(module: nn.Module) -> Iterator[Undo]:
    """Queries and keys are rotated once more here, which costs two products per channel."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    yield from record_parts(
        module, partial(_described, apply_rotary_pos_emb), outputs=["query_key_value"], inputs=["dense"]
    )


def _described(rotate: Callable[..., Any], module: Any, recorded: RecordedCall) -> Call:
    """The mask depends on the implementation: the fused function reads a boolean one, the plain way adds any mask."""
    q, k = (part.transpose(1, 2) for part in split_falcon(module, recorded.tensors["query_key_value"])[:2])
    alibi, mask, past = (
        recorded.argument(1, "alibi"),
        recorded.argument(2, "attention_mask"),
        recorded.argument(4, "layer_past"),
    )
    if alibi is None:
        cos, sin = recorded.argument(7, "position_embeddings")
        q, k = rotate(q, k, cos.detach(), sin.detach())
    k = cached_keys(module, past, k, None if mask is None else mask.shape[-1])
    call = Call(q, k, Terms(float(module.inv_norm_factor)), recorded.heads("dense", module.num_heads))
    if "Flash" in type(module).__name__:
        return call.masked(mask).with_terms(causal=module.is_causal)
    if attention_implementation(module) == "sdpa" and not recorded.argument(6, "output_attentions"):
        return call.masked(mask.detach()) if mask is not None else _causal(call, module)
    return _added(call, mask, None if alibi is None else alibi.detach() * module.inv_norm_factor)


def _causal(call: Call, module: Any) -> Call:
    """The fused function counts from the first key: keys of a cache beyond the queries are not looked at."""
    queries = call.query.shape[2]
    if not module.is_causal or queries == 1:
        return call
    return replace(call.with_terms(causal=True), key=call.key[:, :, :queries])


def _added(call: Call, mask: Tensor | None, alibi: Tensor | None) -> Call:
    """The plain way. ALiBi is in the mask already and is added once more. A boolean mask is added too: it hides no
    key.
    """
    terms = [] if mask is None else [mask.detach().to(call.query)]
    if alibi is not None:
        terms.append(alibi.view(call.query.shape[0], call.query.shape[1], 1, -1))
    return call.masked(sum(terms[1:], terms[0]), added=True) if terms else call


FAMILY = Family(("falcon",), layers, block, tap)
