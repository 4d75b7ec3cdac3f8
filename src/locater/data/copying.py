"""Made-up text on which small models form attention sinks: the bigram-backcopy task of Guo and others 2024.

After a start token, each token is drawn by a fixed chain from the one before it. After a trigger comes the token before
the trigger once more. Bigrams need no attention, copies need a head that looks one back; elsewhere that head has
nothing to add.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

TRIGGERS = 3
SKEW = 1.0, 1.5  # standard deviation of log chances: of tokens, and of pairs


@dataclass(frozen=True, eq=False)
class CopySource:
    """Tokens 0 to V - 1 and a start token V. Float64.

    The first token is never a trigger, so there is always one to copy; and what comes after a trigger is none, so that
    no copy repeats for ever.

    >>> source = copy_source(8)
    >>> rows = source.sample(2, 6, torch.Generator().manual_seed(0))
    >>> rows.shape, rows[:, 0].tolist()
    (torch.Size([2, 7]), [8, 8])
    """

    chain: Float[Tensor, "V V"]  # rows sum to 1; those of triggers are not used
    triggers: Int[Tensor, " K"]

    @property
    def start(self) -> int:
        return len(self.chain)

    @cached_property
    def is_trigger(self) -> Tensor:
        """(V + 1,), False for the start token."""
        return torch.zeros(self.start + 1, dtype=torch.bool).index_fill(0, self.triggers, True)

    @cached_property
    def first(self) -> Float[Tensor, " V"]:
        """Chances of the first token: how often each is where the next one is drawn, in the long run."""
        others = ~self.is_trigger[:-1]
        # past a trigger, if there is one
        onward = self.chain[others][:, others] + torch.diag(self.chain[others][:, ~others].sum(1))
        held = onward.T - torch.eye(len(onward), dtype=torch.float64)
        held[-1] = 1.0  # one of the equations follows from the others: in its place, that chances sum to 1
        right = torch.zeros(len(onward), dtype=torch.float64)
        right[-1] = 1.0
        return torch.zeros(self.start, dtype=torch.float64).masked_scatter(others, torch.linalg.solve(held, right))

    @cached_property
    def _steps(self) -> Tensor:
        """Cumulative chances of what follows each token and the start, each row 1 above the one before: a single sorted
        list.
        """
        rows = torch.cat([self.chain, self.first[None]]).cumsum(1)
        return ((rows / rows[:, -1:]) + torch.arange(self.start + 1)[:, None]).flatten()

    def sample(self, rows: int, length: int, rng: torch.Generator) -> Int[Tensor, "rows length+1"]:
        """The start token and `length` more."""
        V, chances = self.start, torch.rand(length, rows, dtype=torch.float64, generator=rng)
        found = torch.full((length + 1, rows), V)
        for at in range(length):
            now = found[at]
            drawn = torch.searchsorted(self._steps, chances[at] + now, right=True).remainder_(V)
            found[at + 1] = torch.where(self.is_trigger[now], found[at - 1], drawn) if at else drawn
        return found.T.contiguous()

    def surprise(self, rows: Int[Tensor, "B T"]) -> Float[Tensor, "B T-1"]:
        """-log chance of each token but the first under the source, nats: the least loss on these very sequences; a
        copy has none.
        """
        chances = torch.cat([self.chain, self.first[None]])
        return -chances[rows[:, :-1], rows[:, 1:]].log().masked_fill(self.is_trigger[rows[:, :-1]], 0.0)

    def entropy(self, length: int) -> float:
        """Least mean loss over `length` tokens behind the start, nats: exact, by the chance of each token at each
        place.
        """
        held, again = self.first, torch.zeros_like(self.first)  # being at a token, and at a trigger behind it
        each, to_trigger = entropies(self.chain), self.chain[:, self.triggers].sum(1)
        total = float(entropies(self.first))
        for _ in range(length - 1):
            total += float(held @ each)
            held, again = (held @ self.chain).index_fill(0, self.triggers, 0.0) + again, held * to_trigger
        return total / length


@lru_cache(maxsize=4)
def copy_source(vocabulary: int) -> CopySource:
    """The source of so many tokens, the same in every run; its triggers are the likeliest ones.

    >>> copy_source(64).triggers.tolist() == copy_source(64).chain.mean(0).topk(3).indices.tolist()
    True
    """
    rng = torch.Generator().manual_seed(vocabulary)
    tokens, pairs = (
        torch.randn(shape, dtype=torch.float64, generator=rng) for shape in ((vocabulary,), (vocabulary, vocabulary))
    )
    chain = (SKEW[0] * tokens + SKEW[1] * pairs).softmax(1)
    return CopySource(chain, chain.mean(0).topk(TRIGGERS).indices)


def entropies(chances: Tensor) -> Tensor:
    """Of the last axis, nats."""
    return -torch.special.xlogy(chances, chances).sum(-1)
