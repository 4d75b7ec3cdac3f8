"""Doubly normalized attention, alone or mixed with softmax attention, as one operation that compiles and has gradients:
Triton on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def doubly_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    scale: float,
    mix: Float[Tensor, " H"] | None = None,
    keys: Bool[Tensor, "b h S"] | None = None,
    rows: Bool[Tensor, "b T"] | None = None,
) -> Float[Tensor, "B H T E"]:
    """u A v + (1 - u) softmax(scale q k^T) v with A doubly normalized and u = `mix`, which is 1 where it is None.

    `keys` is False for those that nobody sees, `rows` for queries that do not count in sums over queries. Gradients go
    to q, k, v and mix. Operands are those that `locater_lab.mechanisms.kernels.weighted.has_weighted_kernel` takes.
    """
    out: Tensor = _doubly(q, k, v, None if mix is None else mix.float().contiguous(), keys, rows, scale)[0]
    return out


@torch.library.custom_op("locater::doubly_attention", mutates_args=())
def _doubly(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor | None, keys: Tensor | None, rows: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_doubly

    out, first, difference, column, r, lse = triton_doubly.forward(q, k, v, keys, rows, mix, scale)
    return out, first, difference, column, r, lse


@_doubly.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor | None, keys: Tensor | None, rows: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, H, T, _ = q.shape
    out = q.new_empty(B, H, T, v.shape[3])
    first, difference = (torch.empty_like(out) if mix is not None else out.new_empty(0) for _ in range(2))
    numbers = [q.new_empty(B, H, n, dtype=torch.float32) for n in (k.shape[2], T, T if mix is not None else 0)]
    return out, first, difference, numbers[0], numbers[1], numbers[2]


@torch.library.custom_op("locater::doubly_attention_gradient", mutates_args=())
def _gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor | None,
    keys: Tensor | None,
    rows: Tensor | None,
    saved: list[Tensor],
    grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_doubly

    return triton_doubly.backward(q, k, v, tuple(saved), grad, keys, rows, mix, scale)


@_gradient.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mix: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0 if mix is None else q.shape[1], dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of what is kept for the gradient nobody needs one
    ctx.scale = scale
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, mix, keys, rows, *saved = ctx.saved_tensors
    *grads, dmix = _gradient(q, k, v, mix, keys, rows, saved, grad, ctx.scale)
    return *grads, None if mix is None else dmix, None, None, None


_doubly.register_autograd(_backward, setup_context=_save_for_backward)
