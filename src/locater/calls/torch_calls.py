"""Attention calls made beside the interface of transformers, as `Call`s: fused attention of PyTorch, its multi-head
function, and a softmax written by hand. FlexAttention has a file of its own.

Axes: B batch, H query heads, K key heads, T queries, S keys, D size of a query, V size of a value, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from locater.calls.call_and_masks import Call, with_mask
from locater.calls.head_axes import HeadAxes
from locater.errors import LocaterError
from locater.kernels.terms import Terms

# A logit below HIDDEN was hidden by a mask if it has no weight: masks written by hand add -10,000 or the lowest number.
HIDDEN = -5000.0
NO_WEIGHT = 110.0  # a logit so much smaller than the largest of its row has weight 0 in float32


def call_of_fused(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    axes: HeadAxes,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """A call of `torch.nn.functional.scaled_dot_product_attention` and its output, without gradients.

    Tensors are (..., T, D); `axes` says which of their axes are heads. Causal here means that query i sees the keys 0
    to i, also where there are more keys than queries.

    >>> q = torch.zeros(2, 3, 4, 8)
    >>> call = call_of_fused(q, q, q, HeadAxes((1,)), is_causal=True)
    >>> call.query.shape, call.terms.causal
    (torch.Size([2, 3, 4, 8]), True)
    """
    lead, T, S = output.shape[:-2], query.shape[-2], key.shape[-2]
    of_keys = (*lead[:-1], key.shape[-3]) if enable_gqa else lead
    q = axes.rows(query.detach().expand(*lead, T, query.shape[-1]))
    k = axes.rows(key.detach().expand(*of_keys, S, key.shape[-1]))
    positions = torch.arange(T, device=q.device) if is_causal and T != S else None
    terms = Terms(None if scale is None else float(scale), is_causal, positions=positions)
    if attn_mask is not None:
        mask = attn_mask.detach()
        if len(lead) == 2 and axes.is_usual:  # what all heads share stays one
            mask = mask[(None,) * (4 - mask.ndim)].expand(*[-1] * 3, S)
        else:
            mask = axes.rows(mask.expand(*lead, T, S))
        terms = with_mask(terms, mask, S)
    return Call(q, k, terms, axes.rows(output.detach()).transpose(1, 2))


def call_of_multi_head(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    num_heads: int,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Call:
    """A call of `torch.nn.functional.multi_head_attention_forward` on (T, B, E) or (T, E), without gradients. Queries
    and keys are projected again. In its masks True hides, and numbers are added.
    """

    def heads(x: Tensor, part: int) -> Tensor:
        projected = functional.linear(x if x.ndim == 3 else x[:, None], weights[part], biases[part])
        return projected.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)  # (B, H, T, D)

    with torch.no_grad():
        q, k = heads(query.detach(), 0), heads(key.detach(), 1)
        B, H, T, S = *q.shape[:3], k.shape[2]
        call = Call(q, k, Terms(q.shape[-1] ** -0.5), (output if output.ndim == 3 else output[:, None]).transpose(0, 1))
        added = []
        for mask, shape in ((attn_mask, (-1, H, T, S)), (key_padding_mask, (B, 1, 1, S))):
            if mask is None:
                continue
            whole = mask.detach()[None, None] if mask.ndim == 2 and shape[0] == -1 else mask.detach().reshape(shape)
            added.append(q.new_zeros(()).masked_fill(whole, -torch.inf) if mask.dtype == torch.bool else whole)
        return call.masked(sum(added[1:], added[0])) if added else call


def call_of_softmax(logits: Tensor, axes: HeadAxes, keys: int | None = None) -> Call:
    """A softmax over the last axis of logits (..., T, S), without gradients. The first `keys` of them are those of
    keys, others take weight and give no value: a sink.

    The logits are known and the queries and keys are not, so the call has queries and keys of zeros and the logits as
    its bias: every number but those of head outputs is that of the softmax. A row of which every logit is hidden sees
    no key.

    >>> logits = torch.randn(1, 2, 3, 4)
    >>> bool((call_of_softmax(logits, HeadAxes((1,))).terms.bias == logits).all())
    True
    """
    x, sinks = axes.rows(logits.detach()), None
    if keys is not None:
        x, sinks = x[..., :keys], _sinks(x[..., keys:])
    B, H, T, S = x.shape
    low = x < HIDDEN
    hidden = low & ((x < x.amax(-1, keepdim=True) - NO_WEIGHT) | low.all(-1, keepdim=True))
    bias = x.masked_fill(hidden, -torch.inf)
    return Call(x.new_zeros(B, H, T, 1), x.new_zeros(B, H, S, 1), Terms(1.0, bias=bias, sinks=sinks))


def _sinks(logits: Tensor) -> Tensor:
    """(H,): one logit for each head in place of those (B, H, T, n) that belong to no key."""
    of_rows = logits.logsumexp(-1)  # (B, H, T)
    sinks = of_rows[0, :, 0]
    near = 16 * torch.finfo(logits.dtype).eps * of_rows.abs().amax().clamp_min(1)
    if bool(((of_rows - sinks[:, None]).abs() > near).any()):
        raise LocaterError("a logit that belongs to no key joins its softmax, and is another one in each row")
    return sinks
