"""QK-norm: queries and keys of a fixed length, so that logits are bounded by the gains (Dehghani et al. 2023; Qwen3,
Gemma 3).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from locater.control.qk_norm import NormKind, qk_norm
from locater.errors import LocaterError
from locater_lab.mechanisms.inputs import Inputs
from locater_lab.mechanisms.softmax import softmax_attention, softmax_map


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
