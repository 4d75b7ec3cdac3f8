"""Collapses of the operator T (T tokens x d channels, twice) of a frozen model to one number per pair of tokens.

T itself is never built. A forward pass carries a field x to T x, a backward pass a covector g to T^T g; several are
carried at once. T_ij (d x d) maps input token j to output token i, x_j is the input stream, y_i the output stream.
Where several output tokens are read, "the output" is their mean, and T_ij the mean of their rows.

Axes: n fields or covectors, T tokens, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.explain.branches import Branch, Experts, Heads
from locater.explain.path_sums import Paths

BYTES_AT_ONCE = 2**28  # of hidden units, of all fields that are carried together
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Collapsed:
    """Numbers of one collapse, and how many passes through the frozen model they took."""

    scores: Float[Tensor, " T"]
    passes: str
    matrix: Float[Tensor, "T T"] | None = None
    interval: Float[Tensor, "2 T"] | None = None


@dataclass(frozen=True)
class FrozenOperator:
    """T of a model that was frozen on one input."""

    paths: Paths

    @property
    def x(self) -> Float[Tensor, "T d"]:
        return self.paths.input[0]

    @property
    def y(self) -> Float[Tensor, "T d"]:
        """The output, as the frozen model gives it."""
        return self.paths.streams[-1][0]

    def constants(self) -> Float[Tensor, "T d"]:
        """The affine part: y_i - sum_j T_ij x_j. One forward pass."""
        return self.y - self.paths.carried(self.paths.input[None])[0, 0]

    def forward(self, fields: Float[Tensor, "n T d"]) -> Float[Tensor, "n T d"]:
        return self.paths.carried(fields[:, None])[:, 0]

    def back(self, covectors: Float[Tensor, "n T d"]) -> Float[Tensor, "n T d"]:
        return self.paths.pulled_back(covectors[:, None])[:, 0]

    def at_once(self) -> int:
        """How many fields fit in BYTES_AT_ONCE."""
        widths = [self.x.shape[1]]
        widths += [_hidden(b) for step in self.paths.frozen for b in (step.branches, step.beside) if b is not None]
        return max(1, BYTES_AT_ONCE // (max(widths) * self.x.shape[0] * self.x.element_size()))

    def along(self, covectors: Float[Tensor, "T d"]) -> Float[Tensor, " T"]:
        """sum_i u_i^T T_ij x_j for every input token j: one backward pass."""
        return (self.back(covectors[None])[0] * self.x).sum(-1)

    def along_each(self, covectors: Float[Tensor, "T d"]) -> Float[Tensor, "T T"]:
        """u_i^T T_ij x_j for every pair: one backward pass per output token."""
        rows = range(len(covectors))
        return torch.cat([(g * self.x).sum(-1) for g in self._backward(rows, lambda i: (i, covectors[i]))])

    def contributions(self, tokens: Float[Tensor, " T"]) -> Iterator[tuple[range, Tensor, Tensor]]:
        """T_ij x_j for chunks of input tokens j: the chunk, the mean over `tokens` (n, d), and all i (n, T, d). One
        forward pass per input token.
        """
        for chunk in _chunks(len(self.x), self.at_once()):
            fields = self.x.new_zeros(len(chunk), *self.x.shape)
            at = torch.arange(len(chunk), device=self.x.device)
            fields[at, at + chunk.start] = self.x[chunk.start : chunk.stop]
            carried = self.forward(fields)
            yield chunk, torch.einsum("t,ntd->nd", tokens, carried), carried

    def _backward(self, numbers: range, seed: Callable[[int], tuple[int, Tensor]]) -> Iterator[Tensor]:
        """T^T g for covectors g at one output token each, in chunks: (n, T, d)."""
        for chunk in _chunks(len(numbers), self.at_once()):
            covectors = self.x.new_zeros(len(chunk), *self.x.shape)
            for place, number in enumerate(numbers[chunk.start : chunk.stop]):
                row, vector = seed(number)
                covectors[place, row] = vector
            yield self.back(covectors)

    def spread(self, vectors: Float[Tensor, "n d"], tokens: Float[Tensor, " T"]) -> Iterator[Tensor]:
        """T^T g for covectors g on the mean of `tokens`, in chunks: (n, T, d)."""
        for chunk in _chunks(len(vectors), self.at_once()):
            yield self.back(torch.einsum("nd,t->ntd", vectors[chunk.start : chunk.stop], tokens))


def with_input(T: FrozenOperator, tokens: Tensor, matrix: bool) -> Collapsed:
    """|T_ij x_j|: one forward pass per input token, or one backward pass per channel where those are fewer."""
    length, width = T.x.shape
    if length > width and not matrix:
        squares = T.x.new_zeros(length)
        for g in T.spread(torch.eye(width).to(T.x), tokens):
            squares += (g * T.x).sum(-1).square().sum(0)
        return Collapsed(squares.sqrt(), f"{width} backward passes, one per channel")
    scores, table = T.x.new_zeros(length), T.x.new_zeros(length, length)
    for chunk, mean, each in T.contributions(tokens):
        scores[chunk.start : chunk.stop] = mean.norm(dim=-1)
        table[:, chunk.start : chunk.stop] = each.norm(dim=-1).mT
    return Collapsed(scores, f"{length} forward passes, one per input token", table)


def by_norm(T: FrozenOperator, tokens: Tensor, matrix: bool, probes: int, seed: int) -> Collapsed:
    """|T_ij|_F: one backward pass per channel of the output token, or `probes` with random covectors.

    A covector g of independent standard normals has E |T_ij^T g|^2 = |T_ij|_F^2, so the mean of these squares is
    unbiased for the square of the norm.
    """
    length, width = T.x.shape
    vectors = torch.eye(width).to(T.x)
    if probes:
        vectors = torch.randn(probes, width, generator=torch.Generator().manual_seed(seed)).to(T.x)
    share = 1 / (probes or 1)
    table = None
    if matrix:
        table = torch.stack([_squares(T, vectors, row) for row in torch.eye(length).to(T.x)]).mul(share).sqrt()
    squares = _squares(T, vectors, tokens) * share
    interval = None
    if probes:
        low, high = (quantile(probes, p) / probes for p in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
        interval = torch.stack([(squares / high).sqrt(), (squares / low).sqrt()])
    rows = f" for each of {length + 1} rows" if matrix else ""
    passes = f"{len(vectors)} backward passes{rows}, " + ("with random covectors" if probes else "one per channel")
    return Collapsed(squares.sqrt(), passes, table, interval)


def _squares(T: FrozenOperator, vectors: Tensor, tokens: Tensor) -> Tensor:
    total = T.x.new_zeros(len(T.x))
    for g in T.spread(vectors, tokens):
        total += g.square().sum((0, 2))
    return total


def quantile(degrees: int, probability: float) -> float:
    """Of chi-square with that many degrees of freedom, by bisection.

    >>> round(quantile(16, 0.975), 3), round(quantile(16, 0.025), 3)
    (28.845, 6.908)
    """
    half, p = torch.tensor(degrees / 2, dtype=torch.float64), probability
    low, high = 0.0, 2.0 * degrees + 100.0
    for _ in range(80):
        middle = (low + high) / 2
        below = float(torch.special.gammainc(half, torch.tensor(middle / 2, dtype=torch.float64))) < p
        low, high = (middle, high) if below else (low, middle)
    return low


def _hidden(branch: Branch) -> int:
    if isinstance(branch, Heads):
        return branch.out.shape[0] * branch.out.shape[1]
    return max(e.up.shape[0] for e in branch.experts) if isinstance(branch, Experts) else branch.up.shape[0]


def _chunks(count: int, size: int) -> Iterator[range]:
    return (range(start, min(start + size, count)) for start in range(0, count, size))
