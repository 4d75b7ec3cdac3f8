"""Paths through a transformer: its output as a sum over ways through the layers, each layer by one head or past all of
them.

For one input everything that is not linear is frozen as it was: attention maps A_h and the denominators of norms. Then
a layer is

    x  ->  x + sum_h A_h N(x) W_h + b          (pre-norm; in a post-norm layer a frozen norm follows the sum)

and the output is a sum over paths: in each layer the skip or one head (Dong, Cordonnier, Loukas 2021). A path's length
is the number of heads it passes. It starts at one of three origins, which are reported apart because only their sum is
the output:

    input       the stream that enters the first block
    constants   biases and shifts of norms, each from its own layer on; a value bias, or a shift in front of attention,
                has passed a head
    mlp         outputs of MLPs as they were, each from its own layer on (mlp="source")

An MLP is not linear. With mlp="source", the default, its output is a vector that starts a path: paths into it end
there, and the paths of the input are those of attention alone, [H + skip]^L as in the paper. With mlp="linear" the
ratio of each hidden unit's value to its pre-activation is frozen (the gate of SwiGLU; Phi(z) of GELU), and the MLP is a
branch that paths may take, beside the skip; lengths still count heads. Both sums are exact. A block whose MLP was taken
out has no such step. In a parallel block, where attention and MLP read the same stream, a path takes the skip, one head
or the MLP.

Axes: B sequences, T queries, S keys, d width, H heads, K value heads, h head size, f hidden units, n fields carried at
once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.explain.linear_steps import CONSTANTS, INPUT, MLP, Step, through_norm

# one entry per step of `Paths.steps`: None is the skip, a number the head. An MLP is number 0 of its own step; in a
# parallel block it comes after the last head.
Path = Sequence[int | None]
AT_ONCE = 32  # paths that are walked together


@dataclass(frozen=True)
class ByLength:
    """The sum over all paths of each length, by origin; each (L + 1, B, T, d), the number of heads passed first."""

    input: Tensor
    constants: Tensor
    mlp: Tensor

    __repr__ = brief

    @property
    def total(self) -> Tensor:
        """Over origins. Its sum over lengths is the output."""
        return self.input + self.constants + self.mlp


@dataclass(frozen=True)
class HeadParts:
    """The part of the output stream that passes through each head: (L, H). A path passes several heads, so parts do not
    sum to 1. The share of `locater.explanations` is another quantity: of one target, in place of the whole stream.
    """

    norm: Tensor  # |c| / |y|
    projection: Tensor  # <c, y> / <y, y>

    __repr__ = brief

    def ranked(self, by: Literal["norm", "projection"] = "projection") -> list[tuple[int, int, float]]:
        """(layer, head, part), the largest in size first; a projection may be negative."""
        if by not in ("norm", "projection"):
            raise LocaterError(f"by={by!r} is not known: use 'norm' or 'projection'")
        table: Tensor = getattr(self, by)
        rows = [(layer, head, part) for layer, parts in enumerate(table.tolist()) for head, part in enumerate(parts)]
        return sorted(rows, key=lambda row: -abs(row[2]))


@dataclass(frozen=True, repr=False, eq=False)
class Paths:
    """A model, frozen at one input; `decompose` returns it. It shares the model's weights: use it before they are
    trained further.
    """

    name: str
    input: Float[Tensor, "B T d"]  # the stream that enters the first block
    output: Float[Tensor, "B T d"]  # the model's own output
    real: Bool[Tensor, "B T"]  # tokens that are not padding
    frozen: Sequence[Step]
    # (B, T, d) in front of each frozen step, replayed; the last is the end
    streams: Sequence[Tensor] = field(init=False)

    __repr__ = brief

    def __post_init__(self) -> None:
        streams = [self.input]
        for step in self.frozen:
            streams.append(step.replay(streams[-1][None])[0])
        object.__setattr__(self, "streams", streams)

    @property
    def steps(self) -> list[Step]:
        """Where a path has a choice: attention layers, and MLPs that are branches, in the model's order."""
        return [step for step in self.frozen if step.branches is not None]

    @property
    def layers(self) -> int:
        """Attention layers: the length of the longest paths."""
        return sum(step.longer for step in self.steps)

    @property
    def heads(self) -> int:
        return next(step.branches.count for step in self.steps if step.branches is not None and step.longer)

    @property
    def gap(self) -> float:
        """|sum of all paths - output| / |output| over real tokens: rounding, if the record of the block is right."""
        miss = (self.streams[-1] - self.output)[self.real]
        return float(miss.norm() / self.output[self.real].norm())

    def count(self, length: int) -> int:
        """Paths of that length from the input: C(L, k) H^k, times the ways past and through MLPs that are branches."""
        self._check_length(length)
        beside = sum(step.beside is not None for step in self.steps)  # all attention layers or none
        past = 2 ** (self.layers - length) if beside else 1
        return math.comb(self.layers, length) * self.heads**length * past * 2 ** (len(self.steps) - self.layers)

    def contribution(self, path: Path) -> Float[Tensor, "B T d"]:
        """The contribution of one path from the input to the output."""
        return self.contributions([path])[0]

    def contributions(self, paths: Sequence[Path]) -> Float[Tensor, "n B T d"]:
        """The same for several."""
        for path in paths:
            self._check(path)
        x = self.input.expand(len(paths), *self.input.shape).clone()
        at = -1
        for step in self.frozen:
            if step.branches is not None:
                at += 1
                for choice in sorted({path[at] for path in paths} - {None}, key=int):  # type: ignore[arg-type]
                    rows = [row for row, path in enumerate(paths) if path[at] == choice]
                    x[rows] = step.apply_one(x[rows], choice)  # type: ignore[arg-type]
            x = through_norm(step.after, x)
        return x

    def push_forward(self, x: Float[Tensor, "n B T d"]) -> Float[Tensor, "n B T d"]:
        """Fields that enter the first block, carried to the end by all paths. Constants and observed outputs of MLPs
        are left out, so this is linear.
        """
        for step in self.frozen:
            x = step.push_forward(x)
        return x

    def pull_back(self, g: Float[Tensor, "n B T d"]) -> Float[Tensor, "n B T d"]:
        """Covectors at the end, carried back to the first block: <g, push_forward(x)> = <pull_back(g), x>."""
        for step in reversed(self.frozen):
            g = step.pull_back(g)
        return g

    def sum_of(self, paths: Sequence[Path]) -> Float[Tensor, "B T d"]:
        """The sum of several paths; a path that is named twice counts twice."""
        total = torch.zeros_like(self.input)
        for start in range(0, len(paths), AT_ONCE):
            total += self.contributions(paths[start : start + AT_ONCE]).sum(0)
        return total

    def by_length(self) -> ByLength:
        """The sums over all paths of length 0, 1, ..., L, without listing them: partial sums by length are carried from
        step to step.
        """
        state = self.input.new_zeros(3, 1, *self.input.shape)
        state[INPUT, 0] = self.input
        for step in self.frozen:
            state = step.extend_paths(state)
        return ByLength(state[INPUT], state[CONSTANTS], state[MLP])

    def sample(self, length: int, n: int, seed: int = 0) -> list[tuple[int | None, ...]]:
        """`n` paths of that length from the input, each equally likely, with replacement."""
        self._check_length(length)
        if n < 1:
            raise LocaterError(f"n={n}: sample at least one path")
        draw = random.Random(seed)
        return [self._draw_path(length, draw) for _ in range(n)]

    def sampled_sum(self, length: int, n: int, seed: int = 0) -> Float[Tensor, "B T d"]:
        """The sum of `n` sampled paths; times count(length) / n it estimates `by_length().input[length]` without
        bias.
        """
        return self.sum_of(self.sample(length, n, seed))

    def through(self, layer: int, head: int) -> Float[Tensor, "B T d"]:
        """The sum over all paths that pass a head, from every origin."""
        if not (0 <= layer < self.layers and 0 <= head < self.heads):
            raise LocaterError(
                f"layer {layer}, head {head}: there are {self.layers} layers of {self.heads} heads, numbered from 0"
            )
        return self._through(layer)[head]

    def through_heads(self, tokens: Bool[Tensor, "B T"] | None = None) -> HeadParts:
        """How much of the output passes each head, over `tokens` (by default all real ones)."""
        tokens = self.real if tokens is None else tokens
        y = self.output[tokens]
        norms, projections = [], []
        for layer in range(self.layers):
            passed = self._through(layer)[:, tokens]  # (H, tokens, d)
            norms.append(passed.flatten(1).norm(dim=1) / y.norm())
            projections.append((passed * y).flatten(1).sum(1) / y.square().sum())
        return HeadParts(torch.stack(norms), torch.stack(projections))

    def along_heads(self, covectors: Float[Tensor, "B T d"]) -> Float[Tensor, "L H"]:
        """<g, c> for the sum c of all paths through each head, and covectors g at the end: one backward pass."""
        g, rows = covectors[None], []
        for step, x in zip(reversed(self.frozen), reversed(self.streams[:-1]), strict=True):
            if step.longer:
                rows.append(torch.einsum("hbtd,btd->h", step.apply_each(x), g[0]))
            g = step.pull_back(g)
        return torch.stack(rows[::-1])

    def _through(self, layer: int) -> Tensor:
        """(H, B, T, d): each head's output, carried to the end by all ways."""
        at = [i for i, step in enumerate(self.frozen) if step.longer][layer]
        x = self.frozen[at].apply_each(self.streams[at])
        for later in self.frozen[at + 1 :]:
            x = later.push_forward(x)
        return x

    def _draw_path(self, length: int, draw: random.Random) -> tuple[int | None, ...]:
        passes = [False] * self.layers  # whether the path passes a head, layer by layer
        for layer in draw.sample(range(self.layers), length):
            passes[layer] = True
        rest = iter(passes)
        return tuple(self._choice(step, bool(step.longer) and next(rest), draw) for step in self.steps)

    def _choice(self, step: Step, passes: bool, draw: random.Random) -> int | None:
        if passes:
            return draw.randrange(self.heads)
        if step.longer and step.beside is None:
            return None
        return draw.choice((None, step.choices - 1))

    def _check_length(self, length: int) -> None:
        if not 0 <= length <= self.layers:
            raise LocaterError(f"length {length}: paths of {self.name} have lengths 0 to {self.layers}")

    def _check(self, path: Path) -> None:
        steps = self.steps
        if len(path) != len(steps):
            raise LocaterError(
                f"path {list(path)}: {self.name} has {len(steps)} steps, and a path names a head or None for each"
            )
        for step, choice in zip(steps, path, strict=True):
            if choice is not None and not 0 <= choice < step.choices:
                raise LocaterError(
                    f"path {list(path)}: {step.name} has {step.choices} branches, numbered from 0; None is the skip"
                )
