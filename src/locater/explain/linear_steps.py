"""A frozen model in steps: attention or an MLP with its skip and norms, each linear in the stream x (n, B, T, d) up to
constants.

Every part carries a field forward (`apply_all`, `push_forward`), and a covector backward (`pull_back`):
<g, apply_all(x)> = <pull_back(g), x>.

Axes: B sequences, T queries, S keys, d width, H heads, K value heads, h head size, f hidden units, n fields carried at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

INPUT, CONSTANTS, MLP = range(3)


@dataclass(frozen=True)
class FrozenNorm:
    """gain * (x - mean) * factor. `factor` (B, T, 1) is one over each token's deviation as it was. `shift` is the
    norm's bias, which is added apart.
    """

    factor: Tensor
    gain: Tensor | None
    shift: Tensor | None
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True) if self.centred else x) * self.factor
        return x if self.gain is None else x * self.gain

    def pull_back(self, g: Tensor) -> Tensor:
        g = (g if self.gain is None else g * self.gain) * self.factor
        return g - g.mean(-1, keepdim=True) if self.centred else g


@dataclass(frozen=True)
class FrozenLatent:
    """inner(W_down before(x)): the narrow, normalised latent that DeepSeek's values are read from.

    `shift` (B, T, r) is its part that does not come from x.
    """

    before: FrozenNorm | None
    down: Float[Tensor, "r d"]
    inner: FrozenNorm
    shift: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(through_norm(self.before, x) @ self.down.mT)

    def pull_back(self, g: Tensor) -> Tensor:
        return back_through_norm(self.before, self.inner.pull_back(g) @ self.down)


@dataclass(frozen=True)
class HeadBranch:
    """A_h N(x) W_V W_O for every head of a layer."""

    maps: Float[Tensor, "B H T S"]
    value: Float[Tensor, "K h d"]
    out: Float[Tensor, "H h d"]
    before: FrozenNorm | FrozenLatent | None
    # the part of the values that does not come from x (W_V shift + bias): (K, h), or (B, S, K, h) where tokens differ
    constant: Tensor

    @property
    def count(self) -> int:
        return self.out.shape[0]

    def apply_all(self, x: Tensor) -> Tensor:
        """The sum over heads."""
        return self._mix_values(x).flatten(-2) @ self.out.flatten(0, 1)

    def pull_back(self, g: Tensor) -> Tensor:
        n, size = g.shape[0], self.value.shape[1]
        mixed = (g @ self.out.flatten(0, 1).mT).unflatten(-1, (-1, size))  # (n, B, T, H, h)
        side = mixed.permute(1, 3, 2, 0, 4).flatten(-2)  # (B, H, T, n h)
        values = (self.maps.mT @ side).unflatten(1, (-1, self._group)).sum(2)  # (B, K, S, n h)
        values = values.unflatten(-1, (n, size)).permute(3, 0, 2, 1, 4).flatten(-2)
        return back_through_norm(self.before, values @ self.value.flatten(0, 1))

    def apply_each(self, x: Tensor) -> Tensor:
        """(H, n, B, T, d)"""
        return torch.einsum("nbthv,hvd->hnbtd", self._mix_values(x), self.out)

    def apply_one(self, x: Tensor, head: int) -> Tensor:
        values = through_norm(self.before, x) @ self.value[head // self._group].mT  # (n, B, S, h)
        return self.maps[:, head] @ values @ self.out[head]

    def offsets(self) -> Tensor:
        """What each head adds whatever x is: (H, B, T, d)."""
        constant = self.constant.repeat_interleave(self._group, -2)
        if constant.ndim == 4:
            return torch.einsum("bhts,bshv,hvd->hbtd", self.maps, constant, self.out)
        return torch.einsum("bht,hd->hbtd", self.maps.sum(-1), torch.einsum("hv,hvd->hd", constant, self.out))

    @property
    def _group(self) -> int:
        return self.count // self.value.shape[0]

    def _mix_values(self, x: Tensor) -> Tensor:
        """Values mixed by each head: (n, B, T, H, h). One product per head with the n fields side by side as
        columns.
        """
        n, size = x.shape[0], self.value.shape[1]
        values = through_norm(self.before, x) @ self.value.flatten(0, 1).mT
        side = values.unflatten(-1, (-1, size)).permute(1, 3, 2, 0, 4).flatten(-2)  # (B, K, S, n h)
        mixed = self.maps @ side.repeat_interleave(self._group, 1)  # (B, H, T, n h)
        return mixed.unflatten(-1, (n, size)).permute(3, 0, 2, 1, 4)


@dataclass(frozen=True)
class GatedMlp:
    """W_down diag(ratio) W_up N(x): an MLP whose hidden units keep the ratio (B, T, f) of value to pre-activation."""

    ratio: Tensor
    up: Tensor  # (f, d)
    down: Tensor  # (d, f)
    before: FrozenNorm | None
    constant: Tensor  # (B, T, f): the part of the hidden units' values that does not come from x
    count: int = 1

    def apply_all(self, x: Tensor) -> Tensor:
        return (through_norm(self.before, x) @ self.up.mT * self.ratio) @ self.down.mT

    def pull_back(self, g: Tensor) -> Tensor:
        return back_through_norm(self.before, (g @ self.down * self.ratio) @ self.up)

    def apply_each(self, x: Tensor) -> Tensor:
        return self.apply_all(x)[None]

    def apply_one(self, x: Tensor, head: int) -> Tensor:
        return self.apply_all(x)

    def offsets(self) -> Tensor:
        return (self.constant @ self.down.mT)[None]


@dataclass(frozen=True)
class Expert:
    """One expert of a mixture, for the r tokens that were sent to it. `ratio` and the constants are already multiplied
    by the router's weights.
    """

    tokens: Int[Tensor, " r"]  # their numbers in the batch, B * T of them
    ratio: Float[Tensor, "r f"]
    up: Float[Tensor, "f d"]
    down: Float[Tensor, "d f"]
    constant: Float[Tensor, "r d"]  # the part of its output that does not come from x


@dataclass(frozen=True)
class ExpertMixture:
    """sum_e w_e W_down,e diag(ratio_e) W_up,e N(x) over the experts of each token: router and gates are frozen."""

    experts: Sequence[Expert]
    before: FrozenNorm | None
    size: tuple[int, int]  # B, T
    count: int = 1

    def apply_all(self, x: Tensor) -> Tensor:
        x = through_norm(self.before, x).flatten(1, 2)
        total = torch.zeros_like(x)
        for part in self.experts:
            hidden = x[:, part.tokens] @ part.up.mT * part.ratio
            total = total.index_add(1, part.tokens, hidden @ part.down.mT)
        return total.unflatten(1, self.size)

    def pull_back(self, g: Tensor) -> Tensor:
        g = g.flatten(1, 2)
        total = torch.zeros_like(g)
        for part in self.experts:
            hidden = g[:, part.tokens] @ part.down * part.ratio
            total = total.index_add(1, part.tokens, hidden @ part.up)
        return back_through_norm(self.before, total.unflatten(1, self.size))

    def apply_each(self, x: Tensor) -> Tensor:
        return self.apply_all(x)[None]

    def apply_one(self, x: Tensor, head: int) -> Tensor:
        return self.apply_all(x)

    def offsets(self) -> Tensor:
        like = self.experts[0].constant
        total = like.new_zeros(self.size[0] * self.size[1], like.shape[1])
        for part in self.experts:
            total = total.index_add(0, part.tokens, part.constant)
        return total.unflatten(0, self.size)[None]


Branch = HeadBranch | GatedMlp | ExpertMixture


def through_norm(norm: FrozenNorm | FrozenLatent | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def back_through_norm(norm: FrozenNorm | FrozenLatent | None, g: Tensor) -> Tensor:
    """A covector carried back through a norm."""
    return g if norm is None else norm.pull_back(g)


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
    beside: GatedMlp | ExpertMixture | None = None

    @property
    def choices(self) -> int:
        """Branches that a path may take, numbered from 0; the MLP of a parallel block is the last."""
        return 0 if self.branches is None else self.branches.count + (self.beside is not None)

    def apply_one(self, x: Tensor, choice: int) -> Tensor:
        """Through one branch."""
        assert self.branches is not None
        if choice == self.branches.count:
            assert self.beside is not None
            return through_norm(self.out, self.beside.apply_one(x, 0))
        return through_norm(self.out, self.branches.apply_one(x, choice))

    def apply_each(self, x: Tensor) -> Tensor:
        """The output of each of `branches`, with its constant part: (H, B, T, d) of x (B, T, d)."""
        assert self.branches is not None
        return through_norm(
            self.after, through_norm(self.out, self.branches.apply_each(x[None])[:, 0] + self.branches.offsets())
        )

    def push_forward(self, x: Tensor) -> Tensor:
        """All ways through the step, without constants and observed outputs."""
        if self.branches is None:
            return through_norm(self.after, x)
        passed = self.branches.apply_all(x)
        if self.beside is not None:
            passed = passed + self.beside.apply_all(x)
        return through_norm(self.after, x + through_norm(self.out, passed))

    def pull_back(self, g: Tensor) -> Tensor:
        """A covector carried back by all ways: <g, push_forward(x)> = <pull_back(g), x>."""
        g = back_through_norm(self.after, g)
        if self.branches is None:
            return g
        inside = back_through_norm(self.out, g)
        passed = self.branches.pull_back(inside)
        if self.beside is not None:
            passed = passed + self.beside.pull_back(inside)
        return g + passed

    def replay(self, x: Tensor) -> Tensor:
        """The model's own step: all ways, constants and observed outputs."""
        y = x
        for branch in (self.branches, self.beside):
            if branch is not None:
                y = y + through_norm(self.out, branch.apply_all(x)) + through_norm(self.out, branch.offsets().sum(0))
        for term in (self.bias, self.observed):
            y = y if term is None else y + through_norm(self.out, term)
        return _with_shift(self.after, through_norm(self.after, _with_shift(self.out, y)))

    def extend_paths(self, state: Tensor) -> Tensor:
        """The same for paths sorted by origin and length: (origins, lengths, B, T, d)."""
        before = state
        if self.branches is not None:
            passed = self._pass_branch(self.branches, before)
            none = torch.zeros_like(state[:, : self.longer])
            state = torch.cat([state, none], 1) + torch.cat([none, passed], 1)
        if self.beside is not None:
            state[:, : before.shape[1]] += self._pass_branch(self.beside, before)
        if self.bias is not None:
            state[CONSTANTS, 0] += through_norm(self.out, self.bias)
        if self.observed is not None:
            state[MLP, 0] += through_norm(self.out, self.observed)
        state[CONSTANTS, 0] = _with_shift(self.out, state[CONSTANTS, 0])
        state = through_norm(self.after, state)
        state[CONSTANTS, 0] = _with_shift(self.after, state[CONSTANTS, 0])
        return state

    def _pass_branch(self, branch: Branch, state: Tensor) -> Tensor:
        """All of `state` through a branch; its constant part starts there."""
        passed = through_norm(self.out, branch.apply_all(state.flatten(0, 1))).view_as(state)
        passed[CONSTANTS, 0] += through_norm(self.out, branch.offsets().sum(0))
        return passed


def _with_shift(norm: FrozenNorm | None, x: Tensor) -> Tensor:
    return x if norm is None or norm.shift is None else x + norm.shift
