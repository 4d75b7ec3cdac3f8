"""Fastmax (Gerami et al. 2024): the exponential of softmax replaced by its Taylor polynomial, which factorises.

f(x) = 1 + x (order 1) or 1 + x + x^2 / 2 (order 2) with x = q.k, A_ij = f(x_ij) / sum_j' f(x_ij'). Order 2 is at least
1/2 everywhere; order 1 needs |x| <= 1, or weights turn negative. With |x| <= 1 no weight of order 2 exceeds 5 / (n + 4)
among n keys: normalised Fastmax cannot localise.

At order 2 there are F = 1 + D + D (D + 8) / 2 features: they take T F numbers per head, and their sums F E. A GPU
therefore computes f itself, tile by tile, unless the sequence is very long; order 1 is linear attention with D + 1
features.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater_lab.mechanisms.inputs import Inputs, unit_length, widen
from locater_lab.mechanisms.kernels.features import has_feature_kernel
from locater_lab.mechanisms.kernels.polynomial import polynomial_attention
from locater_lab.mechanisms.kernels.weighted import has_kernel
from locater_lab.mechanisms.linear import by_features, factorised, kernel_map

Norm = Literal["token", "sequence"]
# Keys up to which a GPU writes the polynomial out, tile by tile, sooner than it sums up features: for heads of 64 on an
# H200 both take as long at 225,000 tokens, at 450,000 if causal.
LONGEST = 262_144


def fastmax_attention(x: Inputs, *, order: int = 2, norm: Norm | None = "token") -> Tensor:
    """`norm` bounds |q.k| by 1 before the scale (1 unless given).

    "token" divides each query and key by its length. "sequence" takes off the mean over tokens and divides by the
    largest length: what a token becomes depends on the others, so it is for encoders. None leaves them; the scale is
    then 1 / sqrt(D) unless given.

    >>> from locater_lab.mechanisms import mechanism
    >>> q, k = 100 * torch.randn(1, 1, 1, 4), torch.randn(1, 1, 46, 4)
    >>> bool(mechanism("fastmax").map(q, k).max() <= 0.1)                   # 5 / (46 + 4), whatever the queries
    True
    """
    scale = _scale(x, order, norm)
    if norm == "sequence":  # masks may differ by query head, and means with them
        x = replace(x, k=x.per_query_head(x.k), v=x.per_query_head(x.v))
    if order == 1 and norm == "token" and has_feature_kernel(x.q, x.v):
        return by_features(x, scale, unit=True)
    if norm != "sequence" and x.S <= LONGEST and has_kernel(x.q, x.v):
        keys = x.real_keys()
        seen = None if keys is None else keys[:, :, 0]
        return polynomial_attention(
            x.q, x.k, x.v, scale=scale, order=order, unit=norm == "token", keys=seen, causal=x.causal
        )
    q, k = _operands(x, scale, norm)
    _, _, v, keep = x.grouped()
    q, k = q.unflatten(1, (k.shape[1], -1)), k[:, :, None]
    return factorised(q, k, v, keep, partial(taylor_features, order=order), partial(_polynomial, order=order), x).to(
        x.v.dtype
    )


def fastmax_map(x: Inputs, *, order: int = 2, norm: Norm | None = "token") -> Tensor:
    q, k = _operands(replace(x, k=x.per_query_head(x.k)), _scale(x, order, norm), norm)
    return kernel_map(x, _polynomial(q, k, order))


def taylor_features(x: Tensor, order: int) -> Tensor:
    """Numbers whose products sum up to f(q.k): 1, x_a, and at order 2 the products x_a x_b.

    x^2 / 2 is half the sum over all pairs (a, b): pairs in different blocks of 8 channels are taken once, those of one
    block in both orders and by 1 / sqrt(2).

    >>> q, k = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 3.0])                    # q.k = -2
    >>> round(float(taylor_features(q, 2) @ taylor_features(k, 2)), 5)                # 1 - 2 + 4 / 2
    1.0
    """
    parts = [torch.ones_like(x[..., :1]), x]
    for at in range(0, x.shape[-1] if order == 2 else 0, 8):
        block = x[..., at : at + 8]
        after = torch.cat([block * 0.5**0.5, x[..., at + 8 :]], -1)
        parts.append((block[..., :, None] * after[..., None, :]).flatten(-2))
    return torch.cat(parts, -1)


def _polynomial(q: Tensor, k: Tensor, order: int) -> Tensor:
    x = q @ k.mT
    return 1 + x if order == 1 else 1 + x + x.square() / 2


def _scale(x: Inputs, order: int, norm: Norm | None) -> float:
    """The scale of a call whose options fit together."""
    if order not in (1, 2):
        raise LocaterError(f"order={order}: 1 or 2")
    if norm not in ("token", "sequence", None):
        raise LocaterError(f"norm={norm!r}: token, sequence or None")
    if norm == "sequence" and x.causal:
        raise LocaterError(
            "fastmax: norm='sequence' takes mean and maximum over later tokens too, so it cannot be causal; "
            "norm='token'"
        )
    scale = x.scale_or(1.0) if norm else x.usual_scale
    if order == 1 and (norm is None or abs(scale) > 1):
        raise LocaterError(
            "fastmax: order 1 has negative weights where |q.k| > 1; "
            "give it norm='token' and a scale of at most 1, or order=2"
        )
    return scale


def _operands(x: Inputs, scale: float, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Scaled, normalised queries and normalised keys, float32 at least."""
    q, k = widen(x.q), widen(x.k)
    if norm == "token":
        q, k = unit_length(q), unit_length(k)
    elif norm == "sequence":
        keys = x.real_keys()
        q, k = _sequence(q, x.real_queries()), _sequence(k, None if keys is None else keys.mT)
    return q * scale, k


def _sequence(x: Tensor, real: Tensor | None) -> Tensor:
    """Centred over real tokens, and divided by the largest length of one."""
    weight = x.new_ones(1, 1, x.shape[2], 1) if real is None else real.to(x)
    x = x - (x * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp_min(1)
    x = x * weight  # what padding holds stays out of the maximum, and of |q.k| <= 1
    return x / x.norm(dim=-1, keepdim=True).amax(2, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
