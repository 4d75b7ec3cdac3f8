"""Every softmax attention of a forward pass on tape, with the tensors that it was computed from.

An attention is a fused call, or a softmax whose input leads back, through calls that only move, scale, cap or mask
logits, to a product of two activations. This module only finds places on the tape; `discovered_probing` tells what is
between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.families.discovered_norms import NormLayout, fitted, may_be_norm
from locater.tape import Node, Tape, replay
from locater.tape.walking import MOVING, LinearMap, moved_from, moved_to, upstream

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
FUSED = "scaled_dot_product_attention"
SOFTMAX = ("softmax", "_softmax")
LOGIT_STEPS = MOVING | frozenset(
    """mul __mul__ __rmul__ __imul__ mul_ div __truediv__ __itruediv__ div_ add __add__ __radd__ __iadd__ add_ sub
    __sub__ sub_ __isub__ masked_fill masked_fill_ where clamp clamp_min max maximum tanh nan_to_num __setitem__ scatter
    amax written""".split()
)
CASTS = ("float", "to", "type", "type_as", "contiguous")
MASKED = -1e4  # a logit below this is masked


class UnreadableError(LocaterError):
    """Why an attention cannot be read, without the name of its module."""


@dataclass(frozen=True)
class Call:
    """One attention. `product` and `logits` are None for a fused call, which keeps them to itself."""

    path: str  # of the innermost module around it that has parameters
    query: Node
    key: Node
    key_transposed: bool  # the key's last axis is that of tokens
    event: Node  # the fused call, or the softmax
    product: Node | None = None
    logits: Node | None = None


@dataclass(frozen=True)
class Side:
    """Queries, keys or values, back to their map and to the stream that it reads."""

    node: Node
    map: LinearMap
    norms: list[Node]  # between the map and `node`, the latest first
    front: NormLayout  # the norm in front of the map
    stream: Tensor  # x: what that norm read; what the map reads, where no norm is in front of it


def attention_calls(tape: Tape, with_parameters: set[str]) -> Iterator[Call]:
    """The attention calls of a tape, in order."""
    for node in tape.nodes:
        path = next((path for path in reversed(node.modules) if path in with_parameters), "")
        if node.name == FUSED and node.part is None:
            arguments = {**dict(zip(("query", "key", "value"), node.args, strict=False)), **node.kwargs}
            yield Call(path, arguments["query"], arguments["key"], False, node)
        elif node.name in SOFTMAX and node.moving and node.inputs:
            products = list(_products(tape, node.inputs[0]))
            if products:  # the first is that of contents, where distances have products of their own
                product = min(products, key=lambda n: n.order)
                query, key = product.inputs[-2:]
                yield Call(path, query, key, True, node, product, _before_casts(node.inputs[0]))


def _products(tape: Tape, logits: Node) -> Iterator[Node]:
    todo, seen = [logits], {logits}
    while todo:
        node = todo.pop()
        moving = [x for x in node.inputs if x.moving and x.value.ndim > 1]
        if node.name in PRODUCTS and len(node.inputs) > 1 and all(x.moving for x in node.inputs[-2:]):
            yield node
        elif node.name in LOGIT_STEPS:
            fresh = [x for x in moving if x not in seen]
            seen.update(fresh)
            todo += fresh


def _before_casts(logits: Node) -> Node:
    """Logits as they were before a cast for the softmax."""
    while logits.name in CASTS and logits.inputs and logits.inputs[0].value.dtype == torch.float64:
        logits = logits.inputs[0]
    return logits


def mixed_values(tape: Tape, call: Call) -> tuple[Node, Node]:
    """(weights times values, values) of a call."""
    if call.product is None:
        arguments = {**dict(zip(("query", "key", "value"), call.event.args, strict=False)), **call.event.kwargs}
        return call.event, arguments["value"]
    todo, seen = [call.event], {call.event}
    while todo:
        for after in tape.consumers(todo.pop()):
            if after.name in PRODUCTS and len(after.inputs) > 1 and after.inputs[-1].moving:
                return after, after.inputs[-1]
            if after.name in MOVING and after not in seen:
                seen.add(after)
                todo.append(after)
    raise UnreadableError("what its weights multiply is not a plain product with values")


def side(tape: Tape, node: Node, what: str) -> Side:
    """Walk back from queries, keys or values to their one map and its stream."""
    if not node.moving:
        raise UnreadableError(f"its {what} are learned, not computed from tokens")
    before = upstream(tape, node, lambda n: may_be_norm(tape, n))
    if not before.maps:
        raise UnreadableError(f"no map by a parameter is in front of its {what}")
    if before.loose:
        raise UnreadableError(f"tokens that pass no map join its {what}")
    if len(before.maps) > 1:
        names = ", ".join(tape.parameter(part.constant) or "?" for part in before.maps[:3])
        raise UnreadableError(f"its {what} are made of {len(before.maps)} maps ({names})")
    linear = before.maps[0]
    front, stream = _front(tape, linear)
    norms = [norm for norm in before.norms if norm is not linear.node]
    return Side(node, linear, norms, front, stream)


def _front(tape: Tape, linear: LinearMap) -> tuple[NormLayout, Tensor]:
    """(the norm in front of a map, the stream that it reads). Between the two, tokens may be moved. What is no norm, a
    sum with positions for example, or follows no known formula, is left to the stream.
    """
    norm = moved_from(linear.source, lambda n: may_be_norm(tape, n))
    if norm is not None:
        made = tape.made[norm]
        stream = replay(linear.source, {norm: made.source.value})
        layout = fitted(made, stream, linear.source.value)
        if layout is not None:
            return layout, stream
    return NormLayout(), linear.source.value


def out_map(tape: Tape, mixed: Node) -> LinearMap:
    """The one map that reads the mixed values."""
    maps, others = moved_to(tape, mixed)
    if len(maps) == 1 and not others:
        return maps[0]
    if others:
        raise UnreadableError(f"between its mixed values and an output map is {', '.join(sorted(others)[:3])}")
    raise UnreadableError(f"its mixed values are read by {len(maps)} maps")


def split_heads(x: Tensor, tokens: int) -> Tensor:
    """(B, H, T, h) of queries, keys or values that may have batch and heads on one axis; `tokens` is B T."""
    if x.ndim not in (3, 4) or not x.numel() or tokens % x.shape[-2]:
        raise UnreadableError(f"its queries, keys or values have the shape {list(x.shape)}")
    batch = tokens // x.shape[-2]
    if x.ndim == 4 and x.shape[0] == batch:
        return x
    if math.prod(x.shape[:-2]) % batch:
        raise UnreadableError(f"its queries, keys or values have the shape {list(x.shape)} for {tokens} tokens")
    return x.reshape(batch, -1, *x.shape[-2:])


def by_batch(x: Tensor, batch: int, length: int) -> Tensor:
    """A stream (..., d) as (B, T, d); also one with its tokens first, or with all tokens on one axis."""
    if x.numel() // x.shape[-1] != batch * length:
        raise UnreadableError(f"the stream that it reads has the shape {list(x.shape)} for {batch} x {length} tokens")
    if x.ndim == 3 and x.shape[:2] == (length, batch) and batch != length:
        return x.transpose(0, 1)
    return x.reshape(batch, length, x.shape[-1])


def captured_logits(call: Call, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(products, logits, constant part of the logits), all (B, H, T, S), of a call as it ran; `query` (B, H, T, h) and
    `key` (B, H, S, h). Masked entries have a constant part below MASKED.
    """
    products = query @ key.mT
    if call.product is None:
        logits = _fused_logits(call, products)
        constant = _fused_logits(call, torch.zeros_like(products))
    else:
        assert call.logits is not None
        logits = call.logits.value
        constant = replay(call.logits, {call.product: torch.zeros_like(call.product.value)})
    if logits.numel() != products.numel():
        raise UnreadableError(f"its logits have the shape {list(logits.shape)}, its products {list(products.shape)}")
    return products, logits.reshape(products.shape), constant.reshape(products.shape)


def _fused_logits(call: Call, products: Tensor) -> Tensor:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    arguments = {**dict(zip(names, call.event.args, strict=False)), **call.event.kwargs}
    scale = arguments.get("scale")
    logits = products * (call.query.value.shape[-1] ** -0.5 if scale is None else scale)
    mask = arguments.get("attn_mask")
    if mask is not None:
        mask = mask.value.reshape(*(1 for _ in range(4 - mask.value.ndim)), *mask.value.shape)
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(logits)
    if arguments.get("is_causal"):
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~seen, -torch.inf)
    return logits
