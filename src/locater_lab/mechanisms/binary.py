"""Binary attention (Xiao, Zhang, Zhang 2026): queries and keys of one bit per channel, with a scale and a bias.

Logits are scale mu_q mu_k sign(q).sign(k) + bias, where sign(0) = 1 and mu is the mean of |q| or |k|. They take at most
D + 1 levels, 2 scale mu_q mu_k apart. The gradient of the sign is that of the clipped identity (1 where |x| <= 1), and
mu has its own.

mu is one number per sample and head, over all its real tokens: that would tell a query of later ones. Where rows see
different keys (causal, or a mask with a row per query) mu_q is the query's own and mu_k the mean over the keys it sees;
both scale whole rows, so logits are still counts of equal bits. Emulated here: signs are multiplied as floating
numbers.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from locater.errors import LocaterError
from locater_lab.mechanisms.inputs import Inputs, widen
from locater_lab.mechanisms.softmax import fused, logits, normalized


def binary_attention(x: Inputs, *, bias: Tensor | None = None) -> Tensor:
    """softmax(scale mu_q mu_k sign(q) sign(k)^T + bias) v; `bias` (b, h, t, S) is what a model learns, axes of size 1
    are shared.

    >>> import torch
    >>> from locater_lab.mechanisms import mechanism
    >>> q, k = torch.randn(1, 1, 50, 4), torch.randn(1, 1, 50, 4)
    >>> weights = mechanism("binary").map(q, k)[0, 0, 0]
    >>> len(weights.log().mul(1e4).round().unique()) <= 5      # four bits agree in 0 to 4 places
    True
    """
    return fused(_one_bit(x), x.usual_scale, _checked(x, bias))


def binary_map(x: Inputs, *, bias: Tensor | None = None) -> Tensor:
    scores = logits(_one_bit(x), x.usual_scale)
    added = _checked(x, bias)
    return normalized(x, scores if added is None else scores + added)


def sign(x: Tensor) -> Tensor:
    """+1 or -1, +1 at zero; its gradient is passed on where |x| <= 1.

    >>> import torch
    >>> x = torch.tensor([-2.0, -0.5, 0.0, 1.0], requires_grad=True)
    >>> sign(x).tolist(), torch.autograd.grad(sign(x).sum(), x)[0].tolist()
    ([-1.0, -1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0])
    """
    soft = x.clamp(-1, 1)
    return (x >= 0).to(x) * 2 - 1 + (soft - soft.detach())


def _one_bit(x: Inputs) -> Inputs:
    """Signs, with both mu on the queries."""
    size = widen(x.q).abs().mean(-1, keepdim=True)  # (B, H, T, 1)
    if not (x.causal or x.has_row_mask):
        real = x.real_queries()
        weight = size.new_ones(1, 1, 1, 1).expand(1, 1, x.T, 1) if real is None else real.to(size)
        size = (size * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp_min(1)
    of_keys = x.mean_in_view(widen(x.k).abs().mean(-1, keepdim=True))
    return replace(x, q=(size * x.per_query_head(of_keys)).to(x.q.dtype) * sign(x.q), k=sign(x.k))


def _checked(x: Inputs, bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return None
    while bias.ndim < 4:
        bias = bias[None]
    for got, want in zip(bias.shape, (x.q.shape[0], x.heads, x.T, x.S), strict=True):
        if got not in (1, want):
            raise LocaterError(
                f"bias has shape {list(bias.shape)}, "
                f"not [{x.q.shape[0]}, {x.heads}, {x.T}, {x.S}] with axes of 1 shared"
            )
    return bias
