"""Soft-capped attention: c tanh(logits / c) before mask and softmax (Gemma 2)."""

from __future__ import annotations

import math

from torch import Tensor

from locater.control.softcap import softcap_attention
from locater.errors import LocaterError
from locater.kernels.terms import LARGEST_CAP
from locater_lab.mechanisms.inputs import Inputs
from locater_lab.mechanisms.kernels.weighted import has_kernel, weighed_attention
from locater_lab.mechanisms.softmax import by_rows

DEFAULT_CAP = 50.0


def capped_attention(x: Inputs, *, cap: float = DEFAULT_CAP) -> Tensor:
    """`softcap_attention` as a mechanism of the registry: one kernel on a GPU, elsewhere some rows at a time."""
    x = _with_cap(x, cap)
    if x.has_row_mask or cap > LARGEST_CAP or not has_kernel(x.q, x.v):
        return by_rows(x, lambda some: softcap_attention(some.q, some.k, some.v, some.terms)[0])
    keys = x.real_keys()
    return weighed_attention(
        x.q, x.k, x.v, scale=x.usual_scale, cap=cap, keys=None if keys is None else keys[:, :, 0], causal=x.causal
    )


def capped_map(x: Inputs, *, cap: float = DEFAULT_CAP) -> Tensor:
    return softcap_attention(x.q, x.k, x.v, _with_cap(x, cap).terms)[1]


def _with_cap(x: Inputs, cap: float) -> Inputs:
    if not isinstance(cap, int | float) or not math.isfinite(cap):  # a word, such as nan, comes as a text
        raise LocaterError(f"cap={cap}: give a finite number above 0")
    if cap <= 0:
        raise LocaterError(f"cap={cap}: a number above 0")
    return x.with_terms(softcap=cap)
