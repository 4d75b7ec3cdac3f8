"""Attention with polynomial weights, 1 + x or 1 + x + x^2 / 2 with x = scale q.k, as one operation that compiles and
has gradients: Triton on CUDA.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater_lab.mechanisms.kernels.own_gradient import has_gradient


def polynomial_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    scale: float,
    order: int,
    unit: bool,
    keys: Bool[Tensor, "b h S"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B H T E"]:
    """sum_j f(x_j) v_j / sum_j f(x_j), f = 1 + x (order 1) or 1 + x + x^2 / 2 (order 2), zero for a row without keys.

    x = scale q.k, with `unit` of q / |q| and k / |k|; `keys` is False for those that nobody sees. Operands are those
    that `locater_lab.mechanisms.kernels.weighted.has_kernel` takes. Time grows as T S, memory as T + S.
    """
    out: Tensor = _polynomial(q, k, v, keys, scale, order, unit, causal)[0]
    return out


@torch.library.custom_op("locater::polynomial_attention", mutates_args=())
def _polynomial(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, order: int, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_polynomial

    return triton_polynomial.forward(q, k, v, keys, scale, order, unit, causal)


@_polynomial.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, order: int, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, K, S, D = k.shape
    rows = q.new_empty(q.shape[:3], dtype=torch.float32)
    ready = k.new_empty(B, K, S if unit else 0, D)
    return q.new_empty((*q.shape[:3], v.shape[3])), rows, ready, ready.new_empty(ready.shape[:3], dtype=torch.float32)


@torch.library.custom_op("locater::polynomial_attention_gradient", mutates_args=())
def _gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    ready: Tensor,
    inverse: Tensor,
    grad: Tensor,
    keys: Tensor | None,
    scale: float,
    order: int,
    unit: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_polynomial

    return triton_polynomial.backward(q, k, v, out, total, ready, inverse, grad, keys, scale, order, unit, causal)


has_gradient(_polynomial, _gradient)
