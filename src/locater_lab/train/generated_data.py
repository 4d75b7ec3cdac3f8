"""Training data that is generated rather than read: numbers to sort, sequences to copy from, n-gram chains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from locater_lab.data.copying import CopySource, copy_source
from locater_lab.data.ngrams import NgramSource
from locater_lab.train.batches import Batch, draw, next_token_pair
from locater_lab.train.plan import Plan

Source = TypeVar("Source", CopySource, NgramSource)
HELD_OUT = 2048  # sequences in each of the select and report splits


@dataclass
class SortData:
    """Numbers below `vocabulary` in random order, and the same sorted; drawn batch by batch."""

    plan: Plan
    facts: dict[str, Any]
    device: torch.device

    def batch(self, index: int) -> Batch:
        return self._pair(self.plan.batch, draw(self.plan.seed, index))

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        """Sequences of the split, drawn by seeds that no plan can have."""
        count, size = min(HELD_OUT, most or HELD_OUT), self.plan.batch
        for index, begin in enumerate(range(0, count, size)):
            yield self._pair(min(size, count - begin), draw(-1 - ("select", "report").index(name), index))

    def _pair(self, rows: int, rng: torch.Generator) -> Batch:
        numbers = torch.randint(self.plan.vocabulary, (rows, self.plan.length), generator=rng).to(self.device)
        return numbers, numbers.sort(-1).values


@dataclass
class SourceData(Generic[Source]):
    """Sequences of a source that is the same for every seed. Those to train on are drawn batch by batch; the other
    splits are fixed.
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
    """Numbers to sort."""
    facts = {"numbers": plan.vocabulary, "vocabulary": plan.vocabulary, "sha256": "made by the seed"}
    return SortData(plan, facts, device)


def make_copies(plan: Plan, device: torch.device) -> SourceData[CopySource]:
    """Sequences for --task copy. The held-out ones are drawn by seeds that no plan can have. `least_loss` is the loss
    of the source itself on them.
    """
    source = copy_source(plan.vocabulary)
    splits = {
        name: source.sample(HELD_OUT, plan.length, draw(-1 - at, 0)) for at, name in enumerate(("select", "report"))
    }
    facts = {
        "text": "locater_lab.data.copying.copy_source",
        "vocabulary": plan.vocabulary + 1,
        "triggers": source.triggers.tolist(),
        "entropy": source.entropy(plan.length),
        "least_loss": {name: float(source.surprise(rows).mean()) for name, rows in splits.items()},
        "sha256": hashlib.sha256(splits["report"].numpy().tobytes()).hexdigest(),
    }
    return SourceData(plan, source, {name: rows.to(device) for name, rows in splits.items()}, facts)


def make_ngrams(plan: Plan, device: torch.device) -> SourceData[NgramSource]:
    """Sequences for --task ngram, each with a table of its own. `least_loss` is the loss of the Bayes predictor, which
    knows parents and prior; `counting_loss` that of counting with fewer parents, on the report split.
    """
    source = NgramSource(plan.vocabulary, plan.distances, plan.concentration)
    splits = {
        name: source.sample(HELD_OUT, plan.length, draw(-1 - at, 0)) for at, name in enumerate(("select", "report"))
    }
    facts = {
        "text": "locater_lab.data.ngrams.NgramSource",
        "vocabulary": plan.vocabulary,
        "parents": list(source.parents),
        "concentration": source.concentration,
        "least_loss": {name: float(source.surprise(rows)[:, 1:].mean()) for name, rows in splits.items()},
        "counting_loss": source.rivals(splits["report"]),
        "sha256": hashlib.sha256(splits["report"].numpy().tobytes()).hexdigest(),
    }
    return SourceData(plan, source, {name: rows.to(device) for name, rows in splits.items()}, facts)
