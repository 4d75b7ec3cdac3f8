"""Attention without its outlier (Nait Saada, Naderi, Tanner 2025): A - U, with U uniform over the keys in view.

The rows of A and U sum to 1, so (A - U) v = A (v - mean of v): values are centred, and the kernel of attention stays as
it is. Where rows see different keys (causal, or a mask with a row per query) the mean is that of the keys each row
sees: U_ij = 1/i for j <= i, a prefix sum. Rows sum to 0. (I - U) A would be another matrix.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from locater_lab.mechanisms.inputs import Inputs
from locater_lab.mechanisms.softmax import fused, softmax_map


def centred_attention(x: Inputs) -> Tensor:
    """softmax(scale q k^T) v minus the mean value in view.

    >>> import torch
    >>> from locater_lab.mechanisms import mechanism
    >>> q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    >>> both = [mechanism("centred")(q, k, v + shared, causal=True) for shared in (0, 5)]
    >>> torch.allclose(*both, atol=1e-5)                       # what all values share is lost
    True
    >>> both[0][0, 0, 0].tolist()                              # the first token sees itself
    [0.0, 0.0, 0.0, 0.0]
    """
    mean = x.mean_in_view(x.v)
    if mean.shape[1:3] == (x.v.shape[1], 1):  # the same for all rows: nothing large is subtracted afterwards
        return fused(replace(x, v=(x.v - mean).to(x.v.dtype)), x.usual_scale)
    return (fused(x, x.usual_scale) - x.per_query_head(mean)).to(x.v.dtype)


def centred_map(x: Inputs) -> Tensor:
    seen = x.visible()
    weights = softmax_map(x)
    return weights - seen.to(weights) / seen.sum(-1, keepdim=True).clamp_min(1)
