"""The task of the theorem, simplified: compose L functions on m points, listed with the one applied last in front.

A prompt lists f_L, ..., f_1 as tokens (l, x, f_l(x)), then asks i_L = f_L(... f_1(i_0)) for a start i_0. The published
task has tables that grow, with words that say which part of a table to use; that is left out here. Functions are
permutations, so that a guess is right once in m times at every depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """L functions on m points."""

    points: int
    functions: int

    @property
    def pairs(self) -> int:
        """Tokens that list the functions."""
        return self.points * self.functions


@dataclass(frozen=True)
class Prompts:
    """Listed tokens (B, L m), first token first; then questions (B, Q), each a start."""

    layer: Int[Tensor, "B n"]  # which function, from 0, the one applied first
    x: Int[Tensor, "B n"]
    y: Int[Tensor, "B n"]
    start: Int[Tensor, "B Q"]
    reached: Int[Tensor, "B Q L"]  # where the chain is after one function, two, ... all

    @property
    def answer(self) -> Int[Tensor, "B Q"]:
        return self.reached[:, :, -1]


def prompts(task: Task, batch: int, generator: torch.Generator, forward: bool = False, questions: int = 1) -> Prompts:
    """Random functions and starts; points within a function in random order.

    >>> made = prompts(Task(points=4, functions=3), 2, torch.Generator().manual_seed(0))
    >>> made.layer[0].tolist()
    [2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    """
    device, m, L = generator.device, task.points, task.functions
    table = torch.rand(batch, L, m, generator=generator, device=device).argsort(-1)  # f_l(x)
    x = torch.rand(batch, L, m, generator=generator, device=device).argsort(-1)
    y = table.gather(2, x)
    layer = torch.arange(L, device=device)[None, :, None].expand(batch, L, m)
    layer, x, y = (z if forward else z.flip(1) for z in (layer, x, y))
    start = torch.randint(m, (batch, questions), generator=generator, device=device)
    at, reached = start, []
    for number in range(L):
        at = table[:, number].gather(1, at)
        reached.append(at)
    return Prompts(layer.flatten(1), x.flatten(1), y.flatten(1), start, torch.stack(reached, 2))
