"""QK-norm: queries and keys of a fixed length, so that logits are bounded by the gains (Dehghani et al. 2023; Qwen3,
Gemma 3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locater.attention.inputs import Inputs
from locater.attention.softmax import softmax_attention, softmax_map
from locater.errors import LocaterError

NormKind = Literal["rms", "layer"]


def qk_norm(
    x: Float[Tensor, "B H T D"], gain: Float[Tensor, " H"], kind: NormKind = "rms", eps: float = 1e-6
) -> Float[Tensor, "B H T D"]:
    """g_h x / sqrt(mean_c x_c^2 + eps) for every head vector x; `kind="layer"` takes the mean over channels off first.

    One gain per head, not per channel: it commutes with rotation, and a rotation keeps lengths, so "rms" gives the same
    logits after rotary embedding as before it. Taking off the mean does not commute with rotation. Lengths are at most
    |g| sqrt(D), so |scale q.k| <= scale D |g_q g_k|, which is sqrt(D) |g_q g_k| for the usual scale. Computed in
    float32 at least.

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


def qk_norm_attention(
    x: Inputs,
    *,
    query_gain: Tensor | None = None,
    key_gain: Tensor | None = None,
    kind: NormKind = "rms",
    eps: float = 1e-6,
) -> Tensor:
    """Softmax attention of normalised queries and keys; gains (H,) and (K,) are 1 unless given."""
    return softmax_attention(_normed(x, query_gain, key_gain, kind, eps))


def qk_norm_map(
    x: Inputs,
    *,
    query_gain: Tensor | None = None,
    key_gain: Tensor | None = None,
    kind: NormKind = "rms",
    eps: float = 1e-6,
) -> Tensor:
    return softmax_map(_normed(x, query_gain, key_gain, kind, eps))


def _normed(x: Inputs, query_gain: Tensor | None, key_gain: Tensor | None, kind: NormKind, eps: float) -> Inputs:
    if kind not in ("rms", "layer"):
        raise LocaterError(f"kind={kind!r}: choose rms or layer")
    out = []
    for name, y, gain in (("query_gain", x.q, query_gain), ("key_gain", x.k, key_gain)):
        if gain is None:
            gain = y.new_ones(y.shape[1])
        elif tuple(gain.shape) != (y.shape[1],):
            raise LocaterError(f"{name} has shape {list(gain.shape)}, not [{y.shape[1]}] (one per head)")
        out.append(qk_norm(y, gain, kind, eps))
    return replace(x, q=out[0], k=out[1])
