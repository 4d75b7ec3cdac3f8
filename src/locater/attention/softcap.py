"""Soft-capped attention: c tanh(logits / c) before mask and softmax (Gemma 2)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from locater.attention.inputs import Inputs
from locater.attention.softmax import by_rows
from locater.errors import LocaterError
from locater.kernels import Terms
from locater.kernels.terms import LARGEST_CAP
from locater.kernels.weighted import has_kernel, weighed_attention


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap): the identity near 0, never beyond the cap. Its slope 1 - tanh^2 vanishes once it is
    reached.

    >>> softcap(torch.tensor([0.0, 25.0, 1e4]), 50.0).round().tolist()
    [0.0, 23.0, 50.0]
    """
    return cap * torch.tanh(logits / cap)


def softcap_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    terms: Terms,
    added: Float[Tensor, "b h t S"] | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T S"]]:
    """softmax(cap tanh((scale q.k + bias) / cap) + mask) v, and the weights. T x S matrices are built, as by plain
    attention.

    The cap is `terms.softcap`. `added` comes after it, like a mask. Products in the precision of q, softmax in float32
    at least; a row that sees no key is zero. Sinks take weight and are not capped.

    >>> q = k = v = torch.full((1, 1, 2, 4), 100.0)
    >>> softcap_attention(q, k, v, Terms(scale=0.5, causal=True, softcap=30.0))[1].tolist()
    [[[[1.0, 0.0], [0.5, 0.5]]]]
    """
    if terms.softcap is None:
        raise LocaterError("softcap_attention needs Terms(softcap=...), a number above 0")
    T, S, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    met = query @ key.mT
    logits = met.to(torch.promote_types(met.dtype, torch.float32)) * terms.scale_for(query.shape[-1])
    if terms.bias is not None:
        logits = logits + terms.bias
    logits = softcap(logits, terms.softcap)
    if added is not None:
        logits = logits + added
    hidden = ~terms.visible(slice(0, T), T, S, query.device)
    if terms.bias is not None:  # of -inf is a mask
        hidden = hidden | (terms.bias == -torch.inf)
    # not -inf: the gradient of an empty row would be NaN
    logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    if terms.sinks is not None:
        logits = torch.cat([logits, terms.sinks.to(logits).view(-1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    weights = logits.softmax(-1)[..., :S].masked_fill(hidden, 0.0).to(query.dtype)
    mixed = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    return mixed @ value, weights


def capped_attention(x: Inputs, *, cap: float = 50.0) -> Tensor:
    """`softcap_attention` as a mechanism of the registry: one kernel on a GPU, elsewhere some rows at a time."""
    x = _with_cap(x, cap)
    if x.has_row_mask or cap > LARGEST_CAP or not has_kernel(x.q, x.v):
        return by_rows(x, lambda some: softcap_attention(some.q, some.k, some.v, some.terms)[0])
    keys = x.real_keys()
    return weighed_attention(
        x.q, x.k, x.v, scale=x.usual_scale, cap=cap, keys=None if keys is None else keys[:, :, 0], causal=x.causal
    )


def capped_map(x: Inputs, *, cap: float = 50.0) -> Tensor:
    return softcap_attention(x.q, x.k, x.v, _with_cap(x, cap).terms)[1]


def _with_cap(x: Inputs, cap: float) -> Inputs:
    if not isinstance(cap, int | float) or not math.isfinite(cap):  # a word, such as nan, comes as a text
        raise LocaterError(f"cap={cap}: give a finite number above 0")
    if cap <= 0:
        raise LocaterError(f"cap={cap}: a number above 0")
    return x.with_terms(softcap=cap)
