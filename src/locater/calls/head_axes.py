"""Which axes of an attention call are its heads.

A call has rows (..., T): batch, windows and heads in any order before the queries, or heads after them. Heads are parts
of the channels of one map. So each row is labelled by the token and the channel that its first number comes from:
along an axis of heads the channel changes and the token stays.

While a model runs, each call that only moves numbers is recorded as a `TensorStep`: the function, its arguments and the
shapes that it began with. No tensor is kept. The steps are repeated on labels, which say where in the result of a map
each number was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from locater.calls.function_table import CHANNELS_SECOND, MAPS, MOVES, PRODUCTS
from locater.calls.recognise import contraction, flat_arguments
from locater.errors import LocaterError
from locater.torch_private import base_of_view, tree_leaves, tree_map, write_count

BASE = 1 << 24  # a label is token * BASE + channel


@dataclass(frozen=True)
class HeadAxes:
    """How to bring a tensor with rows (..., T, n) to (B, H, T, n).

    `axes` are those of the heads. Where batch and heads are one axis, `split` is (that axis, heads, whether batch comes
    first), and `axes` is empty.
    """

    axes: tuple[int, ...] = ()
    split: tuple[int, int, bool] | None = None

    def rows(self, x: Tensor) -> Tensor:
        """(..., T, n) as (B, H, T, n).

        >>> HeadAxes((2,)).rows(torch.zeros(2, 7, 4, 9)).shape
        torch.Size([2, 4, 7, 9])
        >>> HeadAxes(split=(0, 4, True)).rows(torch.zeros(8, 7, 9)).shape
        torch.Size([2, 4, 7, 9])
        """
        axes = self.axes
        if self.split is not None:
            at, heads, batch_first = self.split
            x = x.unflatten(at, (-1, heads) if batch_first else (heads, -1))
            axes = (at + 1,) if batch_first else (at,)
        if axes == (1,) and x.ndim == 4:
            return x
        others = [at for at in range(x.ndim - 1) if at not in axes]
        if not others:
            raise LocaterError(f"attention of shape {list(x.shape)}: no axis is left for the queries")
        ordered = x.permute(*others[:-1], *axes, others[-1], x.ndim - 1)
        batch, T = [x.shape[at] for at in others[:-1]], x.shape[others[-1]]
        count = prod([x.shape[at] for at in axes])
        return ordered.reshape(prod(batch), count, T, x.shape[-1])

    @property
    def is_usual(self) -> bool:
        """Whether a tensor of four axes is (B, H, T, n) already."""
        return self.axes == (1,) and self.split is None


def axes_by_labels(labels: Int[Tensor, "*rows n"]) -> HeadAxes:
    """The axes of heads, from the labels of a tensor with rows (..., T, n). Raises where heads have no order.

    >>> channel, token = torch.arange(4) * 8, torch.arange(2) * BASE
    >>> axes_by_labels((token[:, None] + channel).view(8, 1, 1))  # batch and heads in one axis
    HeadAxes(axes=(), split=(0, 4, True))
    """
    heads: list[int] = []
    merged: list[int] = []
    for at in range(labels.ndim - 1):
        line = labels[tuple(slice(None) if axis == at else 0 for axis in range(labels.ndim))]
        tokens, channels = line // BASE, line % BASE
        if (channels != channels[0]).any():
            (merged if (tokens != tokens[0]).any() else heads).append(at)
    if merged and (heads or len(merged) > 1):
        raise LocaterError("its heads lie on several axes, of which one has batch or tokens too")
    if not merged:
        if labels.ndim - 2 in heads and (len(heads) > 1 or labels.ndim < 4):
            raise LocaterError("its rows are channels, not tokens")
        return HeadAxes(tuple(heads))
    at = merged[0]
    channels = labels[tuple(slice(None) if axis == at else 0 for axis in range(labels.ndim))] % BASE
    count = len(channels.unique())
    if len(channels) % count == 0:
        for batch_first in (True, False):
            table = channels.view(-1, count) if batch_first else channels.view(count, -1).mT
            if bool((table == table[0]).all()) and len(table[0].unique()) == count:
                return HeadAxes(split=(at, count, batch_first))
    raise LocaterError("batch and heads are one axis, in an order that is not known")


def axes_by_count(shape: torch.Size, heads: int | None, tokens: int | None) -> HeadAxes:
    """The axes of heads, from the number of heads that a module says and of the tokens that it was given.

    `shape` is that of rows (..., T). Raises where this does not tell them: (B * H, T) may have either order.

    >>> axes_by_count(torch.Size([2, 4, 9]), heads=4, tokens=None)
    HeadAxes(axes=(1,), split=None)
    """
    known = "" if heads is None else f", of which the module says that there are {heads}"
    rows = prod(list(shape))
    if heads is None and tokens and rows % tokens == 0:
        heads = rows // tokens
    if heads == 1:
        return HeadAxes()
    places = [at for at, size in enumerate(shape) if size == heads]
    if len(shape) == 3 and 1 in places:
        return HeadAxes((1,))
    if len(shape) == 2 and places[:1] == [0] and tokens == shape[1]:  # one sequence
        return HeadAxes((0,))
    inner = [at for at in places if 0 < at < len(shape) - 1] if len(shape) > 3 else places
    if len(shape) > 2 and len(inner) == 1:
        return HeadAxes((inner[0],))
    raise LocaterError(f"attention with rows {list(shape)}: it is not known which axis are the heads{known}")


# ---- where the numbers of a tensor come from

LARGEST = 1 << 24  # labels that are written out


@dataclass(frozen=True)
class MemoryRegion:
    """The numbers of a tensor, by where they are: equal for equal places in the same storage, never for another one."""

    storage: StorageWeakRef  # is not taken for a later storage at the same address
    place: tuple[Any, ...]
    version: int | None = None  # how often they were written to; of a parameter that does not count

    @classmethod
    def of(cls, x: Tensor) -> MemoryRegion:
        learned = isinstance(x, nn.Parameter) or isinstance(base_of_view(x), nn.Parameter) or x.is_inference()
        place = x.storage_offset(), x.shape, x.stride(), x.dtype
        return cls(StorageWeakRef(x.untyped_storage()), place, None if learned else write_count(x))


@dataclass(frozen=True)
class TensorStep:
    """How a tensor was made by moving numbers of others; without `func`, the result of a map.

    `args` and `kwargs` have steps in place of tensors. `part` is which of several results it is.
    """

    shape: torch.Size
    width: int  # channels of the map that it began with
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    part: int | None = None
    channel: int = -1  # the axis of channels of a map's result
    right: TensorStep | None = None  # of a product: the steps of its right factor
    made: tuple[MemoryRegion, ...] = ()  # of a map: its weights
    read: tuple[MemoryRegion, ...] = ()  # its input
    fed: tuple[MemoryRegion, ...] = ()  # the weights of the map that made its input, where that is known


class TensorTrace:
    """The steps by which the tensors of a pass were made, as long as these tensors live."""

    def __init__(self) -> None:
        self._steps = WeakTensorKeyDictionary()

    def of(self, x: Tensor) -> TensorStep | None:
        """The steps that made a tensor; None where they are not known."""
        return self._steps.get(x)

    def record(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Remember a call of the function called `name`, if it is a map, moves numbers, or leaves them in place."""
        if name in MOVES:
            self._record_move(name, func, args, kwargs, out)
        elif isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex()):
            if name in MAPS or (name in PRODUCTS and (_is_map(args) or _is_map_by_letters(name, args, kwargs))):
                self._record_map(name, args, kwargs, out)
            elif name not in PRODUCTS:
                self._record_elementwise(args, kwargs, out)

    def record_product(self, left: Tensor, right: Tensor, out: Tensor, equation: str | None = None) -> None:
        """Remember a product of two activations: its rows are those of the left factor."""
        step = self.of(left)
        if step is not None:
            how = _matmul_of_labels if equation is None else _einsum_of_labels
            arguments = (step, right.shape, *(() if equation is None else (equation,)))
            self._steps[out] = TensorStep(out.shape, step.width, how, arguments, right=self.of(right))

    def map_step(self, out: Tensor, x: Tensor, weights: Sequence[Tensor], channel: int = -1) -> TensorStep:
        """The step of a map with these weights, of x."""
        before = self.of(x)
        fed = () if before is None else tuple(memory for base in source_maps(before) for memory in base.made)
        made = tuple(MemoryRegion.of(weight) for weight in weights)
        return TensorStep(
            out.shape, out.shape[channel], channel=channel, made=made, read=(MemoryRegion.of(x),), fed=fed
        )

    def record_same_rows(self, before: Tensor, out: Tensor) -> None:
        """Remember that the rows of a tensor are those of another one, with other numbers behind them."""
        step = self.of(before)
        if step is not None and before.shape[:-1] == out.shape[:-1]:
            self._steps[out] = step

    def _record_map(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> None:
        channel = 1 if name in CHANNELS_SECOND else -1
        before = self.of(args[0]) if args and isinstance(args[0], Tensor) else None
        if before is None or name != "linear" or args[0].shape[-1] >= before.width:  # else a map of each head
            tensors = [x for x in flat_arguments((*args, *kwargs.values())) if isinstance(x, Tensor)]
            x = tensors.pop(1 if name == "addmm" else 0)
            self._steps[out] = self.map_step(out, x, tensors, channel)

    def _record_move(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        tensors = [x for x in flat_arguments((*args, *kwargs.values())) if isinstance(x, Tensor)]
        steps = [self.of(x) for x in tensors if x.is_floating_point() or x.is_complex()]
        if not steps or any(step is None for step in steps):
            return
        if len(steps) == 1 and isinstance(out, Tensor) and swaps_rows_and_columns(name, args, kwargs, out.ndim):
            turned = None if steps[0] is None else _transposed_product(steps[0])
            if turned is not None:
                self._steps[out] = turned
                return
        width = next(step.width for step in steps if step is not None)
        moved, named = tree_map(
            lambda x: self.of(x) if isinstance(x, Tensor) and self.of(x) else x, (args, dict(kwargs))
        )
        how = LABEL_FUNCTIONS.get(name, func)
        many = isinstance(out, tuple | list)
        for part, x in enumerate(out if many else [out]):
            if isinstance(x, Tensor):
                self._steps[x] = TensorStep(x.shape, width, how, moved, named, part if many else None)

    def _record_elementwise(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """A function of each number by itself, as far as the shapes tell."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(x is out for x in tensors):
            return
        steps = [step for x in tensors if x.shape == out.shape and (step := self.of(x)) is not None]
        if steps:
            self._steps[out] = steps[0]


def swaps_rows_and_columns(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], ndim: int) -> bool:
    """Whether a call transposes matrices: the last two axes, and no others."""
    if name in ("mT", "mH", "adjoint"):
        return True
    words = [*args[1:], *kwargs.values()]
    numbers = list(words[0]) if len(words) == 1 and isinstance(words[0], list | tuple) else words
    if ndim < 2 or not all(isinstance(x, int) for x in numbers):
        return False
    axes = [x % ndim for x in numbers]
    if name == "permute":
        return axes == [*range(ndim - 2), ndim - 1, ndim - 2]
    return name in ("transpose", "movedim") and sorted(axes) == [ndim - 2, ndim - 1]


def _transposed_product(step: TensorStep) -> TensorStep | None:
    """The step of a product whose rows and columns were swapped: of its factors the other way round."""
    if step.func is not _matmul_of_labels or step.right is None:
        return None
    left, right = step.args[0], step.right
    one, two = (TensorStep(_mT(x.shape), x.width, torch.transpose, (x, -1, -2)) for x in (right, left))
    return TensorStep(_mT(step.shape), one.width, _matmul_of_labels, (one, two.shape), right=two)


def _mT(shape: torch.Size) -> torch.Size:
    return torch.Size([*shape[:-2], shape[-1], shape[-2]])


def source_maps(step: TensorStep) -> list[TensorStep]:
    """The results of maps that a tensor was made of; of a product, those of its left factor."""
    inside = [
        x for x in tree_leaves((step.args, dict(step.kwargs or {})), is_leaf=_is_step) if isinstance(x, TensorStep)
    ]
    return [step] if step.func is None else [base for x in inside for base in source_maps(x)]


def key_step(step: TensorStep) -> TensorStep | None:
    """The steps of the keys of logits: of the right factor of the product that they were made of."""
    while step.func is not None and step.func not in (_matmul_of_labels, _einsum_of_labels):
        before = next((x for x in tree_leaves(step.args, is_leaf=_is_step) if isinstance(x, TensorStep)), None)
        if before is None:
            return None
        step = before
    return step.right


def _is_step(x: Any) -> bool:
    return isinstance(x, TensorStep)


def step_signature(step: TensorStep | None) -> Any:
    """Equal for calls that were made by the same steps, whatever the sizes are."""
    if step is None:
        return None
    inside = tuple(step_signature(x) for x in step.args if isinstance(x, TensorStep))
    words = tuple(x for x in step.args if isinstance(x, str))
    return (step.func, step.part, tuple(size == 1 for size in step.shape), inside, words)


def labels_of(step: TensorStep, thin: bool = True) -> Tensor:
    """token * BASE + channel of each number; in a product, that of the left factor's row. `thin`: for one key only."""
    if step.func is None:
        if prod(step.shape) > LARGEST:
            raise LocaterError(f"a tensor of shape {list(step.shape)} is too large to be followed")
        return _of_map(step.shape, step.channel)
    args, kwargs = tree_map(
        lambda x: labels_of(x, thin) if isinstance(x, TensorStep) else x,
        (step.args, dict(step.kwargs or {})),
        is_leaf=_is_step,
    )
    if step.func in (_matmul_of_labels, _einsum_of_labels):
        if not thin and prod(step.shape) > LARGEST:
            raise LocaterError(f"logits of shape {list(step.shape)} are too large to be followed")
        args = (*args, thin)
    out = step.func(*args, **kwargs)
    return out if step.part is None else out[step.part]


def _is_map(args: tuple[Any, ...]) -> bool:
    """Whether a product is one with a matrix on the right."""
    return len(args) > 1 and isinstance(args[1], Tensor) and args[1].ndim == 2 and isinstance(args[0], Tensor)


def _is_map_by_letters(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """The same of `torch.einsum("btd,ed->bte", x, W)` and `torch.inner(x, W)`."""
    written = contraction(name, args, kwargs)
    if written is None or written.two.ndim != 2:
        return False
    terms, _, out = written.equation.partition("->")
    one, _, two = terms.partition(",")
    return one[-1] in two and out == one[:-1] + two.replace(one[-1], "")


def _of_map(shape: torch.Size, channel: int) -> Tensor:
    """Labels of the result of a map, whose channels are on one axis."""
    tokens = [size for at, size in enumerate(shape) if at != channel % len(shape)]
    labels = (torch.arange(prod(tokens)) * BASE)[:, None] + torch.arange(shape[channel])
    return labels.view(*tokens, shape[channel]).movedim(-1, channel)


def _as_complex(x: Tensor) -> Tensor:
    return x[..., 0]


def _as_real(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)


# labels take other functions: they are whole numbers, and may lie in another order in memory
LABEL_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "__iter__": torch.unbind,
    "view": Tensor.reshape,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}


def _matmul_of_labels(left: Tensor, right: torch.Size, thin: bool) -> Tensor:
    return left[..., :1] @ torch.ones(*right[:-2], 1, 1 if thin else right[-1], dtype=torch.long)


def _einsum_of_labels(left: Tensor, right: torch.Size, equation: str, thin: bool) -> Tensor:
    """An einsum in which the axes that are summed over have size 1, so that labels stay."""
    inputs, _, output = equation.partition("->")
    first, _, second = inputs.partition(",")
    for at, letter in enumerate(first):
        if letter not in output:
            left = left.narrow(at, 0, 1)
    one = {letter for letter in second if letter not in output or (thin and letter == output[-1] != first[-1])}
    sizes = [1 if letter in one and letter not in first else size for letter, size in zip(second, right, strict=True)]
    sizes = [1 if letter not in output else size for letter, size in zip(second, sizes, strict=True)]
    return torch.einsum(equation, left, torch.ones(sizes, dtype=torch.long))
