"""Doubly normalized attention (Ding et al. 2020): over queries first, then over keys; so that no key is explained away.

E_ij = scale q_i.k_j; xi_ij = exp(E_ij) / sum_i' exp(E_i'j); A_ij = xi_ij / sum_j' xi_ij'. Every key receives at least 1/S in all:
sum_i A_ij >= 1/S. The hybrid is u A + (1 - u) softmax(E), which gives at least u/S.

log xi_ij = E_ij - L_j with L_j = log sum_i exp(E_ij), so it is softmax attention with -L_j added to the logits of key j. L is
computed for some keys at a time; no T x S matrix is kept. The sum runs over later queries too: it cannot be causal.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from locater.attention.inputs import Inputs, head_values
from locater.attention.softmax import fused, logits, made_again, normalized, softmax_attention, softmax_map, with_channels
from locater.errors import LocaterError

BLOCK = 128  # keys at a time


def doubly_normalized_attention(x: Inputs) -> Tensor:
    """Two passes: L, then fused attention with -L as one more channel of the keys. Padded queries do not count in L.

    >>> from locater.attention import mechanism
    >>> q, k = 20 * torch.randn(1, 1, 64, 4), torch.randn(1, 1, 64, 4)
    >>> bool(mechanism("doubly_normalized").map(q, k).sum(2).min() >= 1 / 64)
    True
    """
    scale = x.usual_scale
    ready = replace(x, k=x.per_query_head(x.k), v=x.per_query_head(x.v))
    shift = -torch.cat([_log_sum(ready, slice(at, at + BLOCK)) for at in range(0, x.S, BLOCK)], 2)  # (B, H, S)
    return fused(with_channels(ready, x.q.new_ones(1, 1, 1, 1), shift[..., None] / scale), scale)


def doubly_normalized_map(x: Inputs) -> Tensor:
    scores = logits(x, x.usual_scale)
    return normalized(x, scores - _over_queries(scores, _counted(x))[:, :, None])


def hybrid_normalized_attention(x: Inputs, *, mix: float | Tensor) -> Tensor:
    """`mix` is u: a number, or one per query head (H,), from 0 (softmax) to 1 (doubly normalized)."""
    u = _mix(x, mix)
    return u * doubly_normalized_attention(x) + (1 - u) * softmax_attention(x)


def hybrid_normalized_map(x: Inputs, *, mix: float | Tensor) -> Tensor:
    u = _mix(x, mix)
    return u * doubly_normalized_map(x) + (1 - u) * softmax_map(x)


def _mix(x: Inputs, mix: float | Tensor) -> float | Tensor:
    if not isinstance(mix, Tensor) and not 0 <= mix <= 1:
        raise LocaterError(f"mix={mix}: a number from 0 (softmax) to 1 (doubly normalized)")
    u = head_values(mix, x, "mix")
    return u.to(x.q.dtype) if isinstance(u, Tensor) else u


def _counted(x: Inputs) -> Tensor:
    """(b, h, T, S): which queries count for a key."""
    real, seen = x.real_queries(), x.visible()
    return seen if real is None else seen & real


def _over_queries(scores: Tensor, counted: Tensor) -> Tensor:
    """log sum_i exp(E_ij) over the queries that count, 0 where none does: (B, H, s)."""
    out = scores.masked_fill(~counted, torch.finfo(scores.dtype).min).logsumexp(2)
    return out.masked_fill(~counted.any(2), 0.0)


def _log_sum(x: Inputs, keys: slice) -> Tensor:
    """L of some keys; logits are made again for the gradient."""
    mask, padding = (None if y is None else y[..., keys] for y in (x.mask, x.padding))
    some = replace(x, k=x.k[:, :, keys], v=x.v[:, :, keys], mask=mask, padding=padding)
    real = x.real_queries()
    seen = some.visible() if real is None else some.visible() & real
    return made_again(lambda y: _over_queries(logits(y, x.usual_scale), seen), some)
