"""A step of a frozen model: attention or an MLP with its skip and its norms, linear in x (n, B, T, d) up to constants.

Axes: B sequences, T tokens, d width, H heads, n fields carried at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locater.explain.branches import Branch, Experts, FrozenNorm, Gates, normed, unnormed

INPUT, CONSTANTS, MLP = range(3)


@dataclass(frozen=True)
class Step:
    """x -> after(x + out(branches(x) + bias + observed)).

    A path takes the skip or one of the branches. `longer` is the length that passing one of `branches` adds to a path.
    `beside` is one more branch, the MLP of a parallel block, which reads the same x and adds no length.
    """

    name: str
    branches: Branch | None = None
    longer: int = 0
    bias: Tensor | None = None  # (d,)
    observed: Tensor | None = None  # (B, T, d): an MLP's output
    after: FrozenNorm | None = None
    out: FrozenNorm | None = None
    beside: Gates | Experts | None = None

    @property
    def choices(self) -> int:
        """Branches that a path may take, numbered from 0; the MLP of a parallel block is the last."""
        return 0 if self.branches is None else self.branches.count + (self.beside is not None)

    def one(self, x: Tensor, choice: int) -> Tensor:
        """Through one branch."""
        assert self.branches is not None
        if choice == self.branches.count:
            assert self.beside is not None
            return normed(self.out, self.beside.one(x, 0))
        return normed(self.out, self.branches.one(x, choice))

    def each(self, x: Tensor) -> Tensor:
        """The output of each of `branches`, with its constant part: (H, B, T, d) of x (B, T, d)."""
        assert self.branches is not None
        return normed(self.after, normed(self.out, self.branches.each(x[None])[:, 0] + self.branches.offsets()))

    def onward(self, x: Tensor) -> Tensor:
        """All ways through the step, without constants and observed outputs."""
        if self.branches is None:
            return normed(self.after, x)
        passed = self.branches.all(x)
        if self.beside is not None:
            passed = passed + self.beside.all(x)
        return normed(self.after, x + normed(self.out, passed))

    def back(self, g: Tensor) -> Tensor:
        """A covector carried back by all ways: <g, onward(x)> = <back(g), x>."""
        g = unnormed(self.after, g)
        if self.branches is None:
            return g
        inside = unnormed(self.out, g)
        passed = self.branches.back(inside)
        if self.beside is not None:
            passed = passed + self.beside.back(inside)
        return g + passed

    def replay(self, x: Tensor) -> Tensor:
        """The model's own step: all ways, constants and observed outputs."""
        y = x
        for branch in (self.branches, self.beside):
            if branch is not None:
                y = y + normed(self.out, branch.all(x)) + normed(self.out, branch.offsets().sum(0))
        for term in (self.bias, self.observed):
            y = y if term is None else y + normed(self.out, term)
        return _shifted(self.after, normed(self.after, _shifted(self.out, y)))

    def grown(self, state: Tensor) -> Tensor:
        """The same for paths sorted by origin and length: (origins, lengths, B, T, d)."""
        before = state
        if self.branches is not None:
            passed = self._passed(self.branches, before)
            none = torch.zeros_like(state[:, : self.longer])
            state = torch.cat([state, none], 1) + torch.cat([none, passed], 1)
        if self.beside is not None:
            state[:, : before.shape[1]] += self._passed(self.beside, before)
        if self.bias is not None:
            state[CONSTANTS, 0] += normed(self.out, self.bias)
        if self.observed is not None:
            state[MLP, 0] += normed(self.out, self.observed)
        state[CONSTANTS, 0] = _shifted(self.out, state[CONSTANTS, 0])
        state = normed(self.after, state)
        state[CONSTANTS, 0] = _shifted(self.after, state[CONSTANTS, 0])
        return state

    def _passed(self, branch: Branch, state: Tensor) -> Tensor:
        """All of `state` through a branch; its constant part starts there."""
        passed = normed(self.out, branch.all(state.flatten(0, 1))).view_as(state)
        passed[CONSTANTS, 0] += normed(self.out, branch.offsets().sum(0))
        return passed


def _shifted(norm: FrozenNorm | None, x: Tensor) -> Tensor:
    return x if norm is None or norm.shift is None else x + norm.shift
