"""Batches. The batch of a step is decided by the seed and the step's number alone, so the step is the whole position in
the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs and targets; -100 marks a target that does not count
IGNORED = -100


class Data(Protocol):
    """What the loop asks of data. `facts` goes into the result."""

    facts: dict[str, Any]

    def batch(self, index: int) -> Batch: ...

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]: ...


def draw(seed: int, index: int) -> torch.Generator:
    """Random numbers of one batch."""
    return torch.Generator().manual_seed(seed * 1_000_003 + index)


def next_token_pair(rows: Tensor) -> Batch:
    return rows[:, :-1], rows[:, 1:]
