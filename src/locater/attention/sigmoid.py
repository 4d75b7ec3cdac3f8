"""Sigmoid attention (Ramapuram et al. 2025): every weight on its own, no competition between keys."""

from __future__ import annotations

import torch
from torch import Tensor

from locater.attention.inputs import Inputs, head_values
from locater.attention.softmax import by_rows, logits


def sigmoid_attention(x: Inputs, *, bias: float | Tensor | None = None) -> Tensor:
    """sigmoid(scale q k^T + b) v. Unless given, b = -ln n with n the keys that a query sees, row by row.

    With b = -ln n and logits of 0 a row sums to n / (n + 1). It is not bounded by 1: each weight can be 1, so a row by n.

    >>> from locater.attention import mechanism
    >>> q = k = v = torch.ones(1, 1, 4, 4)
    >>> mechanism("sigmoid")(0 * q, k, v, causal=True)[0, 0, :, 0]
    tensor([0.5000, 0.6667, 0.7500, 0.8000])
    >>> mechanism("sigmoid")(9 * q, k, v, causal=True)[0, 0, :, 0].round()
    tensor([1., 2., 3., 4.])
    """

    def run(some: Inputs) -> Tensor:
        return sigmoid_map(some, bias=bias).to(some.v.dtype) @ some.per_query_head(some.v)

    return by_rows(x, run)


def sigmoid_map(x: Inputs, *, bias: float | Tensor | None = None) -> Tensor:
    seen = x.visible()
    scores = logits(x, x.usual_scale)
    if bias is None:
        shift: float | Tensor = -seen.sum(-1, keepdim=True).clamp_min(1).to(scores).log()
    else:
        shift = head_values(bias, x, "bias")
    return torch.sigmoid(scores + shift).masked_fill(~seen, 0.0)
