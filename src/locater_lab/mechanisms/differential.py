"""Differential attention (Ye et al. 2025): the difference of two softmax maps, so that what both look at cancels.

A = softmax(scale q1 k1^T) - lam softmax(scale q2 k2^T), where q1, q2 are the halves of a query's channels and k1, k2
those of a key's; scale is 1 / sqrt(D / 2) unless given. Rows sum to 1 - lam and entries may be negative. The norm of
heads and the factor 1 - lam_init that follow in the paper belong to a module.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from locater.errors import LocaterError
from locater_lab.mechanisms.inputs import Inputs, head_values
from locater_lab.mechanisms.softmax import fused, logits, normalized


def differential_attention(x: Inputs, *, lam: float | Tensor) -> Tensor:
    """Two fused calls. `lam` is a number, or one per query head (H,).

    >>> import torch
    >>> from locater_lab.mechanisms import mechanism
    >>> q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.ones(1, 2, 3, 1)
    >>> mechanism("differential")(q, k, v, lam=torch.tensor([0.2, 0.8]))[0, :, 0, 0]     # rows sum to 1 - lam
    tensor([0.8000, 0.2000])
    """
    first, second, scale, weight = _halves(x, lam)
    return fused(first, scale) - weight * fused(second, scale)


def differential_map(x: Inputs, *, lam: float | Tensor) -> Tensor:
    first, second, scale, weight = _halves(x, lam)
    return normalized(first, logits(first, scale)) - weight * normalized(second, logits(second, scale))


def _halves(x: Inputs, lam: float | Tensor) -> tuple[Inputs, Inputs, float, float | Tensor]:
    size = x.q.shape[3]
    if size % 2:
        raise LocaterError(f"differential: queries of {size} channels have no two halves; an even size")
    (q1, q2), (k1, k2) = x.q.chunk(2, -1), x.k.chunk(2, -1)
    weight = head_values(lam, x, "lam")
    weight = weight.to(x.q.dtype) if isinstance(weight, Tensor) else weight
    return replace(x, q=q1, k=k1), replace(x, q=q2, k=k2), x.scale_or((size // 2) ** -0.5), weight
