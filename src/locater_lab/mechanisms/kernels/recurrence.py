"""The recurrence of the delta rule over chunks, with its gradient: Triton on CUDA, a loop in PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.kernels.dispatch import has_triton

WIDEST = 128  # channels of a memory's side that a program keeps


def chunk_scan(
    own: Float[Tensor, "*heads N C E"],
    carried: Float[Tensor, "*heads N C D"],
    keys: Float[Tensor, "*heads N C D"],
    decay: Float[Tensor, "*heads N"],
) -> tuple[Float[Tensor, "*heads N D E"], Float[Tensor, "*heads N C E"]]:
    """M_n, which every chunk begins with, and new_n = own_n - carried_n M_n, where M_{n+1} = decay_n M_n + keys_n^T
    new_n and M_0 = 0.

    >>> ones = torch.ones(1, 3, 1, 1)
    >>> chunk_scan(ones, 0.5 * ones, ones, torch.ones(1, 3))[0].flatten()          # M + (1 - M / 2)
    tensor([0.0000, 1.0000, 1.5000])
    """
    if own.device.type == "cuda" and own.dtype == torch.float32 and keys.shape[-1] <= WIDEST and has_triton():
        lead = own.shape[:-3]
        flat = (x.reshape(-1, *x.shape[len(lead) :]).contiguous() for x in (own, carried, keys, decay))
        begin, new_values = _scan(*flat)
        return begin.unflatten(0, lead), new_values.unflatten(0, lead)
    memory = own.new_zeros(*own.shape[:-3], keys.shape[-1], own.shape[-1])
    states, new = [], []
    for n in range(own.shape[-3]):
        states.append(memory)
        new.append(own[..., n, :, :] - carried[..., n, :, :] @ memory)
        memory = decay[..., n, None, None] * memory + keys[..., n, :, :].mT @ new[-1]
    return torch.stack(states, -3), torch.stack(new, -3)


@torch.library.custom_op("locater::chunk_scan", mutates_args=())
def _scan(own: Tensor, carried: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_recurrence

    return triton_recurrence.forward(own, carried, keys, decay)


@_scan.register_fake
def _(own: Tensor, carried: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    return own.new_empty(*own.shape[:2], keys.shape[3], own.shape[3]), torch.empty_like(own)


@torch.library.custom_op("locater::chunk_scan_gradient", mutates_args=())
def _scan_back(carried: Tensor, keys: Tensor, decay: Tensor, dstates: Tensor, dnew: Tensor) -> tuple[Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_recurrence

    return triton_recurrence.backward(carried, keys, decay, dstates.contiguous(), dnew.contiguous())


@_scan_back.register_fake
def _(carried: Tensor, keys: Tensor, decay: Tensor, dstates: Tensor, dnew: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dstates, memory_format=torch.contiguous_format), torch.empty_like(
        dnew, memory_format=torch.contiguous_format
    )


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[1:], *output)


def _backward(ctx: Any, dstates: Tensor, dnew: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    carried, keys, decay, states, new = ctx.saved_tensors
    grads, down = _scan_back(carried, keys, decay, dstates, dnew)
    return down, -down @ states.mT, new @ grads.mT, (grads * states).sum((-2, -1))


_scan.register_autograd(_backward, setup_context=_keep)
