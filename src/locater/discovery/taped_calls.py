"""Every softmax attention of a forward pass on tape, with the tensors that it was computed from.

An attention is a fused call, or a softmax of logits (`calls.recognise`). This module only finds places on the tape;
`linear_per_token` finds what is between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from locater.calls.function_table import CASTS, FUSED, JOINS, KEEPING, LARGEST, fused_arguments
from locater.calls.recognise import makes_logits, softmax_axis
from locater.discovery.tape import Node, Tape, replay
from locater.errors import UnreadableError

PRODUCTS = frozenset({"matmul", "baddbmm"})  # others are written down as these
TRANSPOSING = frozenset("transpose permute movedim mT T t mH H adjoint".split())
MASKED = -1e4  # a logit below this is masked


@dataclass(frozen=True)
class TapedCall:
    """One attention. `product` and `logits` are None for a fused call, which keeps them to itself."""

    path: str  # of the innermost module around it that has parameters
    query: Node
    key: Node
    key_transposed: bool  # the last axis of the node of keys is that of tokens
    event: Node  # the fused call, or the softmax
    product: Node | None = None
    logits: Node | None = None
    sink: Node | None = None  # (..., T, 1): a logit that joins the softmax of each row
    query_transposed: bool = False

    @property
    def length(self) -> int:
        """The number of queries."""
        return self.query.value.shape[-1 if self.query_transposed else -2]


def attention_calls(tape: Tape, with_parameters: set[str]) -> Iterator[TapedCall]:
    """The attention calls of a tape, in order."""
    products: dict[
        Node, tuple[Node, bool]
    ] = {}  # of logits: the product, and whether its axes were put in another order
    for node in tape.nodes:
        path = next((path for path in reversed(node.modules) if path in with_parameters), "")
        if node.name == FUSED and node.part is None:
            arguments = arguments_of_fused(node)
            yield TapedCall(path, arguments["query"], arguments["key"], False, node)
        elif node.name == "softmax":
            if node.inputs and node.inputs[0] in products and _over_last_axis(node):
                call = _of_softmax(tape, path, node, *products[node.inputs[0]])
                if call is not None:
                    yield call
        elif node.name in PRODUCTS and len(node.inputs) > 1 and all(x.moving for x in node.inputs[-2:]):
            products[node] = node, False
        else:
            before = [
                products[x] for x in node.inputs if x in products and makes_logits(node.name, x.value, node.value)
            ]
            if before:  # the first is that of contents, where distances have products of their own
                product, turned = min(before, key=lambda known: known[0].order)
                products[node] = product, turned or node.name in TRANSPOSING


def _of_softmax(tape: Tape, path: str, node: Node, product: Node, turned: bool) -> TapedCall | None:
    """The call of a softmax; None where its weights sum to 1 over something else than keys."""
    logits, sink = _without_sink(_before_shift(_before_casts(_before_moves(_before_signs(node.inputs[0])))), product)
    left, right = product.inputs[-2:]
    if not turned or 1 in product.value.shape[-2:] or _varies(logits, product, -1):
        return TapedCall(path, left, right, True, node, product, logits, sink)
    if not _varies(logits, product, -2):
        return None  # over heads
    call = TapedCall(path, right, left, False, node, product, logits, sink, True)  # (k @ q.mT).mT
    return call if _is_over_keys(tape, call) else None


def _over_last_axis(softmax: Node) -> bool:
    """Whether weights sum to 1 over the last axis, that of keys. Over queries or heads they are of another kind."""
    ndim = softmax.value.ndim
    return softmax_axis(softmax.args, softmax.kwargs, ndim) == ndim - 1


def _is_over_keys(tape: Tape, call: TapedCall) -> bool:
    """Whether the axis over which weights sum to 1 is that over which values are added. With weights for one of its
    places alone, every token has that value; where they sum to 1 over queries, one token alone has any.
    """
    try:
        result = mixed_values(tape, call).result
    except UnreadableError:
        return not any(_is_transpose(after, call.event) for after in tape.consumers(call.event))
    weights = torch.zeros_like(call.event.value)
    weights[..., 0] = 1.0
    return bool((replay(result, {call.event: weights}) != 0).double().mean() > 0.75)


def _varies(logits: Node, product: Node, axis: int) -> bool:
    """Whether the last axis of logits is this axis of their product."""
    codes = 1e-3 * torch.arange(1, product.value.shape[axis] + 1).to(product.value)
    codes = codes if axis == -1 else codes[:, None]
    given = (codes.expand(product.value.shape).clone(), torch.zeros_like(product.value))
    one, zero = (replay(logits, {product: x}) for x in given)
    change = (one - zero).masked_fill(~(zero > MASKED), 0.0)
    shown = change.abs() > 1e-12
    apart = change.masked_fill(~shown, -torch.inf).amax(-1) - change.masked_fill(~shown, torch.inf).amin(-1)
    return bool((apart[shown.any(-1)] > 1e-3 * change.abs().max()).any())


def _before_signs(logits: Node) -> Node:
    """Logits as they were before their sign was turned twice: those of softmin(-L)."""
    while logits.name == "neg" and logits.inputs and logits.inputs[0].name == "neg":
        logits = logits.inputs[0].inputs[0]
    return logits


def _before_moves(logits: Node) -> Node:
    """The same logits as they were before their axes were moved there and back."""
    node = same = logits
    for _ in range(4):
        if node.name not in TRANSPOSING or len(node.inputs) != 1:
            break
        node = node.inputs[0]
        same = node if node.value.shape == logits.value.shape and torch.equal(node.value, logits.value) else same
    return same


def _before_casts(logits: Node) -> Node:
    """Logits as they were before a cast for the softmax."""
    while logits.name in CASTS | {"contiguous"} and logits.inputs and logits.inputs[0].value.dtype == torch.float64:
        logits = logits.inputs[0]
    return logits


def _before_shift(logits: Node) -> Node:
    """Logits as they were before the largest of a row was taken off, which softmax does not see."""
    if logits.name == "sub" and len(logits.inputs) == 2:
        start, largest = logits.inputs
        for _ in range(4):
            if largest.name in LARGEST and largest.inputs and largest.inputs[0] is start:
                return _before_casts(start)
            if not largest.inputs:
                break
            largest = largest.inputs[0]
    return logits


def _without_sink(logits: Node, product: Node) -> tuple[Node, Node | None]:
    """(logits of the keys, the logit that was put behind them)."""
    if logits.name in JOINS and len(logits.inputs) == 2:
        keys, sink = logits.inputs
        if keys.value.shape[-1] == product.value.shape[-1] and sink.value.shape[-1] == 1 and not sink.moving:
            return _before_casts(keys), sink
    return logits, None


def arguments_of_fused(node: Node) -> dict[str, Any]:
    """Arguments of a fused call by name."""
    return fused_arguments(node.args, node.kwargs)


@dataclass(frozen=True)
class MixedValues:
    """Weights times values of a call, and the values."""

    result: Node  # (..., T, h)
    values: Node
    values_transposed: bool = False  # the last axis of their node is that of tokens


def mixed_values(tape: Tape, call: TapedCall) -> MixedValues:
    """What the weights of a call multiply, and the result."""
    if call.product is None:
        return MixedValues(call.event, arguments_of_fused(call.event)["value"])
    todo, seen = [call.event], {call.event}
    found: list[MixedValues] = []
    while todo:
        weights = todo.pop()
        for after in tape.consumers(weights):
            if after.name in PRODUCTS and len(after.inputs) > 1 and all(x.moving for x in after.inputs[-2:]):
                values = after.inputs[-1]
                if values is not weights:
                    found.append(MixedValues(after, values))
                    continue
                turned = next((x for x in tape.consumers(after) if _is_transpose(x, after)), None)
                if turned is not None:  # (v.mT @ P.mT).mT
                    found.append(MixedValues(turned, after.inputs[-2], True))
            elif after.name in KEEPING and after not in seen:
                seen.add(after)
                todo.append(after)
    if not found:
        raise UnreadableError("what its weights multiply is not a plain product with values")
    # of heads one at a time there is the product of all of them, too (`tape.canonical_calls`)
    return max(found, key=lambda mixed: (mixed.result.value.numel(), -mixed.result.order))


def _is_transpose(node: Node, other: Node) -> bool:
    turned = other.value.mT
    return node.name in TRANSPOSING and node.value.shape == turned.shape and torch.equal(node.value, turned)
