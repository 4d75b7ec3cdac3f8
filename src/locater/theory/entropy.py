"""Entropy of a row of attention without computing the row: lower bounds, an estimate, and a ratio to compare lengths.

docs/theory.md section 7. All entropies are in nats.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.numerics import as_float64


def entropy_floor(norm: Float[Tensor, "*n"] | float, length: int) -> Float[Tensor, "*n"]:
    """The lowest entropy of a softmax row of T logits whose mean-centred l2 norm is s (Zhai et al. 2023).

        b = exp(-s sqrt(T/(T-1))),   H >= log(1 + (T-1) b) + s sqrt(T(T-1)) b / (1 + (T-1) b)

    Reached by the row with one logit above T - 1 equal ones.

    >>> round(entropy_floor(0.0, 8).item() - math.log(8), 12)
    0.0
    """
    s = as_float64(norm)
    if length < 2:
        return torch.zeros_like(s)
    t = length
    b = torch.exp(-s * math.sqrt(t / (t - 1)))
    total = 1 + (t - 1) * b
    return torch.log(total) + s * math.sqrt(t * (t - 1)) * b / total


def entropy_floor_of_range(spread: Float[Tensor, "*n"] | float, length: int) -> Float[Tensor, "*n"]:
    """The lowest entropy of a row of T logits that differ by at most `spread`: the minimum over rows with two values.

    With k logits at the top and T - k at the bottom, p = k / (k + (T-k) e^-spread) is the mass of the top:
    H = -p log(p/k) - (1-p) log((1-p)/(T-k)).

    >>> round(entropy_floor_of_range(0.0, 8).item() - math.log(8), 12)
    0.0
    """
    r = as_float64(spread).unsqueeze(-1)
    if length < 2:
        return torch.zeros_like(r.squeeze(-1))
    k = torch.arange(1, length, dtype=torch.float64, device=r.device)
    rest = (length - k) * torch.exp(-r)
    p = k / (k + rest)
    entropy = torch.log(k + rest) + (1 - p) * r  # log-sum-exp with the top at 0, minus the mean logit -(1-p) r
    return entropy.amin(-1)


def second_order_entropy(variance: Float[Tensor, "*n"] | float, length: int) -> Float[Tensor, "*n"]:
    """log T - v/2: the entropy of T normal logits of variance v to second order in their spread, at least 0.

    Close for v well below 2 log T. For every v there is `expected_entropy`.

    >>> round(second_order_entropy(1.0, 256).item(), 3)
    5.045
    """
    v = as_float64(variance)
    return (math.log(length) - v / 2).clamp_min(0)


def entropy_ratio(entropy: Float[Tensor, "*n rows"], visible: Int[Tensor, "*n rows"]) -> Float[Tensor, "*n"]:
    """Mean over rows of H_i / log(visible keys): 1 is uniform attention, at any length.

    Rows with fewer than two visible keys do not count. NaN where no row counts.

    >>> entropy_ratio(torch.log(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([1, 2, 3])).item()
    1.0
    """
    counts = visible >= 2
    share = torch.where(counts, entropy / torch.log(visible.clamp_min(2).to(entropy.dtype)), torch.zeros_like(entropy))
    return share.sum(-1) / counts.sum(-1)
