"""Heads with given moments on given tokens: what they keep of the tokens' differences and of their own entropy.

A head is a map A = s W in logit units, M = tr A, F = ||A||^2, S = tr A^2, with the identity for values and output, so
that whatever happens to the tokens is attention's doing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import composite_norm, token_residual
from locater.theory import entropy_ratio

WIDTH, LENGTH = 64, 128
AT_ONCE = 9  # maps of attention in memory: more of them pass the cache, which took twice as long
TINY = 1e-37  # a weight below it has no entropy in float32
SHAPES = ("normal", "two values", "long upper tail", "long lower tail")  # of the eigenvalues around their mean
TOKENS = ("equal norm", "raw walk", "independent")


# --- heads and tokens ---


def head(M: float, size: float, ratio: float, shape: str = SHAPES[0], seed: int = 0) -> Float[Tensor, "d d"] | None:
    """A with tr A = M, ||A|| = size, tr A^2 = ratio size^2; None where no such map exists (M^2 > d (F + S) / 2).

    >>> A = head(4.0, 2.0, 0.5)
    >>> [round(float(x), 4) for x in (A.trace(), A.norm(), (A @ A).trace())]
    [4.0, 2.0, 2.0]
    >>> head(64.0, 1.0, 1.0) is None
    True
    """
    symmetric, turning = (1 + ratio) / 2 * size**2, (1 - ratio) / 2 * size**2
    left = symmetric - M**2 / WIDTH
    if left < -1e-9 * size**2:
        return None
    values = M / WIDTH + max(left, 0.0) ** 0.5 * _shape(shape)
    return torch.diag(values) + turning**0.5 * _turn(seed)


@cache
def _shape(name: str) -> Tensor:
    """d numbers of mean 0 and norm 1."""
    at = (torch.arange(WIDTH, dtype=torch.float64) + 0.5) / WIDTH
    tail = -torch.log1p(-at)
    drawn = {
        "normal": torch.special.ndtri(at), "two values": torch.where(at < 0.5, -1.0, 1.0).double(),
        "long upper tail": tail - tail.mean(), "long lower tail": tail.mean() - tail,
    }[name]  # fmt: skip
    return drawn / drawn.norm()


@cache
def _turn(seed: int) -> Tensor:
    """An antisymmetric map of norm 1."""
    drawn = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn - drawn.mT) / (drawn - drawn.mT).norm()


def tokens(kind: str, count: int, seed: int) -> Float[Tensor, "count T d"]:
    """Random walks with steps I/T (`raw walk`), scaled to |x|^2 = d (`equal norm`); or tokens of equal norm that are
    `independent`.
    """
    x = torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    x = x if kind == "independent" else x.cumsum(1) / LENGTH**0.5
    return x if kind == "raw walk" else x * WIDTH**0.5 / x.norm(dim=-1, keepdim=True)


# --- heads on one set of tokens ---


@dataclass(frozen=True)
class Seen:
    """What each head does, mean over sequences."""

    kept: Float[Tensor, " heads"]  # residual, composite
    entropy: Float[Tensor, " heads"]  # ratio
    price: Float[Tensor, " heads"]  # kept (Frobenius) over what Pinsker allows; NaN under a mask


@dataclass(frozen=True)
class Batch:
    """Tokens, and what of them does not depend on the head."""

    x: Float[Tensor, "count T d"]
    size: Float[Tensor, " count"]  # ||res(X)||
    peak: Float[Tensor, " count"]  # max |R_j|
    covariance: Float[Tensor, "count d d"]
    second: Float[Tensor, "count d d"]  # X^T X / n

    @classmethod
    def of(cls, x: Float[Tensor, "count T d"]) -> Batch:
        rest = token_residual(x)
        wide = x.double()
        second = wide.mT @ wide / x.shape[1]
        covariance = rest.mT @ rest / x.shape[1]
        return cls(x, composite_norm(rest), rest.norm(dim=-1).amax(-1), covariance, second)


def attend(batch: Batch, maps: Float[Tensor, "heads d d"], causal: bool = False) -> Seen:
    """softmax(X A X^T) X of every head, measured."""
    parts = [_attend(batch, part, causal) for part in maps.split(max(1, AT_ONCE // len(batch.x)))]
    return Seen(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _attend(batch: Batch, maps: Float[Tensor, "heads d d"], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, n = batch.x, batch.x.shape[1]
    logits, visible = x @ maps.to(x)[:, None] @ x.mT, torch.full((n,), n)  # (heads, count, T, T)
    if causal:
        logits, visible = logits.masked_fill_(_later(n), -math.inf), torch.arange(1, n + 1)
    p = logits.softmax(-1)
    rest, H = token_residual(p @ x), -(p * p.clamp_min(TINY).log()).sum(-1)  # entr takes twice as long
    kept = (composite_norm(rest) / batch.size).mean(-1)
    ratio = entropy_ratio(H, visible.expand_as(H)).mean(-1)
    if causal:
        return kept, ratio, torch.full_like(kept, math.nan)
    lost = (math.log(n) - H.double()).mean(-1).clamp_min(1e-12)
    return kept, ratio, (rest.square().sum(-1).mean(-1).sqrt() / batch.peak / (2 * lost).sqrt()).amax(-1)


@cache
def _later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def response(batch: Batch, maps: Float[Tensor, "heads d d"]) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """(v, k): variance of logits across keys and residual kept to first order, from A and the tokens' covariance."""
    A, C = maps[:, None], batch.covariance
    through = A @ C  # (heads, count, d, d)
    v = (through @ A.mT * batch.second.mT).sum((-2, -1))
    k = (through @ C @ A.mT * C.mT).sum((-2, -1)) / C.diagonal(dim1=-2, dim2=-1).sum(-1)
    return v.mean(-1), k.mean(-1).clamp_min(0).sqrt()
