"""Reading a range of a map's rows without holding the whole map: a layer of a very large model fits in memory by blocks
of heads only.

The `weight` of a projection is any function that returns the matrix. One of the classes here also returns a range of
its rows. A function that does not is called once, and its result is sliced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from locater.errors import LocaterError
from locater.sources.weights import Rows, Weights


def read_floats(weights: Weights, name: str, rows: Rows | None = None) -> Tensor:
    """A tensor; refused where it holds whole numbers, which stand for others."""
    tensor = weights.read(name, rows)
    if not tensor.is_floating_point():
        raise LocaterError(
            f"{weights.where}: {name} is stored as {tensor.dtype} (quantised): dequantise the checkpoint first"
        )
    return tensor


RowReader = Callable[[int, int], Tensor]  # (start, stop) -> these rows


@runtime_checkable
class ReadsRows(Protocol):
    """The weight of a projection that can be read in parts."""

    def __call__(self) -> Tensor: ...

    def by_rows(self) -> RowReader:
        """A reader of ranges. What all ranges need is read here, once."""
        ...


def row_reader(weight: Callable[[], Tensor]) -> RowReader:
    """A reader of ranges of rows of a map. One that can be read only as a whole is read now, and kept.

    >>> import torch
    >>> row_reader(lambda: torch.arange(6.0).view(3, 2))(1, 2)
    tensor([[2., 3.]])
    """
    if isinstance(weight, ReadsRows):
        return weight.by_rows()
    whole = weight()
    return lambda start, stop: whole[start:stop]


@dataclass(frozen=True)
class StoredRows:
    """A stored map, or the ranges `rows` of it; `read` takes ranges of the stored tensor."""

    read: Callable[[Rows | None], Tensor]
    rows: Rows | None = None

    def __call__(self) -> Tensor:
        return self.read(self.rows)

    def by_rows(self) -> RowReader:
        return lambda start, stop: self.read(
            [(start, stop)] if self.rows is None else rows_within(self.rows, start, stop)
        )


@dataclass(frozen=True)
class PickedRows:
    """The rows `places` of another map, in this order."""

    whole: Callable[[], Tensor]
    places: Tensor

    def __call__(self) -> Tensor:
        return self.whole()[self.places]

    def by_rows(self) -> RowReader:
        read = row_reader(self.whole)

        def rows(start: int, stop: int) -> Tensor:
            places = self.places[start:stop]
            first, last = int(places.min()), int(places.max())
            return read(first, last + 1)[places - first]

        return rows


def rows_within(rows: Rows, start: int, stop: int) -> Rows:
    """The ranges that hold rows start to stop of those that the ranges `rows` hold one after the other.

    >>> rows_within([(0, 4), (10, 14)], 2, 6)
    [(2, 4), (10, 12)]
    """
    inside, done = [], 0  # rows before the current range
    for first, last in rows:
        begin, end = max(start - done, 0), min(stop - done, last - first)
        if begin < end:
            inside.append((first + begin, first + end))
        done += last - first
    return inside
