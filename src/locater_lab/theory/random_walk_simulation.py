"""A simulation of the random walk: the reference against which the formulas of `propagation_and_regimes.py` are tested."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.theory.gaussian_surrogate import symmetric_root


@dataclass(frozen=True)
class Walks:
    """Averages over simulated walks, per position i = 1 ... T of the key."""

    propagated: Float[Tensor, " T"]  # share of walks in which token i is in the linear part of clipped softmax
    clipped: Float[Tensor, " T"]  # mean of clip((1 + delta_i)/T, 0, 1)
    softmax: Float[Tensor, " T"]  # mean of the true softmax weight
    error: Float[Tensor, " T"]  # standard error of `propagated`
    walks: int

    __repr__ = brief


def simulate(
    W_Q: Float[Tensor, "h d"],
    W_K: Float[Tensor, "h d"],
    scale: float,
    length: int,
    walks: int = 20_000,
    covariance: Float[Tensor, "d d"] | None = None,
    seed: int = 0,
    chunk: int = 2_000,
) -> Walks:
    """Draw walks x_1 ... x_T with step covariance C/T and apply the head to the last token, with both softmaxes.

    >>> W = torch.eye(4)
    >>> averages = simulate(W, W, scale=1.0, length=8, walks=2000)
    >>> bool(averages.softmax[-1] > averages.softmax[0])
    True
    """
    generator = torch.Generator().manual_seed(seed)
    d = W_Q.shape[-1]
    q, k = W_Q.double(), W_K.double()
    root = None if covariance is None else symmetric_root(covariance.double())
    total = torch.zeros(3, length, dtype=torch.float64)
    for start in range(0, walks, chunk):
        n = min(chunk, walks - start)
        steps = torch.randn(n, length, d, dtype=torch.float64, generator=generator)
        steps = steps if root is None else steps @ root.mT
        query = scale / length * (steps.sum(1) @ q.mT @ k)  # (n, d): the last token through q and k, for a step to meet
        omega = (steps @ query[..., None])[..., 0].cumsum(1)  # logits add up along a walk as its steps do
        delta = omega - omega.mean(1, keepdim=True)
        total[0] += ((delta > -1) & (delta < length - 1)).double().sum(0)
        total[1] += ((1 + delta) / length).clamp(0, 1).sum(0)
        total[2] += omega.softmax(1).sum(0)
    propagated, clipped, softmax = total / walks
    error = (propagated * (1 - propagated) / walks).sqrt()
    return Walks(propagated, clipped, softmax, error, walks)
