"""QK-norm: queries and keys of a fixed length, so that logits are bounded by the gains (Dehghani et al. 2023; Qwen3, Gemma 3)."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

NormKind = Literal["rms", "layer"]


def qk_norm(x: Float[Tensor, "B H T D"], gain: Float[Tensor, " H"], kind: NormKind = "rms", eps: float = 1e-6) -> Float[Tensor, "B H T D"]:
    """g_h x / sqrt(mean_c x_c^2 + eps) for every head vector x; `kind="layer"` takes the mean over channels off first.

    One gain per head, not per channel: it commutes with rotation, and a rotation keeps lengths, so "rms" gives the same logits
    after rotary embedding as before it. Taking off the mean does not commute with rotation. Lengths are at most |g| sqrt(D), so
    |scale q.k| <= scale D |g_q g_k|, which is sqrt(D) |g_q g_k| for the usual scale. Computed in float32 at least.

    >>> x = torch.randn(1, 2, 3, 16)
    >>> qk_norm(x, torch.tensor([1.0, 2.0])).norm(dim=-1).mean((0, 2)).round().tolist()     # sqrt(16) times the gain
    [4.0, 8.0]
    """
    return (unit(x, kind, eps) * gain.to(x.device)[:, None, None]).to(x.dtype)


def unit(x: Tensor, kind: NormKind, eps: float) -> Tensor:
    """Head vectors with root mean square 1."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
