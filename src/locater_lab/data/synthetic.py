"""Synthetic text: a source on which small models form attention sinks, and one on which they form induction heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

# ---- The bigram-backcopy task of Guo and others 2024 ----
# After a start token, each token depends on the one before it, by a fixed Markov chain. A trigger token is followed by a
# copy of the token before the trigger. Bigrams need no attention. Copies need a head that attends to the previous token;
# everywhere else that head has nothing to add.


TRIGGERS = 3
SKEW = 1.0, 1.5  # standard deviations of log probabilities: of tokens, and of pairs


@dataclass(frozen=True, eq=False)
class CopySource:
    """Tokens 0 to V - 1 and a start token V. Probabilities are float64.

    The first token is never a trigger, so a trigger always has a token before it to copy. The token after a trigger is
    never a trigger either, so no copy repeats for ever.

    >>> source = copy_source(8)
    >>> rows = source.sample(2, 6, torch.Generator().manual_seed(0))
    >>> rows.shape, rows[:, 0].tolist()
    (torch.Size([2, 7]), [8, 8])
    """

    chain: Float[Tensor, "V V"]  # transition probabilities; rows sum to 1, and rows of triggers are not used
    triggers: Int[Tensor, " K"]

    @property
    def start(self) -> int:
        return len(self.chain)

    @cached_property
    def is_trigger(self) -> Tensor:
        """(V + 1,): which tokens are triggers; False for the start token."""
        return torch.zeros(self.start + 1, dtype=torch.bool).index_fill(0, self.triggers, True)

    @cached_property
    def first(self) -> Float[Tensor, " V"]:
        """Probabilities of the first token: the stationary distribution over tokens that are not triggers."""
        others = ~self.is_trigger[:-1]
        # a step over a trigger leads back to the same token
        onward = self.chain[others][:, others] + torch.diag(self.chain[others][:, ~others].sum(1))
        equations = onward.T - torch.eye(len(onward), dtype=torch.float64)
        equations[-1] = 1.0  # one equation follows from the others; it is replaced by: probabilities sum to 1
        right = torch.zeros(len(onward), dtype=torch.float64)
        right[-1] = 1.0
        stationary = torch.linalg.solve(equations, right)
        return torch.zeros(self.start, dtype=torch.float64).masked_scatter(others, stationary)

    @cached_property
    def _steps(self) -> Tensor:
        """Cumulative probabilities of the next token, for each token and the start, as one sorted list: row i spans
        (i, i + 1].
        """
        rows = torch.cat([self.chain, self.first[None]]).cumsum(1)
        return ((rows / rows[:, -1:]) + torch.arange(self.start + 1)[:, None]).flatten()

    def sample(self, rows: int, length: int, rng: torch.Generator) -> Int[Tensor, "rows length+1"]:
        """Sequences of the start token and `length` more."""
        V, uniform = self.start, torch.rand(length, rows, dtype=torch.float64, generator=rng)
        tokens = torch.full((length + 1, rows), V)
        for at in range(length):
            now = tokens[at]
            drawn = torch.searchsorted(self._steps, uniform[at] + now, right=True).remainder_(V)
            tokens[at + 1] = torch.where(self.is_trigger[now], tokens[at - 1], drawn) if at else drawn
        return tokens.T.contiguous()

    def surprise(self, rows: Int[Tensor, "B T"]) -> Float[Tensor, "B T-1"]:
        """-log p of each token after the first under the source, in nats: the lowest possible loss on these sequences.

        Copies cost nothing.
        """
        p = torch.cat([self.chain, self.first[None]])
        return -p[rows[:, :-1], rows[:, 1:]].log().masked_fill(self.is_trigger[rows[:, :-1]], 0.0)

    def entropy(self, length: int) -> float:
        """The lowest possible mean loss over `length` tokens after the start, in nats, exactly."""
        # probability of being at a token, and of being at a trigger that follows the token
        at_token, at_trigger = self.first, torch.zeros_like(self.first)
        each, to_trigger = entropies(self.chain), self.chain[:, self.triggers].sum(1)
        total = float(entropies(self.first))
        for _ in range(length - 1):
            total += float(at_token @ each)
            moved = (at_token @ self.chain).index_fill(0, self.triggers, 0.0)
            at_token, at_trigger = moved + at_trigger, at_token * to_trigger
        return total / length


@lru_cache(maxsize=4)
def copy_source(vocabulary: int) -> CopySource:
    """The source with this many tokens, the same in every run. Its triggers are the most frequent tokens.

    >>> copy_source(64).triggers.tolist() == copy_source(64).chain.mean(0).topk(3).indices.tolist()
    True
    """
    rng = torch.Generator().manual_seed(vocabulary)
    tokens, pairs = (
        torch.randn(shape, dtype=torch.float64, generator=rng) for shape in ((vocabulary,), (vocabulary, vocabulary))
    )
    chain = (SKEW[0] * tokens + SKEW[1] * pairs).softmax(1)
    return CopySource(chain, chain.mean(0).topk(TRIGGERS).indices)


def entropies(p: Float[Tensor, "*n V"]) -> Float[Tensor, "*n"]:
    """Entropy of each distribution along the last axis, in nats."""
    return -torch.special.xlogy(p, p).sum(-1)


# ---- n-gram Markov chains with a transition table drawn per sequence ----
# A token depends on its parents, the tokens at fixed distances before it: distance 1 is a bigram, distances 1 and 2 a
# trigram. The table has one Dirichlet row of next-token probabilities per combination of parents. Nothing can be learned
# by heart; a model has to find where the parents occurred before, which is what induction heads do.


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
        codes = context_codes(rows, parents, self.tokens)
        same_context = count_earlier(codes).double()
        same_token = count_earlier(codes * self.tokens + rows[:, start:]).double()
        late = -torch.log((same_token + alpha) / (same_context + self.tokens * alpha))
        early = late.new_full((len(rows), start), math.log(self.tokens))
        return torch.cat([early, late], 1)

    def rivals(self, rows: Int[Tensor, "B T"]) -> dict[str, float]:
        """Mean loss over tokens 2, 3, ... of counting with each part of the parents, by their distances: "" is
        unigram counts, "1,2" trigram counts. The last one is Bayes.
        """
        parts = [part for size in range(len(self.parents) + 1) for part in combinations(self.parents, size)]
        return {",".join(map(str, part)): float(self.surprise(rows, part)[:, 1:].mean()) for part in parts}


def context_codes(rows: Int[Tensor, "B T"], parents: Sequence[int], tokens: int) -> Int[Tensor, "B n"]:
    """The parents of each token from the first that has all of them on, as one number.

    >>> context_codes(torch.tensor([[2, 0, 1, 1]]), (1, 2), 3).tolist()  # (0, 2), (1, 0)
    [[2, 3]]
    """
    start, length = max((*parents, 0)), rows.shape[1]
    codes = torch.zeros_like(rows[:, start:])
    for distance in parents:
        codes = codes * tokens + rows[:, start - distance : length - distance]
    return codes


def count_earlier(codes: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """How many entries before each one, in its row, are equal to it.

    >>> count_earlier(torch.tensor([[5, 2, 5, 5, 2]])).tolist()
    [[0, 0, 1, 2, 1]]
    """
    sorted_codes, order = codes.sort(dim=1, stable=True)
    at = torch.arange(codes.shape[1]).expand_as(codes)
    begins = torch.ones_like(codes, dtype=torch.bool)
    begins[:, 1:] = sorted_codes[:, 1:] != sorted_codes[:, :-1]
    first = torch.where(begins, at, torch.zeros_like(at)).cummax(1).values
    return torch.zeros_like(codes).scatter(1, order, at - first)
