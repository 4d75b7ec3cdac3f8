"""Synthetic text on which small models form attention sinks: the bigram-backcopy task of Guo and others 2024.

After a start token, each token depends on the one before it, by a fixed Markov chain. A trigger token is followed by a
copy of the token before the trigger. Bigrams need no attention. Copies need a head that attends to the previous token;
everywhere else that head has nothing to add.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
