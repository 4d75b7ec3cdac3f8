"""What a scan reads of a model: how many of its numbers, so that nobody takes a scan for a check of the whole file."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

from torch import Tensor

from locater.errors import LocaterError
from locater.sources.weights import ModuleWeights, Rows, Weights


class ReadingRecord:
    """Remembers which rows of which tensors are read from `weights`, from now until `end`.

    >>> import torch
    >>> from locater.sources.weights import DictWeights
    >>> weights = DictWeights({"q": torch.ones(4, 8), "v": torch.ones(4, 8), "norm": torch.ones(8)}, "here")
    >>> record = ReadingRecord(weights)
    >>> _ = weights.read("q", [(0, 2)]), weights.read("q", [(1, 3)]), weights.read("norm")
    >>> record.end()
    {'maps': 24, 'vectors': 8, 'of': 72}
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._rows: dict[str, list[tuple[int, int]]] = {}
        self._lock = threading.Lock()
        read = weights.read

        def recorded(name: str, rows: Rows | None = None) -> Tensor:
            with self._lock:
                self._rows.setdefault(name, []).extend([(0, -1)] if rows is None else rows)
            return read(name, rows)

        object.__setattr__(weights, "read", recorded)

    def end(self) -> dict[str, int] | None:
        """Numbers of maps and of vectors (gains, biases) that were read, and of all tensors; None if none was read."""
        object.__delattr__(self._weights, "read")  # else weights would hold themselves, and a live model, in memory
        counts = {"maps": 0, "vectors": 0}
        for name, rows in self._rows.items():
            shape = self._weights.shape(name)
            counts["vectors" if len(shape) < 2 else "maps"] += _count(shape, rows)
        return {**counts, "of": _all_numbers(self._weights)} if any(counts.values()) else None


def _count(shape: tuple[int, ...], ranges: list[tuple[int, int]]) -> int:
    """Numbers in these rows, each row once; (0, -1) is all of them."""
    if not shape or (0, -1) in ranges:
        return prod(shape)
    rows, reached = 0, 0
    for start, stop in sorted(ranges):
        rows += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return rows * prod(shape[1:])


def _all_numbers(weights: Weights) -> int:
    """Of a live model a parameter with two names counts once, and what is computed and never saved does not. 0 where
    a map that was not needed is of a format that is not read, so that its numbers are not known.
    """
    counted = getattr(weights, "all_numbers", None)
    if counted is not None:
        return int(counted())
    names: Any = weights.names()
    if isinstance(weights, ModuleWeights):
        tensors = {name: weights.live_tensor(name) for name in names}
        once = {
            id(getattr(x.module, x.attribute, x)): name
            for name, x in tensors.items()
            if x.attribute not in x.module._non_persistent_buffers_set
        }
        names = once.values()
    try:
        return sum(prod(weights.shape(name)) for name in names)
    except LocaterError:
        return 0
