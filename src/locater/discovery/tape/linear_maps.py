"""Walking along a tape: which maps by a parameter, and which norms, a value was computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locater.calls.function_table import ADDS, KEEPING
from locater.discovery.tape.recording import Node, Tape


@dataclass(frozen=True)
class LinearMap:
    """A product of an activation with a parameter. `weight` is (out, in), as the call used it."""

    node: Node  # what the call returned
    source: Node  # the activation
    constant: Node  # the parameter, or what was made of it
    weight: Tensor
    bias: Node | None


RESHAPING = frozenset(
    "view reshape unflatten flatten squeeze unsqueeze contiguous dropout ravel view_as reshape_as".split()
)


def linear_map(tape: Tape, node: Node) -> LinearMap | None:
    """`node` as a product of an activation with one parameter, its bias included; None where it is something else."""
    args = [*node.args, *node.kwargs.values()]
    if node.name in ADDS and len(args) == 2:
        return _with_bias_term(tape, node, args)
    if node.name == "linear" and len(args) > 1:
        source, constant = args[:2]
        bias = args[2] if len(args) > 2 and isinstance(args[2], Node) else None
        return _linear_map_of(tape, node, source, constant, False, bias)
    if node.name == "addmm" and len(args) > 2:
        return _linear_map_of(tape, node, args[1], args[2], True, args[0])
    if node.name == "matmul" and len(args) == 2:
        source, constant = args
        if isinstance(source, Node) and isinstance(constant, Node) and source.moving and not constant.moving:
            return _linear_map_of(tape, node, source, constant, True, None)
    return None


def _with_bias_term(tape: Tape, node: Node, terms: list[Any]) -> LinearMap | None:
    """A product with a parameter, plus a vector of parameters: a bias that a call of its own adds."""
    for product, bias in (terms, terms[::-1]):
        if not isinstance(product, Node) or not isinstance(bias, Node) or bias.moving:
            continue
        while product.name in RESHAPING and product.inputs:
            product = product.inputs[0]
        linear = None if product.name in ADDS else linear_map(tape, product)
        if linear is not None and linear.bias is None and bias.value.shape == node.value.shape[-1:]:
            return replace(linear, node=node, bias=bias) if len(bias.value) == len(linear.weight) else None
    return None


def with_bias(tape: Tape, linear: LinearMap) -> LinearMap:
    """The same map with the bias that is added to its result, if nothing else reads that."""
    node = linear.node
    while len(after := tape.consumers(node)) == 1 and after[0].name in RESHAPING:
        node = after[0]
    biased = linear_map(tape, after[0]) if len(after) == 1 and after[0].name in ADDS else None
    return biased or linear


def _linear_map_of(
    tape: Tape, node: Node, source: Node, constant: Node, transposed: bool, bias: Node | None
) -> LinearMap | None:
    if constant.moving or constant.value.ndim != 2 or tape.parameter(constant) is None:
        return None
    weight = constant.value.mT if transposed else constant.value
    return LinearMap(node, source, constant, weight, bias)


@dataclass(frozen=True)
class Upstream:
    """What a value was computed from, back to the nearest maps."""

    maps: list[LinearMap]
    norms: list[Node]  # norms passed on the way, the latest first
    loose: bool  # the tokens themselves are met beside the maps
    names: set[str]  # of the calls in between


def upstream(tape: Tape, node: Node, is_norm: Callable[[Node], bool], stop: Collection[Node] = ()) -> Upstream:
    """Walk back from `node` to the nearest maps."""
    maps, norms, loose, names = [], [], False, set()
    seen: set[Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n in seen or not n.moving or n in stop:
            continue
        seen.add(n)
        if is_norm(n):
            norms.append(n)
        linear = linear_map(tape, n)
        if linear is not None:
            maps.append(linear)
        elif n.func is None or n.name == "embedding":
            loose = True
        else:
            names.add(n.name)
            todo += n.inputs
    return Upstream(maps, sorted(norms, key=lambda n: -n.order), loose, names)


def moved_from(node: Node, stops: Callable[[Node], bool], unchanged: bool = False) -> Node | None:
    """The first node on the way back, through calls that only move numbers, for which `stops` is true. With
    `unchanged`, calls that gave back the numbers of one of their inputs are passed, too: a mask that hides no token
    multiplies by 1.
    """
    for _ in range(60):
        if stops(node):
            return node
        moving = [x for x in node.inputs if x.moving] or node.inputs  # learned tokens move through nothing but maps
        same = next((x for x in moving if _equal(x.value, node.value)), None) if unchanged else None
        if same is None and (node.name not in KEEPING or len(moving) != 1):
            return None
        node = moving[0] if same is None else same
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
