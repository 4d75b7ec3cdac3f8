"""What the calls of a layer are added up to: sums per head, and which of them are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from locater.kernels import SUMMED

# One column per sum over the rows that count, counts before what they count. A mean is a column over its count.
COLUMNS = (
    *SUMMED,  # calls, rows, wide_rows, first_rows; entropy, row_mass, max_probability, ..., entropy_ratio, sink
    *("rest_rows", "wide_rest_rows", "rest_entropy", "rest_entropy_ratio"),
    "outputs",
)
AT = {name: column for column, name in enumerate(COLUMNS)}
MAXIMA = ("max_logit",)
tallied: set[int] = set()  # addresses of the sums that a call was added to
owners: dict[int, int] = {}  # by address of sums: the thread whose calls are added to them, where it is one alone


def is_of_another_thread(sums: Tensor) -> bool:
    """Whether calls of this thread are not added to these sums; asked by operators, which run in compiled graphs."""
    return owners.get(sums.data_ptr(), here := get_ident()) != here


@dataclass(frozen=True)
class StatisticsOptions:
    """Which statistics of every call to add up, and over which rows."""

    rows: int = 0  # rows to sample of each call; 0: all
    rest: bool = False  # entropy without the first key too
    offsets: Sequence[tuple[int, int]] = ()  # (offset, first row): weight on the key `offset` before
    outputs: bool = False  # Gram matrices of head outputs

    def flat(self) -> tuple[int, bool, list[int], list[int]]:
        """The arguments of the operator: all but `outputs`, which shows in the accumulators."""
        return self.rows, self.rest, [offset for offset, _ in self.offsets], [start for _, start in self.offsets]


class Accumulators(NamedTuple):
    """The tensors that calls are added to."""

    sums: Tensor  # (H, COLUMNS)
    maxima: Tensor  # (H, MAXIMA)
    pairs: Tensor  # (H, offsets, 2)
    gram: Tensor | None  # (H, V, V)

    def added(self) -> list[Tensor]:
        """The tensors that hold sums: all but the maxima."""
        return [self.sums, self.pairs] if self.gram is None else [self.sums, self.pairs, self.gram]


def wide(device: torch.device) -> torch.dtype:
    """The widest floating type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64
