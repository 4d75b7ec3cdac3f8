"""Attention whose weights are a softmax, capped or in a window, or sigmoids, as one operation that compiles and has
gradients: Triton on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.kernels.dispatch import runs_on_kernel

WIDEST, WIDEST_FULL = 256, 128  # channels of a head, in half precision and in float32: what fits a GPU's shared memory


def has_weighted_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether `weighted_attention` can take them: on CUDA, in half precision up to 256 channels, in float32 up to
    128.
    """
    return runs_on_kernel(q, v, WIDEST_FULL if q.dtype == torch.float32 else WIDEST)


def weighted_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    scale: float,
    cap: float | None = None,
    shift: Float[Tensor, "B H T"] | None = None,
    keys: Bool[Tensor, "b h S"] | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Float[Tensor, "B H T E"]:
    """softmax(cap tanh(scale q k^T / cap)) v with a cap, sigmoid(scale q k^T + shift) v with a shift per row, plain
    softmax with neither. With a `window` a query sees keys at most so far away, on either side.

    `keys` is False for those that nobody sees; a row that sees none is zero. Gradients go to q, k, v and shift.
    """
    out: Tensor = _weighted(
        q, k, v, None if shift is None else shift.float().contiguous(), keys, scale, cap or 0.0, causal, window
    )[0]
    return out


@torch.library.custom_op("locater::weighted_attention", mutates_args=())
def _weighted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shift: Tensor | None,
    keys: Tensor | None,
    scale: float,
    cap: float,
    causal: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_weighted

    out, row = triton_weighted.forward(q, k, v, shift, keys, scale, cap, causal, window)
    return out, row if shift is None else row.new_empty(0)  # an output may not be an input


@_weighted.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None, *others: object) -> tuple[Tensor, Tensor]:
    row = q.new_empty(q.shape[:3] if shift is None else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), row


@torch.library.custom_op("locater::weighted_attention_gradient", mutates_args=())
def _gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row: Tensor,
    grad: Tensor,
    keys: Tensor | None,
    scale: float,
    cap: float,
    causal: bool,
    window: int | None,
    sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_weighted

    return triton_weighted.backward(q, k, v, out, row, grad, keys, scale, cap, causal, sigmoid, window)


@_gradient.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty((*q.shape[:2], q.shape[2] if others[-1] else 0), dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, shift, keys, *numbers = inputs
    out, row = output
    ctx.mark_non_differentiable(row)
    ctx.set_materialize_grads(False)  # of what is kept for the gradient nobody needs one
    ctx.numbers, ctx.sigmoid = numbers, shift is not None
    ctx.save_for_backward(q, k, v, out, row if shift is None else shift, keys)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, row, keys = ctx.saved_tensors
    dq, dk, dv, dshift = _gradient(q, k, v, out, row, grad, keys, *ctx.numbers, ctx.sigmoid)
    return dq, dk, dv, dshift if ctx.sigmoid else None, None, None, None, None, None


_weighted.register_autograd(_backward, setup_context=_save_for_backward)
