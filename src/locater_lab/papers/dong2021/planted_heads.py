"""Heads with given moments on given tokens: what they keep of the tokens' differences and of their own entropy, and the
phase diagrams of both over the plane of a head's scale and self-logit. Part of study h.

A head is a map A = s W in logit units, M = tr A, F = ||A||^2, S = tr A^2, with the identity for values and output, so
that whatever happens to the tokens is attention's doing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import composite_norm, token_residual
from locater.theory import entropy_ratio

WIDTH, LENGTH = 64, 128
AT_ONCE = 9  # maps of attention in memory: more of them pass the cache, which took twice as long
TINY_WEIGHT = 1e-37  # a weight below it has no entropy in float32
SHAPES = ("normal", "two values", "long upper tail", "long lower tail")  # of the eigenvalues around their mean
TOKENS = ("equal norm", "raw walk", "independent")


# --- heads and tokens ---


def planted_head(
    M: float, size: float, ratio: float, shape: str = SHAPES[0], seed: int = 0
) -> Float[Tensor, "d d"] | None:
    """A with tr A = M, ||A|| = size, tr A^2 = ratio size^2; None where no such map exists (M^2 > d (F + S) / 2).

    >>> A = planted_head(4.0, 2.0, 0.5)
    >>> [round(float(x), 4) for x in (A.trace(), A.norm(), (A @ A).trace())]
    [4.0, 2.0, 2.0]
    >>> planted_head(64.0, 1.0, 1.0) is None
    True
    """
    symmetric, turning = (1 + ratio) / 2 * size**2, (1 - ratio) / 2 * size**2
    left = symmetric - M**2 / WIDTH
    if left < -1e-9 * size**2:
        return None
    values = M / WIDTH + max(left, 0.0) ** 0.5 * _eigenvalue_shape(shape)
    return torch.diag(values) + turning**0.5 * _antisymmetric_map(seed)


@cache
def _eigenvalue_shape(name: str) -> Tensor:
    """d numbers of mean 0 and norm 1."""
    at = (torch.arange(WIDTH, dtype=torch.float64) + 0.5) / WIDTH
    tail = -torch.log1p(-at)
    drawn = {
        "normal": torch.special.ndtri(at), "two values": torch.where(at < 0.5, -1.0, 1.0).double(),
        "long upper tail": tail - tail.mean(), "long lower tail": tail.mean() - tail,
    }[name]  # fmt: skip
    return drawn / drawn.norm()


@cache
def _antisymmetric_map(seed: int) -> Tensor:
    """An antisymmetric map of norm 1."""
    drawn = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn - drawn.mT) / (drawn - drawn.mT).norm()


def draw_tokens(kind: str, count: int, seed: int) -> Float[Tensor, "count T d"]:
    """Random walks with steps I/T (`raw walk`), scaled to |x|^2 = d (`equal norm`); or tokens of equal norm that are
    `independent`.
    """
    x = torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    x = x if kind == "independent" else x.cumsum(1) / LENGTH**0.5
    return x if kind == "raw walk" else x * WIDTH**0.5 / x.norm(dim=-1, keepdim=True)


# --- heads on one set of tokens ---


@dataclass(frozen=True)
class HeadEffects:
    """What each head does, mean over sequences."""

    kept: Float[Tensor, " heads"]  # residual, composite
    entropy: Float[Tensor, " heads"]  # ratio
    price: Float[Tensor, " heads"]  # kept (Frobenius) over what Pinsker allows; NaN under a mask


@dataclass(frozen=True)
class TokenBatch:
    """Tokens, and what of them does not depend on the head."""

    x: Float[Tensor, "count T d"]
    size: Float[Tensor, " count"]  # ||res(X)||
    peak: Float[Tensor, " count"]  # max |R_j|
    covariance: Float[Tensor, "count d d"]
    second: Float[Tensor, "count d d"]  # X^T X / n

    @classmethod
    def of(cls, x: Float[Tensor, "count T d"]) -> TokenBatch:
        rest = token_residual(x)
        wide = x.double()
        second = wide.mT @ wide / x.shape[1]
        covariance = rest.mT @ rest / x.shape[1]
        return cls(x, composite_norm(rest), rest.norm(dim=-1).amax(-1), covariance, second)


def attend_batch(batch: TokenBatch, maps: Float[Tensor, "heads d d"], causal: bool = False) -> HeadEffects:
    """softmax(X A X^T) X of every head, measured."""
    parts = [_attend(batch, part, causal) for part in maps.split(max(1, AT_ONCE // len(batch.x)))]
    return HeadEffects(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _attend(batch: TokenBatch, maps: Float[Tensor, "heads d d"], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, n = batch.x, batch.x.shape[1]
    logits, visible = x @ maps.to(x)[:, None] @ x.mT, torch.full((n,), n)  # (heads, count, T, T)
    if causal:
        logits, visible = logits.masked_fill_(_causal_mask(n), -math.inf), torch.arange(1, n + 1)
    p = logits.softmax(-1)
    rest, H = token_residual(p @ x), -(p * p.clamp_min(TINY_WEIGHT).log()).sum(-1)  # entr takes twice as long
    kept = (composite_norm(rest) / batch.size).mean(-1)
    ratio = entropy_ratio(H, visible.expand_as(H)).mean(-1)
    if causal:
        return kept, ratio, torch.full_like(kept, math.nan)
    lost = (math.log(n) - H.double()).mean(-1).clamp_min(1e-12)
    return kept, ratio, (rest.square().sum(-1).mean(-1).sqrt() / batch.peak / (2 * lost).sqrt()).amax(-1)


@cache
def _causal_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def linear_response(
    batch: TokenBatch, maps: Float[Tensor, "heads d d"]
) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """(v, k): variance of logits across keys and residual kept to first order, from A and the tokens' covariance."""
    A, C = maps[:, None], batch.covariance
    through = A @ C  # (heads, count, d, d)
    v = (through @ A.mT * batch.second.mT).sum((-2, -1))
    k = (through @ C @ A.mT * C.mT).sum((-2, -1)) / C.diagonal(dim1=-2, dim2=-1).sum(-1)
    return v.mean(-1), k.mean(-1).clamp_min(0).sqrt()


# ---- phase diagrams ----


Table = Mapping[str, Tensor]  # a column per number, a row per head
Plane = list[list[float | None]]  # rows by M, columns by sqrt F; None where there is no such head
Word = tuple[float, float, str]  # where it stands in a diagram

NONE = (0.6, 26.0, "no such head")
SHARP = [(15.0, 2.0, "entropy"), (15.0, 1.5, "collapse")]
WORDS: dict[str, list[Word]] = {
    "equal norm": [(0.42, 0.9, "rank collapse"), (2.9, 8.0, "neither"), *SHARP, NONE, (0.5, 2.2, "Λ = 0.1")],
    "raw walk": [(0.8, 0.9, "rank collapse"), (10.0, 4.0, "neither"), NONE],
    "independent": [(0.42, 0.9, "rank collapse"), *SHARP, NONE],
    "equal norm, causal": [(0.9, 2.6, "neither"), *SHARP, NONE],
    "raw walk, causal": [(2.0, 3.4, "neither"), NONE],
    "independent, causal": [(0.36, 0.8, "rank collapse"), *SHARP, NONE],
}
WORD_MEANINGS: dict[str, Callable[[float], bool]] = {  # the sign of `collapse_sign`
    "rank collapse": lambda value: value < 0,
    "neither": lambda value: value == 0,
    "entropy": lambda value: value > 0,
    "collapse": lambda value: value > 0,
}
TITLES = {"equal norm": "walk, tokens of equal norm", "raw walk": "raw walk", "independent": "independent tokens"}


def mean_planes(
    grids: Mapping[tuple[str, int], Mapping[bool, Table]], seeds: range, means: Sequence[float], sizes: Sequence[float]
) -> dict[str, dict[str, Plane]]:
    """Residual kept, entropy and Λ for two values of S/F, mean over seeds, by tokens and mask."""
    by_name: dict[str, dict[str, Plane]] = {}
    for kind, causal, ratio in product(TOKENS, (False, True), (1.0, 0.0)):
        name = f"{kind}{', causal' if causal else ''}, S/F = {ratio:g}"
        by_name[name] = {
            column: _mean_plane([_plane(grids[kind, seed][causal], column, ratio, means, sizes) for seed in seeds])
            for column in ("kept", "entropy", "Λ")
        }
    return by_name


def _plane(table: Table, column: str, ratio: float, means: Sequence[float], sizes: Sequence[float]) -> Plane:
    heads = zip(table["M"].tolist(), table["size"].tolist(), table["ratio"].tolist(), strict=True)
    row_of = {head: row for row, head in enumerate(heads)}
    values = table[column]
    return [
        [float(values[row_of[M, size, ratio]]) if (M, size, ratio) in row_of else None for size in sizes] for M in means
    ]


def _mean_plane(by_seed: Sequence[Plane]) -> Plane:
    return [
        [None if None in cell else fmean(x for x in cell if x is not None) for cell in zip(*rows, strict=True)]
        for rows in zip(*by_seed, strict=True)
    ]


def phase_table(
    by_name: Mapping[str, Mapping[str, Plane]], means: Sequence[float], sizes: Sequence[float]
) -> dict[str, Any]:
    """Planes, and for each diagram its title, the colour of its cells and the words that fit them."""
    diagrams = []
    for causal, kind in product((False, True), ("equal norm", "raw walk", "independent")):
        name = f"{kind}{', causal' if causal else ''}"
        whole = by_name[f"{name}, S/F = 1"]
        values = [
            [collapse_sign(k, e) for k, e in zip(*rows, strict=True)]
            for rows in zip(whole["kept"], whole["entropy"], strict=True)
        ]
        title = f"{TITLES[kind]}, {'causal mask' if causal else 'no mask'}"
        words = fitting_words(WORDS[name], values, means, sizes)
        diagrams.append({"name": name, "title": title, "values": values, "words": words})
    return {"M": list(means), "size": list(sizes), "planes": dict(by_name), "diagrams": diagrams}


def collapse_sign(kept: float | None, entropy: float | None) -> float | None:
    """0 where neither happens; towards -1 as the residual goes, towards 1 as the entropy does.

    >>> collapse_sign(0.25, 1.0), collapse_sign(1.0, 0.0), collapse_sign(0.6, 0.6), collapse_sign(None, None)
    (-0.5, 1.0, 0.0, None)
    """
    if kept is None or entropy is None:
        return None
    rank, sharp = max(0.0, 1 - 2 * kept), max(0.0, 1 - 2 * entropy)
    return -rank if rank > sharp else sharp


def fitting_words(words: Sequence[Word], values: Plane, means: Sequence[float], sizes: Sequence[float]) -> list[Word]:
    """Those words of a diagram whose cell is as they say."""

    def nearest(grid: Sequence[float], at: float) -> int:
        return min(range(len(grid)), key=lambda n: abs(math.log(grid[n] / at)))

    def fits(x: float, y: float, text: str) -> bool:
        value = values[nearest(means, y)][nearest(sizes, x)]
        if text == NONE[2]:
            return value is None
        return text.startswith("Λ") or (value is not None and WORD_MEANINGS[text](value))

    return [word for word in words if fits(*word)]
