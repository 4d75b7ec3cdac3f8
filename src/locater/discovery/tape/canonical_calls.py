"""Calls written down as others that give the same numbers, so that a tape has a few forms of each thing: products as
matrix products, convolutions of one place as linear maps, every softmax as one over the last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from locater.calls.function_table import JOINS, MOVES, PARTING, SOFTMAXES, axis_of, writes_in_place
from locater.calls.recognise import (
    Operation,
    Product,
    broadcast_contraction,
    contraction,
    in_order,
    softmax_axis,
    softmax_written_out,
)
from locater.torch_private import tree_flatten, tree_map


class Origin(NamedTuple):
    """How a tensor was made."""

    name: str  # of the function
    part: str  # its `part_name`
    inputs: list[Tensor]
    moving: bool  # whether it depends on the inputs of the pass


OriginOf = Callable[[Tensor], Origin]


def canonical_form(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], origin: OriginOf
) -> Callable[[], Any] | None:
    """What a call is written down as, to be called in its place; None where it stays as it is."""
    if isinstance(out := kwargs.get("out"), Tensor):
        rest = {key: x for key, x in kwargs.items() if key != "out"}
        return lambda: out.copy_(func(*args, **rest))
    how = _other_form(name, func, args, kwargs, origin)
    if how is None or not writes_in_place(func):
        return how
    return lambda: args[0].copy_(how())


def _other_form(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], origin: OriginOf
) -> Callable[[], Any] | None:
    if (terms := contraction(name, args, kwargs)) is not None:
        return partial(product, terms)
    if name == "rmatmul":
        return lambda: torch.matmul(args[1], args[0])
    if name == "multi_dot":
        return lambda: reduce(torch.matmul, args[0])
    if name == "softmin":
        return lambda: functional.softmax(-args[0], *args[1:], **kwargs)
    if name in SOFTMAXES and args and isinstance(args[0], Tensor):
        return _over_last_axis(func, args, kwargs)
    if name == "sum":
        return _sum_of_products(args, kwargs, origin)
    if name in ("exp", "div"):
        return _whole_softmax(name, args, kwargs, origin)
    if name in ("stack", *JOINS):
        return _joined_products(func, args, kwargs, origin)
    parts = map_of_convolution(func, args, kwargs)
    return None if parts is None else partial(apply_map, *parts)


def product(terms: Product) -> Tensor:
    """The result of a product in the words of einsum, as permutations and one matrix product. The tensor whose own axes
    come first in the result is the left factor.

    >>> a, b = torch.randn(2, 3, 5), torch.randn(4, 2, 5)
    >>> torch.allclose(product(Product("bik,jbk->bji", a, b)), torch.einsum("bik,jbk->bji", a, b), atol=1e-6)
    True
    """
    terms = in_order(terms)
    equation, (one, two) = terms.equation, terms.factors
    words, _, out = equation.partition("->")
    first, _, second = words.partition(",")
    both = [letter for letter in out if letter in first and letter in second]
    summed = [letter for letter in first if letter in second and letter not in out]
    left, right = ([letter for letter in out if letter in part and letter not in both] for part in (first, second))
    sizes = {**dict(zip(first, one.shape, strict=True)), **dict(zip(second, two.shape, strict=True))}
    shape = [sizes[letter] for letter in both]
    a = _arrange_axes(one, first, [*both, *left, *summed], [*shape, _size(sizes, left), _size(sizes, summed)])
    b = _arrange_axes(two, second, [*both, *summed, *right], [*shape, _size(sizes, summed), _size(sizes, right)])
    order = [*both, *left, *right]
    result = torch.matmul(a, b).reshape([sizes[letter] for letter in order])
    return result if order == list(out) else result.permute([order.index(letter) for letter in out])


def _arrange_axes(x: Tensor, letters: str, order: list[str], shape: list[int]) -> Tensor:
    if list(letters) != order:
        x = x.permute([letters.index(letter) for letter in order])
    return x if list(x.shape) == shape else x.reshape(shape)


def _size(sizes: dict[str, int], letters: list[str]) -> int:
    size = 1
    for letter in letters:
        size *= sizes[letter]
    return size


def _over_last_axis(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A softmax over another axis than the last, with that axis moved there and back."""
    axis, last = softmax_axis(args, kwargs, args[0].ndim), args[0].ndim - 1
    if axis is None or axis == last:
        return None
    rest = {key: x for key, x in kwargs.items() if key not in ("dim", "axis")}
    return lambda: func(args[0].movedim(axis, -1), -1, *args[2:], **rest).movedim(-1, axis)


def _sum_of_products(args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: OriginOf) -> Any:
    """`(q[..., None, :] * k[..., None, :, :]).sum(-1)` as a matrix product."""
    axis = axis_of(args, kwargs)
    axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
    keeps = kwargs.get("keepdim", kwargs.get("keepdims", args[2] if len(args) > 2 else False))
    if not args or not isinstance(args[0], Tensor) or not isinstance(axis, int) or keeps or kwargs.get("dtype"):
        return None
    whole = origin(args[0])
    if whole.name != "mul" or len(whole.inputs) != 2 or not all(origin(x).moving for x in whole.inputs):
        return None
    terms = broadcast_contraction(whole.inputs[0], whole.inputs[1], axis)
    return None if terms is None else partial(product, terms)


def _whole_softmax(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: OriginOf) -> Any:
    """The last step of a softmax that is written out, as the whole of it."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if kwargs.get("rounding_mode") is not None:
        return None

    def made(x: Tensor) -> Operation[Tensor] | None:
        how = origin(x)
        return Operation(how.part, how.inputs) if how.moving and how.inputs else None

    logits = softmax_written_out(name, tensors, made, lambda x: x.shape)
    if logits is None:
        return None
    return lambda: functional.softmax(logits, -1).to(tensors[0].dtype)


def _joined_products(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: OriginOf
) -> Any:
    """`torch.stack([q[:, h] @ k[:, h].mT for h in heads], 1)`, products of parts of two tensors, as one product."""
    parts = args[0] if args else kwargs.get("tensors")
    if not isinstance(parts, list | tuple) or len(parts) < 2 or not all(isinstance(x, Tensor) for x in parts):
        return None
    made = [origin(x) for x in parts]
    if any(how.name != "matmul" or not how.moving or len(how.inputs) != 2 for how in made):
        return None
    factors = list(zip(*(how.inputs for how in made), strict=True))
    sources = [_parts_of(side, origin) for side in factors]
    axis = axis_of(args, kwargs) or 0
    ndim = parts[0].ndim + (func is torch.stack)
    if None in sources or not isinstance(axis, int) or axis % ndim >= ndim - 2:
        return None
    if any(x.ndim != parts[0].ndim for side in factors for x in side):
        return None
    return lambda: torch.matmul(*(func(list(side), axis % ndim) for side in factors))


def _parts_of(tensors: tuple[Tensor, ...], origin: OriginOf) -> int | None:
    """The identity of the one tensor that all of these are parts of; None where there is none."""
    sources = set()
    for x in tensors:
        how = origin(x)
        while how.name in MOVES - PARTING and len(how.inputs) == 1:
            how = origin(how.inputs[0])
        sources.add(id(how.inputs[0]) if how.name in MOVES and len(how.inputs) == 1 else None)
    return sources.pop() if len(sources) == 1 else None


# ---- convolutions with kernels of one place

AXES = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def map_of_convolution(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """(input, weight, bias) of a convolution that is one map of all places; None for other calls.

    >>> x, w = torch.zeros(2, 4, 7), torch.zeros(6, 4, 1)
    >>> wide = torch.zeros(6, 4, 3)
    >>> map_of_convolution(torch.conv1d, (x, w), {}) is not None, map_of_convolution(torch.conv1d, (x, wide), {})
    (True, None)
    """
    axes = AXES.get(func)
    if axes is None or len(args) > len(NAMES):
        return None
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    x, weight = given.get("input"), given.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.ndim != axes + 2:
        return None
    single = all(size == 1 for size in weight.shape[2:]) and given.get("groups", 1) == 1
    strides, padding = given.get("stride", 1), given.get("padding", 0)
    plain = all(n == 1 for n in _each(strides)) and (padding == "valid" or all(n == 0 for n in _each(padding)))
    return (x, weight, given.get("bias")) if single and plain else None


def apply_map(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The result of the convolution.

    >>> x, w = torch.randn(2, 4, 7), torch.randn(6, 4, 1)
    >>> torch.allclose(apply_map(x, w, None), torch.conv1d(x, w), atol=1e-6)
    True
    """
    return functional.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def _each(setting: Any) -> tuple[Any, ...]:
    return tuple(setting) if isinstance(setting, list | tuple) else (setting,)


# ---- tensors in float32 and in float64: a model in float64 may make tensors of its own in float32


def has_both(arguments: Any) -> bool:
    """Whether tensors in float32 and in float64 are among the arguments of a call."""
    return {torch.float32, torch.float64} <= {x.dtype for x in tree_flatten(arguments)[0] if isinstance(x, Tensor)}


def in_double(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with tensors in float32 cast to float64 first."""

    def cast(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(cast, (args, kwargs))
        return func(*args, **kwargs)

    return call
