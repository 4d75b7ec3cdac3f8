"""Which token and channel of a map the numbers of a tensor come from.

While a model runs, each call that only moves numbers is remembered as a `Step`: the function, its arguments and the
shapes that it began with. No tensor is kept. To learn which axes of an attention call are heads, the steps are repeated
on labels, which say where in the result of a map each number was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from locater.calls.head_axes import BASE
from locater.errors import LocaterError
from locater.torch_private import base_of_view, tree_leaves, tree_map, write_count

MOVES = frozenset(
    """view reshape flatten unflatten transpose permute movedim moveaxis swapaxes swapdims unsqueeze squeeze expand
    expand_as repeat repeat_interleave chunk split split_with_sizes tensor_split unbind __iter__ select narrow
    __getitem__ cat concat concatenate stack view_as reshape_as t __get__ roll flip pad unfold index_select
    broadcast_to tile ravel view_as_complex view_as_real""".split()
)
CHANNELS_SECOND = frozenset("conv1d conv2d conv3d conv_transpose1d conv_transpose2d".split())
MAPS = CHANNELS_SECOND | {"linear", "addmm", "embedding"}
PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ bmm baddbmm einsum bilinear".split())
LARGEST = 1 << 24  # labels that are written out


@dataclass(frozen=True)
class Memory:
    """The numbers of a tensor, by where they are: equal for equal places in the same storage, never for another one."""

    storage: StorageWeakRef  # is not taken for a later storage at the same address
    place: tuple[Any, ...]
    version: int | None = None  # how often they were written to; of a parameter that does not count

    @classmethod
    def of(cls, x: Tensor) -> Memory:
        learned = isinstance(x, nn.Parameter) or isinstance(base_of_view(x), nn.Parameter) or x.is_inference()
        place = x.storage_offset(), x.shape, x.stride(), x.dtype
        return cls(StorageWeakRef(x.untyped_storage()), place, None if learned else write_count(x))


@dataclass(frozen=True)
class Step:
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
    right: Step | None = None  # of a product: the steps of its right factor
    made: tuple[Memory, ...] = ()  # of a map: its weights
    read: tuple[Memory, ...] = ()  # its input
    fed: tuple[Memory, ...] = ()  # the weights of the map that made its input, where that is known


class Origins:
    """The steps by which the tensors of a pass were made, as long as these tensors live."""

    def __init__(self) -> None:
        self._steps = WeakTensorKeyDictionary()

    def of(self, x: Tensor) -> Step | None:
        """The steps that made a tensor; None where they are not known."""
        return self._steps.get(x)

    def note(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Remember a call of the function called `name`, if it is a map, moves numbers, or leaves them in place."""
        if name in MOVES:
            self._move(name, func, args, kwargs, out)
        elif isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex()):
            if name in MAPS or (name in PRODUCTS and _is_map(args)):
                self._map(name, args, kwargs, out)
            elif name not in PRODUCTS:
                self._keep(args, kwargs, out)

    def product(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Remember a product of two activations: its rows are those of the left factor."""
        values = [*args, *kwargs.values()]
        words = [x for x in values if isinstance(x, str)]
        left, right = factors(args, kwargs)
        step = self.of(left)
        if step is not None:
            how = _einsum_of_labels if words else _matmul_of_labels
            arguments = (step, right.shape, *words)
            self._steps[out] = Step(out.shape, step.width, how, arguments, right=self.of(right))

    def mapped(self, out: Tensor, x: Tensor, weights: Sequence[Tensor], channel: int = -1) -> Step:
        """The step of a map with these weights, of x."""
        before = self.of(x)
        fed = () if before is None else tuple(memory for base in bases(before) for memory in base.made)
        made = tuple(Memory.of(weight) for weight in weights)
        return Step(out.shape, out.shape[channel], channel=channel, made=made, read=(Memory.of(x),), fed=fed)

    def same_rows(self, before: Tensor, out: Tensor) -> None:
        """Remember that the rows of a tensor are those of another one, with other numbers behind them."""
        step = self.of(before)
        if step is not None and before.shape[:-1] == out.shape[:-1]:
            self._steps[out] = step

    def _map(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> None:
        channel = 1 if name in CHANNELS_SECOND else -1
        before = self.of(args[0]) if args and isinstance(args[0], Tensor) else None
        if before is None or name != "linear" or args[0].shape[-1] >= before.width:  # else a map of each head
            tensors = [x for x in flat((*args, *kwargs.values())) if isinstance(x, Tensor)]
            x = tensors.pop(1 if name == "addmm" else 0)
            self._steps[out] = self.mapped(out, x, tensors, channel)

    def _move(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        tensors = [x for x in flat((*args, *kwargs.values())) if isinstance(x, Tensor)]
        steps = [self.of(x) for x in tensors if x.is_floating_point() or x.is_complex()]
        if not steps or any(step is None for step in steps):
            return
        width = next(step.width for step in steps if step is not None)
        moved, named = tree_map(
            lambda x: self.of(x) if isinstance(x, Tensor) and self.of(x) else x, (args, dict(kwargs))
        )
        how = INSTEAD.get(name, func)
        many = isinstance(out, tuple | list)
        for part, x in enumerate(out if many else [out]):
            if isinstance(x, Tensor):
                self._steps[x] = Step(x.shape, width, how, moved, named, part if many else None)

    def _keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """A function of each number by itself, as far as the shapes tell."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(x is out for x in tensors):
            return
        steps = [step for x in tensors if x.shape == out.shape and (step := self.of(x)) is not None]
        if steps:
            self._steps[out] = steps[0]


def bases(step: Step) -> list[Step]:
    """The results of maps that a tensor was made of; of a product, those of its left factor."""
    inside = [x for x in tree_leaves((step.args, dict(step.kwargs or {})), is_leaf=_is_step) if isinstance(x, Step)]
    return [step] if step.func is None else [base for x in inside for base in bases(x)]


def right_of(step: Step) -> Step | None:
    """The steps of the keys of logits: of the right factor of the product that they were made of."""
    while step.func is not None and step.func not in (_matmul_of_labels, _einsum_of_labels):
        before = next((x for x in tree_leaves(step.args, is_leaf=_is_step) if isinstance(x, Step)), None)
        if before is None:
            return None
        step = before
    return step.right


def _is_step(x: Any) -> bool:
    return isinstance(x, Step)


def signature(step: Step | None) -> Any:
    """What tells the steps of one call from those of another, whatever the sizes are."""
    if step is None:
        return None
    inside = tuple(signature(x) for x in step.args if isinstance(x, Step))
    words = tuple(x for x in step.args if isinstance(x, str))
    return (step.func, step.part, tuple(size == 1 for size in step.shape), inside, words)


def labels_of(step: Step, thin: bool = True) -> Tensor:
    """token * BASE + channel of each number; in a product, that of the left factor's row. `thin`: for one key only."""
    if step.func is None:
        if prod(step.shape) > LARGEST:
            raise LocaterError(f"a tensor of shape {list(step.shape)} is too large to be followed")
        return _of_map(step.shape, step.channel)
    args, kwargs = tree_map(
        lambda x: labels_of(x, thin) if isinstance(x, Step) else x,
        (step.args, dict(step.kwargs or {})),
        is_leaf=_is_step,
    )
    if step.func in (_matmul_of_labels, _einsum_of_labels):
        if not thin and prod(step.shape) > LARGEST:
            raise LocaterError(f"logits of shape {list(step.shape)} are too large to be followed")
        args = (*args, thin)
    out = step.func(*args, **kwargs)
    return out if step.part is None else out[step.part]


def factors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The two factors of a product, the last two tensors that it is given: `baddbmm` adds its first."""
    left, right = [x for x in flat((*args, *kwargs.values())) if isinstance(x, Tensor)][-2:]
    return left, right


def flat(args: tuple[Any, ...]) -> list[Any]:
    """Arguments, those in lists too: einsum and cat take either."""
    return [x for argument in args for x in (argument if isinstance(argument, list | tuple) else (argument,))]


def _is_map(args: tuple[Any, ...]) -> bool:
    """Whether a product is one with a matrix on the right."""
    return len(args) == 2 and isinstance(args[1], Tensor) and args[1].ndim == 2


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
INSTEAD: dict[str, Callable[..., Any]] = {
    "__iter__": torch.unbind,
    "view": Tensor.reshape,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}


def _matmul_of_labels(left: Tensor, right: torch.Size, thin: bool) -> Tensor:
    return left[..., :1] @ torch.ones(*right[:-2], 1, 1 if thin else right[-1], dtype=torch.long)


def _einsum_of_labels(left: Tensor, right: torch.Size, equation: str, thin: bool) -> Tensor:
    """An einsum in which the axes that are summed over have size 1, so that labels stay."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if "." in equation or not output or not second:
        raise LocaterError(f"einsum {equation!r} cannot be followed")
    for at, letter in enumerate(first):
        if letter not in output:
            left = left.narrow(at, 0, 1)
    one = {letter for letter in second if letter not in output or (thin and letter == output[-1] != first[-1])}
    sizes = [1 if letter in one and letter not in first else size for letter, size in zip(second, right, strict=True)]
    sizes = [1 if letter not in output else size for letter, size in zip(second, sizes, strict=True)]
    return torch.einsum(equation, left, torch.ones(sizes, dtype=torch.long))
