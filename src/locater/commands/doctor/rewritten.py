"""Weights in which some tensors are read otherwise than they are stored: rows or channels in another order, times
factors, or turned. Each change of a model that its function does not show is undone so, and the rest is compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.sources.weights import Rows, Weights, take_rows


@dataclass(frozen=True)
class Rewrite:
    """How one tensor is read: rows and columns are picked, then turned, then multiplied. A vector has rows alone."""

    rows: Tensor | None = None  # the stored row of each row
    row_turn: Tensor | None = None  # what is read is this times the stored rows
    row_factors: Tensor | None = None
    columns: Tensor | None = None
    column_turn: Tensor | None = None
    column_factors: Tensor | None = None
    numbers: Tensor | None = None  # these, whatever is stored

    @property
    def moves_rows(self) -> bool:
        return self.rows is not None or self.row_turn is not None

    @property
    def computes(self) -> bool:
        """Whether numbers are made that may need more bits than those that are stored."""
        parts = (self.row_turn, self.row_factors, self.column_turn, self.column_factors)
        return any(x is not None for x in parts)

    def apply(self, x: Tensor, start: int = 0) -> Tensor:
        """The tensor, or its rows from `start` on, where rows do not move."""
        if self.rows is not None:
            x = x[self.rows]
        if self.columns is not None:
            x = x[:, self.columns]
        if not self.computes:
            return x
        x = x.double()
        if self.row_turn is not None:
            x = self.row_turn.double() @ x
        if self.column_turn is not None:
            x = x @ self.column_turn.double()
        if self.row_factors is not None:
            factors = self.row_factors[start : start + len(x)].double()
            x = x * factors.view(-1, *[1] * (x.ndim - 1))
        if self.column_factors is not None:
            x = x * self.column_factors.double()
        return x


class RewrittenWeights:
    """Other weights, of which some tensors are read in another way. One whole map is kept, where its rows move."""

    def __init__(self, weights: Weights, rewrites: Mapping[str, Rewrite]) -> None:
        self.weights, self.rewrites, self.where = weights, rewrites, weights.where
        self._kept: tuple[str, Tensor] = ("", torch.empty(0))

    def names(self) -> Collection[str]:
        return self.weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        stored, rewrite = self.weights.shape(name), self.rewrites.get(name)
        if rewrite is None or rewrite.rows is None:
            return stored
        return (len(rewrite.rows), *stored[1:])

    def stored_dtype(self, name: str) -> str:
        """The type of the numbers that a tensor was made of; empty where it is read as it is stored."""
        inner = self.weights.stored_dtype(name) if isinstance(self.weights, RewrittenWeights) else ""
        if inner or name not in self.rewrites or not math.prod(self.weights.shape(name)):
            return inner
        one = self.weights.read(name, [(0, 1)]) if self.weights.shape(name) else self.weights.read(name)
        return str(one.dtype).removeprefix("torch.")

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        rewrite = self.rewrites.get(name)
        if rewrite is None:
            return self.weights.read(name, rows)
        if rewrite.numbers is not None:
            return take_rows(rewrite.numbers, rows)
        if rows is None or not rewrite.moves_rows:
            if rows is not None and len(rows) == 1:
                return rewrite.apply(self.weights.read(name, rows), rows[0][0])
            return take_rows(rewrite.apply(self.weights.read(name)), rows)
        if self._kept[0] != name:
            self._kept = ("", torch.empty(0))  # two maps are never in memory
            self._kept = (name, rewrite.apply(self.weights.read(name)))
        return take_rows(self._kept[1], rows)

    def __getattr__(self, name: str) -> object:
        if name == "weights":  # not yet there, while a copy is made
            raise AttributeError(name)
        return getattr(self.weights, name)
