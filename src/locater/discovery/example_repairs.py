"""A guess that a model refuses, changed where PyTorch's error says that a size does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# messages of PyTorch -> (the size that a tensor had, the size that fits); "either" where it may be the other way round
MISFITS = {
    r"size of tensor a \((?P<given>\d+)\) must match the size of tensor b \((?P<fits>\d+)\)": "either",
    r"shapes cannot be multiplied \(\d+x(?P<given>\d+) and (?P<fits>\d+)x\d+\)": "",
    r"normalized_shape=\[(?P<fits>\d+)\], expected .* got input of size ?\[.*?(?P<given>\d+)\]": "",
    r"to have (?P<fits>\d+) channels, but got (?P<given>\d+) channels": "",
    r"contract \w+ dimension.* (?P<given>\d+) but got (?P<fits>\d+)": "either",
}
LARGEST = 4096  # channels that a repaired tensor may get


def repaired(guess: Mapping[str, Tensor], message: str) -> Iterator[dict[str, Tensor]]:
    """The guess with one axis of one tensor resized, for each axis that the message may be about.

    An axis of the size that did not fit comes first. Then the last axis of a tensor of real numbers is scaled by the
    same factor: features may be stacked or halved before they meet a map.

    >>> x = torch.zeros(2, 9, 80)
    >>> error = "mat1 and mat2 shapes cannot be multiplied (18x80 and 128x32)"
    >>> [tuple(changed["x"].shape) for changed in repaired({"x": x}, error)]
    [(2, 9, 128)]
    """
    for given, fits in _misfits(message):
        for name, x in guess.items():
            for axis in range(x.ndim - 1, 0, -1):
                if x.shape[axis] == given:
                    yield {**guess, name: _resized(x, axis, fits)}
        for name, x in guess.items():
            size, rest = divmod(x.shape[-1] * fits, given) if x.ndim > 1 and given else (0, 1)
            if x.is_floating_point() and not rest and size != x.shape[-1] and x.shape[-1] != given and size <= LARGEST:
                yield {**guess, name: _resized(x, -1, size)}


def _misfits(message: str) -> Iterator[tuple[int, int]]:
    for pattern, order in MISFITS.items():
        if match := re.search(pattern, message):
            given, fits = int(match["given"]), int(match["fits"])
            yield given, fits
            if order == "either":
                yield fits, given


def _resized(x: Tensor, axis: int, size: int) -> Tensor:
    """A tensor with another size of an axis: the same numbers again and again, or new ones where they are real."""
    repeated = x.index_select(axis, torch.arange(size, device=x.device) % x.shape[axis])
    if not x.is_floating_point():
        return repeated
    return torch.randn(repeated.shape, generator=torch.Generator().manual_seed(size)).to(x)
