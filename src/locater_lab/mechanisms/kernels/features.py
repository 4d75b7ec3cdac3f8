"""Linear attention over features, and attention with polynomial weights, as operations that compile and have gradients:
Triton on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from locater.kernels.dispatch import runs_on_kernel

# ---- The gradient of an operation ----


def register_gradient(operation: CustomOpDef, gradient: CustomOpDef) -> None:
    """Say that operation(q, k, v, keys, *numbers) -> (out, *kept) has gradient(q, k, v, out, *kept, grad, keys,
    *numbers) -> (dq, dk, dv).
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, keys, *numbers = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # of what is kept for the gradient nobody needs one
        ctx.numbers = numbers
        ctx.save_for_backward(q, k, v, *output, keys)

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, keys = ctx.saved_tensors
        return *gradient(*saved, grad, keys, *ctx.numbers), None, *[None] * len(ctx.numbers)

    gradient.register_fake(_empty_gradients)
    operation.register_autograd(backward, setup_context=keep)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


# ---- Weights of features ----


WIDEST = 128  # channels of queries and of values: the sums of a chunk are kept by one program


def has_feature_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether `feature_attention` can take them: on CUDA, up to 128 channels, not float64."""
    return runs_on_kernel(q, v, WIDEST)


def feature_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    scale: float,
    unit: bool,
    keys: Bool[Tensor, "b h S"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B H T E"]:
    """sum_j f_j v_j / sum_j f_j, zero for a row without keys, in time that grows as T + S.

    f = phi(scale q).phi(k) with phi = elu + 1; with `unit` f = 1 + scale (q / |q|).(k / |k|). `keys` is False for those
    that nobody sees. Products of bfloat16 operands are in TF32, of others in float32 (three TF32 products).
    """
    if keys is not None and keys.shape[1] > 1 and q.shape[1] != k.shape[1]:  # heads of a group see different keys
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out: Tensor = _features(q, k, v, keys, scale, unit, causal)[0]
    return out


@torch.library.custom_op("locater::feature_attention", mutates_args=())
def _features(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_features

    return triton_features.forward(q, k, v, keys, scale, unit, causal)


@_features.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_features

    B, K, S, D = k.shape
    chunks = -(-S // triton_features.chunk_for(q, v))
    running = q.new_empty((B * K, chunks + 1, D + int(unit), v.shape[3] + 1), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32), running


@torch.library.custom_op("locater::feature_attention_gradient", mutates_args=())
def _feature_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    running: Tensor,
    grad: Tensor,
    keys: Tensor | None,
    scale: float,
    unit: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_features

    return triton_features.backward(q, k, v, out, total, running, grad, keys, scale, unit, causal)


register_gradient(_features, _feature_gradient)


# ---- Weights of a polynomial ----


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
    that `locater_lab.mechanisms.kernels.weighted.has_weighted_kernel` takes. Time grows as T S, memory as T + S.
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
def _polynomial_gradient(
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


register_gradient(_polynomial, _polynomial_gradient)
