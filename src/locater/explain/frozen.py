"""Parts of a layer as they were for one input: all linear in x (n, B, T, d).

Axes: B sequences, T queries, S keys, d width, H heads, K value heads, h head size, f hidden units, n fields carried at
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

INPUT, CONSTANTS, MLP = range(3)


@dataclass(frozen=True)
class FrozenNorm:
    """gain * (x - mean) * factor, with `factor` (B, T, 1) one over each token's deviation as it was; `shift` is what it
    adds.
    """

    factor: Tensor
    gain: Tensor | None
    shift: Tensor | None
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True) if self.centred else x) * self.factor
        return x if self.gain is None else x * self.gain


@dataclass(frozen=True)
class Heads:
    """A_h N(x) W_V W_O for every head of a layer."""

    maps: Float[Tensor, "B H T S"]
    value: Float[Tensor, "K h d"]
    out: Float[Tensor, "H h d"]
    before: FrozenNorm | None
    constant: Float[Tensor, "K h"]  # what values are made of besides x: W_V shift + bias

    @property
    def count(self) -> int:
        return self.out.shape[0]

    def all(self, x: Tensor) -> Tensor:
        """The sum over heads."""
        return self._mixed(x).flatten(-2) @ self.out.flatten(0, 1)

    def each(self, x: Tensor) -> Tensor:
        """(H, n, B, T, d)"""
        return torch.einsum("nbthv,hvd->hnbtd", self._mixed(x), self.out)

    def one(self, x: Tensor, head: int) -> Tensor:
        values = normed(self.before, x) @ self.value[head // self._group].mT  # (n, B, S, h)
        return self.maps[:, head] @ values @ self.out[head]

    def offsets(self) -> Tensor:
        """What each head adds whatever x is: (H, B, T, d)."""
        constant = torch.einsum("hv,hvd->hd", self.constant.repeat_interleave(self._group, 0), self.out)
        return torch.einsum("bht,hd->hbtd", self.maps.sum(-1), constant)

    @property
    def _group(self) -> int:
        return self.count // self.value.shape[0]

    def _mixed(self, x: Tensor) -> Tensor:
        """Values mixed by each head: (n, B, T, H, h). One product per head with the n fields side by side as
        columns.
        """
        n, size = x.shape[0], self.value.shape[1]
        values = normed(self.before, x) @ self.value.flatten(0, 1).mT
        side = values.unflatten(-1, (-1, size)).permute(1, 3, 2, 0, 4).flatten(-2)  # (B, K, S, n h)
        mixed = self.maps @ side.repeat_interleave(self._group, 1)  # (B, H, T, n h)
        return mixed.unflatten(-1, (n, size)).permute(3, 0, 2, 1, 4)


@dataclass(frozen=True)
class Gates:
    """W_down diag(ratio) W_up N(x): an MLP whose hidden units keep the ratio (B, T, f) of value to pre-activation."""

    ratio: Tensor
    up: Tensor  # (f, d)
    down: Tensor  # (d, f)
    before: FrozenNorm | None
    constant: Tensor  # (B, T, f): of the hidden units' values, what does not come from x
    count: int = 1

    def all(self, x: Tensor) -> Tensor:
        return (normed(self.before, x) @ self.up.mT * self.ratio) @ self.down.mT

    def each(self, x: Tensor) -> Tensor:
        return self.all(x)[None]

    def one(self, x: Tensor, head: int) -> Tensor:
        return self.all(x)

    def offsets(self) -> Tensor:
        return (self.constant @ self.down.mT)[None]


@dataclass(frozen=True)
class Step:
    """x -> after(x + branches + what is added). `longer` is what passing a branch adds to a path's length."""

    name: str
    branches: Heads | Gates | None = None
    longer: int = 0
    bias: Tensor | None = None  # (d,)
    observed: Tensor | None = None  # (B, T, d): an MLP's output
    after: FrozenNorm | None = None

    def onward(self, x: Tensor) -> Tensor:
        """All ways through the step, without what is added."""
        return normed(self.after, x if self.branches is None else x + self.branches.all(x))

    def replay(self, x: Tensor) -> Tensor:
        """What the model did: all ways, and all that is added."""
        if self.branches is not None:
            x = x + self.branches.all(x) + self.branches.offsets().sum(0)
        x = normed(self.after, sum((held for held in (self.bias, self.observed) if held is not None), x))
        return x if self.after is None or self.after.shift is None else x + self.after.shift

    def grown(self, state: Tensor) -> Tensor:
        """The same for paths sorted by origin and length: (origins, lengths, B, T, d)."""
        if self.branches is not None:
            passed = self.branches.all(state.flatten(0, 1)).view_as(state)
            passed[CONSTANTS, 0] += self.branches.offsets().sum(0)
            none = torch.zeros_like(state[:, : self.longer])
            state = torch.cat([state, none], 1) + torch.cat([none, passed], 1)
        if self.bias is not None:
            state[CONSTANTS, 0] += self.bias
        if self.observed is not None:
            state[MLP, 0] += self.observed
        state = normed(self.after, state)
        if self.after is not None and self.after.shift is not None:
            state[CONSTANTS, 0] += self.after.shift
        return state


def normed(norm: FrozenNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
