"""Attention calls made beside the interface of transformers, as `Call`s: fused attention of PyTorch, FlexAttention, and
a softmax written by hand.

Axes: B batch, H query heads, K key heads, T queries, S keys, D size of a query, V size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from locater.attention.call import Call, with_mask
from locater.errors import LocaterError
from locater.kernels.terms import Terms

# A logit below this whose weight is 0 was hidden by a mask: masks written by hand add -10,000 or the lowest number.
HIDDEN = -5000.0


def from_fused(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    heads: int | None = None,
) -> Call:
    """A call of `torch.nn.functional.scaled_dot_product_attention` and its output, without gradients.

    Tensors are (..., H, T, D); with three axes they are (B * H, T, D), and `heads` says how many of them are heads.
    Causal here means that query i sees the keys 0 to i, also where there are more keys than queries.

    >>> q = torch.zeros(2, 3, 4, 8)
    >>> call = from_fused(q, q, q, q, is_causal=True)
    >>> call.query.shape, call.terms.causal
    (torch.Size([2, 3, 4, 8]), True)
    """
    lead = torch.broadcast_shapes(*(x.shape[: -3 if x.ndim > 3 else -2] for x in (query, key)))
    q, k, out = (_four_axes(x.detach(), lead, heads) for x in (query, key, output))
    T, S = q.shape[2], k.shape[2]
    positions = torch.arange(T, device=q.device) if is_causal and T != S else None
    terms = Terms(None if scale is None else float(scale), is_causal, positions=positions)
    if attn_mask is not None:
        whole = attn_mask.detach().expand(*query.shape[:-1], S) if query.ndim != 4 else attn_mask.detach()
        mask = _four_axes(whole, whole.shape[: -3 if whole.ndim > 3 else -2], heads)
        terms = with_mask(terms, mask.expand(*mask.shape[:-1], S), S)
    return Call(q, k, terms, out.transpose(1, 2))


def from_flex(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor, block_mask: Any = None, scale: float | None = None
) -> Call:
    """A call of FlexAttention and its output, without gradients. The mask of blocks is written out."""
    B, H, T, S = *query.shape[:3], key.shape[2]
    terms = Terms(None if scale is None else float(scale))
    if block_mask is not None:
        at = (torch.arange(size, device=query.device) for size in (B, H, T, S))
        shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
        visible = block_mask.mask_mod(*(x.view(shape) for x, shape in zip(at, shapes, strict=True)))
        terms = with_mask(terms, visible.expand(B, H, T, S), S)
    return Call(query.detach(), key.detach(), terms, output.detach().transpose(1, 2))


def from_softmax(weights: Tensor, logits: Tensor, heads: int | None = None) -> Call:
    """A softmax over the last axis of logits (..., H, T, S), with its result; without gradients.

    The logits are known and the queries and keys are not, so the call has queries and keys of zeros and the logits as
    its bias: every number but those of head outputs is that of the softmax.

    >>> logits = torch.randn(1, 2, 3, 4)
    >>> bool((from_softmax(logits.softmax(-1), logits).terms.bias == logits).all())
    True
    """
    lead = logits.shape[: -3 if logits.ndim > 3 else -2]
    x, p = _four_axes(logits.detach(), lead, heads), _four_axes(weights.detach(), lead, heads)
    B, H, T, S = x.shape
    bias = x.masked_fill((x < HIDDEN) & (p == 0), -torch.inf)
    return Call(x.new_zeros(B, H, T, 1), x.new_zeros(B, H, S, 1), Terms(1.0, bias=bias))


def _four_axes(x: Tensor, lead: torch.Size, heads: int | None) -> Tensor:
    """(..., H, T, D) as (B, H, T, D), with the other axes before T as one; (B * H, T, D) split by `heads`.

    With more than four axes the one of the heads is that of their number: windows may come before it or after it.
    Raises where that does not tell it.
    """
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3 and heads is not None and len(x) % heads == 0:
        return x.unflatten(0, (-1, heads))
    if x.ndim == 4 and (heads is None or x.shape[1] in (1, heads)):
        return x
    if x.ndim > 4:
        x = x.expand(*lead, *x.shape[-3:])
        places = [at for at in range(1, x.ndim - 2) if x.shape[at] == heads]
        if len(places) == 1:
            return x.movedim(places[0], -3).flatten(0, -4)
    known = "" if heads is None else f", of which the module says that there are {heads}"
    raise LocaterError(f"attention of shape {list(x.shape)}: it is not known which axis are the heads{known}")
