"""What every kind of training data offers. A batch depends on the seed and its number alone, so a run can resume at
any step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs and targets
IGNORED = -100  # a target that does not count


class Data(Protocol):
    """Training data. `facts` goes into the result."""

    facts: dict[str, Any]

    def batch(self, index: int) -> Batch:
        """The batch of this number, of the train split."""
        ...

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        """The split "select" or "report" in batches; of its first `most` sequences, or of all."""
        ...


def draw(seed: int, index: int) -> torch.Generator:
    """The random numbers of one batch."""
    return torch.Generator().manual_seed(seed * 1_000_003 + index)


def next_token_pair(rows: Tensor) -> Batch:
    """Tokens (B, T + 1) as inputs and, one further, targets."""
    return rows[:, :-1], rows[:, 1:]
