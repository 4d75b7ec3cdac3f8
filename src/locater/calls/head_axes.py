"""Which axes of an attention call are its heads.

A call has rows (..., T): batch, windows and heads in any order before the queries, or heads after them. Heads are parts
of the channels of one map. So each row is labelled by the token and the channel that its first number comes from:
along an axis of heads the channel changes and the token stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from locater.errors import LocaterError

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
        count = _product([x.shape[at] for at in axes])
        return ordered.reshape(_product(batch), count, T, x.shape[-1])

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
    rows = _product(list(shape))
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


def _product(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
