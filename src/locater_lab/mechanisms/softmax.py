"""Softmax attention, fused; and the same with its map written out. Most mechanisms are one of the two with other
operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from locater_lab.mechanisms.inputs import Inputs, widen

ROWS = 128  # queries at a time, where no fused kernel does it


def softmax_attention(x: Inputs) -> Tensor:
    """softmax(scale q k^T) v, by PyTorch's fused function.

    >>> from locater_lab.mechanisms import mechanism
    >>> q = k = torch.zeros(1, 1, 3, 4)
    >>> one_hot = torch.eye(3)[None, None]                     # with these values the output is the map
    >>> mechanism("softmax")(q, k, one_hot, causal=True)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    return fused_attention(x, x.usual_scale)


def softmax_map(x: Inputs) -> Tensor:
    return masked_softmax(x, logits(x, x.usual_scale))


def fused_attention(x: Inputs, scale: float, bias: Tensor | None = None) -> Tensor:
    """`scaled_dot_product_attention` with this package's masks; `bias` (b, h, t, S) is added to scaled logits.

    Fused kernels want queries and values of one size: the smaller is filled up with zeros. They know causal masks for T
    = S only: with keys before the queries, rows are put in front of these where that is cheap. Any other mask is
    written out as booleans. A row that sees no key is zero, with a gradient of zero.
    """
    T, S, size = x.T, x.S, x.v.shape[3]
    q, k, v = _pad_to_one_size(x.q, x.k, x.v)
    plain = bias is None and x.mask is None and x.padding is None
    flag = plain and x.causal and 1 < T and S <= 2 * T
    front, mask, empty = (S - T if flag else 0), None, None
    if front:
        q = functional.pad(q, (0, 0, front, 0))
    if not flag and (not plain or (x.causal and T > 1)):
        keys = x.real_keys()
        seen = (
            x.visible()
            if x.has_row_mask or x.causal
            else q.new_ones(1, 1, 1, S, dtype=torch.bool)
            if keys is None
            else keys
        )
        empty = ~seen.any(-1, keepdim=True)
        # a softmax over nothing is not a number on some devices: such rows see all, and are taken out again
        seen = seen | empty
        mask = seen if bias is None else bias.to(q).masked_fill(~seen, -torch.inf)
    if mask is not None:  # grouped keys and a mask at once are not fused on a GPU
        k, v = x.per_query_head(k), x.per_query_head(v)
    out = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=flag, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    out = out[:, :, front:, :size]
    return out if empty is None else out.masked_fill(empty, 0.0)


def _pad_to_one_size(*tensors: Tensor) -> list[Tensor]:
    """Filled up with zeros to one size, a multiple of 8 where that takes a copy anyway."""
    sizes = {y.shape[3] for y in tensors}
    width = max(sizes) if len(sizes) == 1 else -(-max(sizes) // 8) * 8
    return [y if y.shape[3] == width else functional.pad(y, (0, width - y.shape[3])) for y in tensors]


def add_logit_term(x: Inputs, of_queries: Tensor, of_keys: Tensor) -> Inputs:
    """Operands for which of_queries * of_keys is added to q.k, before the scale: one more channel, so any fused kernel
    can do it.

    `of_queries` is (b, h, T or 1, 1) and `of_keys` (b, h, S or 1, 1). In half precision a number takes two channels:
    its rounded value, and what rounding left.
    """
    pairs = [(a, b) for a in _split_precision(of_queries, x.q.dtype) for b in _split_precision(of_keys, x.q.dtype)]
    q = torch.cat([x.q, *(a.expand(*x.q.shape[:3], 1) for a, _ in pairs)], -1)
    k = torch.cat([x.k, *(b.expand(*x.k.shape[:3], 1) for _, b in pairs)], -1)
    return replace(x, q=q, k=k)


def _split_precision(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    first = values.to(dtype)
    if first.dtype == values.dtype or dtype.itemsize >= 4:
        return [first]
    return [first, (values - first).to(dtype)]


def logits(x: Inputs, scale: float) -> Tensor:
    """scale q k^T (B, H, T, S), float32 at least."""
    return widen(x.q) @ widen(x.per_query_head(x.k)).mT * scale


def masked_softmax(x: Inputs, scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """softmax over the keys in view; a row that sees none is zero. `sinks` (H,) are logits that take weight and give
    none.
    """
    hidden = ~x.visible()
    # not -inf: the gradient of an empty row would be NaN
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : x.S].masked_fill(hidden, 0.0)


def attend_by_rows(x: Inputs, run: Callable[[Inputs], Tensor]) -> Tensor:
    """run(x), some queries at a time, for maps that no fused kernel knows. Causal ones look no further than they need
    to.

    The result of a block is computed again for the gradient, so no T x S matrix is ever stored.
    """
    out = []
    for at in range(0, x.T, ROWS):
        end = min(at + ROWS, x.T)
        keys = x.S - x.T + end if x.causal else x.S
        terms = x.terms.for_queries(slice(at, end)).up_to(keys)
        some = replace(x, q=x.q[:, :, at:end], k=x.k[:, :, :keys], v=x.v[:, :, :keys], terms=terms)
        out.append(recompute_in_backward(run, some) if x.T > ROWS else run(some))
    return torch.cat(out, 2)


def recompute_in_backward(run: Callable[[Inputs], Tensor], x: Inputs) -> Tensor:
    """run(x), with nothing but x stored for the gradient."""
    if not torch.is_grad_enabled():
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
