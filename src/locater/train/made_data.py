"""Batches of data that is made rather than read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locater.data.copying import Source, copy_source
from locater.train.batches import Batch, draw, next_token_pair
from locater.train.plan import Plan

HELD_OUT = 2048  # sequences of a split that is made rather than read


@dataclass
class SortData:
    """Numbers below `vocabulary` in random order, and the same in order; made as they are asked for."""

    plan: Plan
    facts: dict[str, Any]
    device: torch.device

    def batch(self, index: int) -> Batch:
        return self._pair(self.plan.batch, draw(self.plan.seed, index))

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        """Sequences that belong to the split; no seed of a plan draws them."""
        left, size = min(HELD_OUT, most or HELD_OUT), self.plan.batch
        for index, begin in enumerate(range(0, left, size)):
            yield self._pair(min(size, left - begin), draw(-1 - ("select", "report").index(name), index))

    def _pair(self, rows: int, rng: torch.Generator) -> Batch:
        numbers = torch.randint(self.plan.vocabulary, (rows, self.plan.length), generator=rng).to(self.device)
        return numbers, numbers.sort(-1).values


@dataclass
class CopyData:
    """Sequences of a source that is the same for every seed: training ones made as they are asked for, the others
    kept.
    """

    plan: Plan
    source: Source
    splits: dict[str, Tensor]
    facts: dict[str, Any]

    def batch(self, index: int) -> Batch:
        rows = self.source.sample(self.plan.batch, self.plan.length, draw(self.plan.seed, index))
        return next_token_pair(rows.to(self.splits["select"].device, non_blocking=True))

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        for rows in self.splits[name][:most].split(self.plan.batch):
            yield next_token_pair(rows)


def make_numbers(plan: Plan, device: torch.device) -> SortData:
    """Numbers to put in order."""
    facts = {"numbers": plan.vocabulary, "vocabulary": plan.vocabulary, "sha256": "made by the seed"}
    return SortData(plan, facts, device)


def make_copies(plan: Plan, device: torch.device) -> CopyData:
    """Held-out sequences are drawn by seeds that no plan has. `least_loss` is what the source itself would lose on
    them.
    """
    source = copy_source(plan.vocabulary)
    splits = {
        name: source.sample(HELD_OUT, plan.length, draw(-1 - at, 0)) for at, name in enumerate(("select", "report"))
    }
    facts = {
        "text": "locater.data.copying.copy_source", "vocabulary": plan.vocabulary + 1, "triggers": source.triggers.tolist(),
        "entropy": source.entropy(plan.length), "least_loss": {name: float(source.surprise(rows).mean()) for name, rows in splits.items()},
        "sha256": hashlib.sha256(splits["report"].numpy().tobytes()).hexdigest(),
    }  # fmt: skip
    return CopyData(plan, source, {name: rows.to(device) for name, rows in splits.items()}, facts)
