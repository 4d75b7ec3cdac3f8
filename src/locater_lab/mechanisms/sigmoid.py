"""Sigmoid attention (Ramapuram et al. 2025): every weight on its own, no competition between keys."""

from __future__ import annotations

import torch
from torch import Tensor

from locater_lab.mechanisms.inputs import Inputs, head_values
from locater_lab.mechanisms.kernels.weighted import has_kernel, weighed_attention
from locater_lab.mechanisms.softmax import by_rows, logits


def sigmoid_attention(x: Inputs, *, bias: float | Tensor | None = None) -> Tensor:
    """sigmoid(scale q k^T + b) v. Unless given, b = -ln n with n the keys that a query sees, row by row.

    With b = -ln n and logits of 0 a row sums to n / (n + 1). It is not bounded by 1: each weight can be 1, so a row by
    n.

    >>> from locater_lab.mechanisms import mechanism
    >>> q = k = v = torch.ones(1, 1, 4, 4)
    >>> mechanism("sigmoid")(0 * q, k, v, causal=True)[0, 0, :, 0]
    tensor([0.5000, 0.6667, 0.7500, 0.8000])
    >>> mechanism("sigmoid")(9 * q, k, v, causal=True)[0, 0, :, 0].round()
    tensor([1., 2., 3., 4.])
    """

    if x.has_row_mask or not has_kernel(x.q, x.v):
        return by_rows(x, lambda some: sigmoid_map(some, bias=bias).to(some.v.dtype) @ some.per_query_head(some.v))
    keys = x.real_keys()
    shift = _shift(x, bias)
    rows = (
        shift.expand(*x.q.shape[:3], 1)[..., 0]
        if isinstance(shift, Tensor)
        else x.q.new_full(x.q.shape[:3], shift, dtype=torch.float32)
    )
    return weighed_attention(
        x.q, x.k, x.v, scale=x.usual_scale, shift=rows, keys=None if keys is None else keys[:, :, 0], causal=x.causal
    )


def sigmoid_map(x: Inputs, *, bias: float | Tensor | None = None) -> Tensor:
    scores = logits(x, x.usual_scale)
    return torch.sigmoid(scores + _shift(x, bias)).masked_fill(~x.visible(), 0.0)


def _shift(x: Inputs, bias: float | Tensor | None) -> float | Tensor:
    """The bias given, or -ln of the keys that each row sees (b, h, t, 1)."""
    return head_values(bias, x, "bias") if bias is not None else -x.keys_in_view().clamp_min(1).log()
