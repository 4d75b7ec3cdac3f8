"""Every softmax attention of a forward pass on tape, with the tensors that it was computed from.

An attention is a fused call, or a softmax whose input leads back, through calls that only move, scale, cap or mask
logits, to a product of two activations. This module only finds places on the tape; `probing` tells what is
between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from locater.discovery.errors import UnreadableError
from locater.discovery.tape import Node, Tape
from locater.discovery.tape.walking import MOVING

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
    sink: Node | None = None  # (..., T, 1): a logit that joins the softmax of each row


def attention_calls(tape: Tape, with_parameters: set[str]) -> Iterator[Call]:
    """The attention calls of a tape, in order."""
    for node in tape.nodes:
        path = next((path for path in reversed(node.modules) if path in with_parameters), "")
        if node.name == FUSED and node.part is None:
            arguments = {**dict(zip(("query", "key", "value"), node.args, strict=False)), **node.kwargs}
            yield Call(path, arguments["query"], arguments["key"], False, node)
        elif node.name in SOFTMAX and node.moving and node.inputs and _over_last_axis(node):
            products = list(_products(tape, node.inputs[0]))
            if products:  # the first is that of contents, where distances have products of their own
                product = min(products, key=lambda n: n.order)
                query, key = product.inputs[-2:]
                logits, sink = _without_sink(_before_shift(_before_casts(node.inputs[0])), product)
                yield Call(path, query, key, True, node, product, logits, sink)


def _over_last_axis(softmax: Node) -> bool:
    """Whether weights sum to 1 over the last axis, that of keys. Over queries or heads they are of another kind."""
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    return dim in (-1, softmax.value.ndim - 1)


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


def _before_shift(logits: Node) -> Node:
    """Logits as they were before the largest of a row was taken off, which softmax does not see."""
    if logits.name in ("sub", "__sub__") and len(logits.inputs) == 2:
        start, largest = logits.inputs
        for _ in range(4):
            if largest.name in ("amax", "max") and largest.inputs and largest.inputs[0] is start:
                return _before_casts(start)
            if not largest.inputs:
                break
            largest = largest.inputs[0]
    return logits


def _without_sink(logits: Node, product: Node) -> tuple[Node, Node | None]:
    """(logits of the keys, the logit that was put behind them)."""
    if logits.name in ("cat", "concat") and len(logits.inputs) == 2:
        keys, sink = logits.inputs
        if keys.value.shape[-1] == product.value.shape[-1] and sink.value.shape[-1] == 1 and not sink.moving:
            return _before_casts(keys), sink
    return logits, None


def fused_arguments(node: Node) -> dict[str, Any]:
    """Arguments of a fused call by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


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
