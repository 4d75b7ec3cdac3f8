"""Operations of q, k, v, masked keys and numbers, whose gradient is an operation too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


def has_gradient(operation: CustomOpDef, gradient: CustomOpDef) -> None:
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

    gradient.register_fake(_like_inputs)
    operation.register_autograd(backward, setup_context=keep)


def _like_inputs(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv
