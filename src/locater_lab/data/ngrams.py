"""Sequences whose rule is new in each of them: n-gram Markov chains with a transition table drawn per sequence.

A token depends on its parents, the tokens at fixed distances before it: distance 1 is a bigram, distances 1 and 2 a
trigram. The table has one Dirichlet row of next-token probabilities per combination of parents. Nothing can be learned
by heart; a model has to find where the parents occurred before, which is what induction heads do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class NgramSource:
    """Tokens 0 to S - 1. The first `reach` tokens of a sequence, which lack a parent, are uniform.

    >>> source = NgramSource(3, (1, 2), 0.1)
    >>> rows = source.sample(2, 6, torch.Generator().manual_seed(0))
    >>> rows.shape, source.contexts, source.reach
    (torch.Size([2, 7]), 9, 2)
    """

    tokens: int  # S
    parents: tuple[int, ...]  # distances to the tokens that decide the next one
    concentration: float  # of the Dirichlet prior: small is nearly deterministic, 1 is uniform over tables

    @property
    def contexts(self) -> int:
        """Combinations of parents: rows of a table."""
        return int(self.tokens ** len(self.parents))

    @property
    def reach(self) -> int:
        """Distance to the farthest parent."""
        return max(self.parents)

    def tables(self, rows: int, rng: torch.Generator) -> Float[Tensor, "rows C S"]:
        """Transition probabilities, a table per sequence."""
        seed = int(torch.randint(2**62, (), generator=rng))
        numbers = np.random.default_rng(seed).dirichlet(np.full(self.tokens, self.concentration), (rows, self.contexts))
        return torch.from_numpy(numbers)

    def sample(self, rows: int, length: int, rng: torch.Generator) -> Int[Tensor, "rows length+1"]:
        """Sequences of `length` tokens and one more to predict, each by a table of its own."""
        return self.follow(self.tables(rows, rng), length + 1, rng)

    def follow(
        self, tables: Float[Tensor, "rows C S"], length: int, rng: torch.Generator
    ) -> Int[Tensor, "rows length"]:
        """Sequences by given tables, `length` tokens in all."""
        steps = tables.cumsum(-1)[..., :-1].numpy()  # the next token is the number of steps below a uniform number
        uniform = torch.rand(length, len(tables), dtype=torch.float64, generator=rng).numpy()
        each, x = np.arange(len(tables)), np.empty((length, len(tables)), np.int64)
        x[: self.reach] = (uniform[: self.reach] * self.tokens).astype(np.int64)
        for at in range(self.reach, length):
            context = np.zeros_like(each)
            for distance in self.parents:
                context = context * self.tokens + x[at - distance]
            x[at] = (uniform[at][:, None] > steps[each, context]).sum(1)
        return torch.from_numpy(x.T.copy())

    def surprise(self, rows: Int[Tensor, "B T"], parents: Sequence[int] | None = None) -> Float[Tensor, "B T"]:
        """-log p of each token, in nats, under the Bayes predictor that knows parents and prior, not the table.

        After n_c earlier tokens with these parents, n_cx of them equal to x, it gives x (n_cx + a) / (n_c + S a).
        No predictor has a lower expected loss on this source. Other `parents` than the source's own give the same
        counting with another context, a rival: () counts tokens alone.
        """
        parents = self.parents if parents is None else tuple(parents)
        start, alpha = max((*parents, 0)), self.concentration
        codes = contexts(rows, parents, self.tokens)
        same_context = earlier(codes).double()
        same_token = earlier(codes * self.tokens + rows[:, start:]).double()
        late = -torch.log((same_token + alpha) / (same_context + self.tokens * alpha))
        early = late.new_full((len(rows), start), math.log(self.tokens))
        return torch.cat([early, late], 1)

    def rivals(self, rows: Int[Tensor, "B T"]) -> dict[str, float]:
        """Mean loss over tokens 2, 3, ... of counting with each part of the parents, by their distances: "" is
        unigram counts, "1,2" trigram counts. The last one is Bayes.
        """
        parts = [part for size in range(len(self.parents) + 1) for part in combinations(self.parents, size)]
        return {",".join(map(str, part)): float(self.surprise(rows, part)[:, 1:].mean()) for part in parts}


def contexts(rows: Int[Tensor, "B T"], parents: Sequence[int], tokens: int) -> Int[Tensor, "B n"]:
    """The parents of each token from the first that has all of them on, as one number.

    >>> contexts(torch.tensor([[2, 0, 1, 1]]), (1, 2), 3).tolist()  # (0, 2), (1, 0)
    [[2, 3]]
    """
    start, length = max((*parents, 0)), rows.shape[1]
    codes = torch.zeros_like(rows[:, start:])
    for distance in parents:
        codes = codes * tokens + rows[:, start - distance : length - distance]
    return codes


def earlier(codes: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """How many entries before each one, in its row, are equal to it.

    >>> earlier(torch.tensor([[5, 2, 5, 5, 2]])).tolist()
    [[0, 0, 1, 2, 1]]
    """
    sorted_codes, order = codes.sort(dim=1, stable=True)
    at = torch.arange(codes.shape[1]).expand_as(codes)
    begins = torch.ones_like(codes, dtype=torch.bool)
    begins[:, 1:] = sorted_codes[:, 1:] != sorted_codes[:, :-1]
    first = torch.where(begins, at, torch.zeros_like(at)).cummax(1).values
    return torch.zeros_like(codes).scatter(1, order, at - first)
