"""The mean square size of the tokens that an attention layer reads in training: r^2 = E |z|^2 / d, 1 for unit tokens.

It is the mean over every token of a pass that is no padding. Passes until the next `restart`, and the depths of a layer
that several depths share, are averaged over all of their tokens. In a distributed run all ranks have the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from locater.layers import AttentionLayer
from locater.observing.token_sample import check_names, rank_and_ranks
from locater.torch_private import in_backward_pass

_sizes: WeakValueDictionary[int, TokenSize] = WeakValueDictionary()
_numbers = count()


class TokenSize:
    """Of one attention module. `sums` (2,) are the sum of |z|^2 / d over tokens, and the number of tokens.

    `passes` counts the calls of the module that share the sums, `filled` says whether there was one at all.

    >>> size = TokenSize("attention", torch.zeros(()))
    >>> size.receive(torch.tensor([[[3.0, 4.0], [1.0, 1.0], [9.0, 9.0]]]), torch.tensor([[True, True, False]]))
    >>> size.mean_square()                                             # (25 / 2 + 2 / 2) / 2
    tensor([6.7500])
    """

    def __init__(self, name: str, like: Tensor) -> None:
        self.name, self.number = name, next(_numbers)
        self.sums = torch.zeros(2, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self.passes, self.filled = 0, False
        _sizes[self.number] = self

    def receive(self, x: Tensor, shown: Tensor | None) -> None:
        """Add the tokens of x (B, T, d); `shown` (B, T) says which are no padding, None that none is."""
        precise = torch.promote_types(self.sums.dtype, x.dtype)
        if (self.sums.device, self.sums.dtype) != (x.device, precise):  # the model has moved since
            self.sums = self.sums.to(x.device, precise)
        add_squares(x.detach(), None if shown is None else shown.to(x.device), self.number, self.sums)

    def mean_square(self) -> Tensor:
        """r^2, of shape (1,)."""
        return self.sums[:1] / self.sums[1:].clamp_min(1)

    def restart(self) -> None:
        """The next pass begins a new mean; until then this one stays."""
        self.passes = 0

    def load(self, sums: Tensor) -> None:
        """Take over the sums of a checkpoint."""
        self.sums.copy_(sums)
        self.passes, self.filled = 0, True


# An operator of its own, as for the samples of tokens: it stays in the graph of a compiled model, and what it does
# happens when the graph runs, not when it is traced.
@torch.library.custom_op("locater::add_squares", mutates_args=("sums",))
def add_squares(x: Tensor, shown: Tensor | None, number: int, sums: Tensor) -> None:
    """Add |z|^2 / d of the tokens z of x (B, T, d), and their number, to the sums of the size of this number."""
    size = _sizes.get(number)
    if size is None or not x.numel() or in_backward_pass():
        return  # in a backward pass: activation checkpointing runs the layer a second time
    squares = torch.linalg.vector_norm(x, dim=-1, dtype=sums.dtype).square() / x.shape[-1]  # (B, T)
    shown = torch.ones_like(squares, dtype=torch.bool) if shown is None else shown.bool()
    new = torch.stack([squares.where(shown, 0).sum(), shown.sum().to(sums)])
    sums.copy_(sums + new if size.passes else new)
    size.passes += 1
    size.filled = True


@add_squares.register_fake
def _(*args: object, **kwargs: object) -> None:
    return None


@torch.no_grad()
def share_sizes(sizes: Sequence[TokenSize]) -> None:
    """In a distributed run, give every rank the mean over the tokens of all; every rank calls it, as often as it likes:
    the sums become their mean over ranks. One collective.
    """
    ranks = rank_and_ranks()[1]
    if ranks == 1:
        return
    total = torch.stack([size.sums for size in sizes])
    torch.distributed.all_reduce(total)
    for size, sums in zip(sizes, total / ranks, strict=True):
        size.sums.copy_(sums)


def sizes_of(model: nn.Module, layers: Mapping[int, AttentionLayer]) -> dict[int, TokenSize]:
    """A size that is not known yet for each of these layers, by its number; refused where no module is the layer."""
    check_names(model, layers.values())
    return {number: TokenSize(layer.name, layer.query.weight().detach()) for number, layer in layers.items()}
