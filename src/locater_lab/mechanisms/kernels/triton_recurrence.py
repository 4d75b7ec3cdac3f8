"""The recurrence of the delta rule over chunks, in Triton: what cannot be done for all chunks at once.

    new_n = own_n - carried_n M_n,   M_{n+1} = decay_n M_n + keys_n^T new_n,   M_0 = 0
with M (D, E), own and new (C, E), carried and keys (C, D), decay a number. Columns of M do not meet, so a program has
some columns of one head and all its chunks. The gradient runs backwards, with G_n the whole gradient of M_{n+1}:
    dnew_n = dnew_n (from outside) + keys_n G_n,   G_{n-1} = dM_n (from outside) + decay_n G_n - carried_n^T dnew_n
The other gradients are products for all chunks at once (`locater_lab.mechanisms.delta`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward(Own, Carried, Keys, Decay, States, New, chunks, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
             BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    columns = tl.cdiv(E, BLOCK_E)
    head = (tl.program_id(0) // columns).to(tl.int64) * chunks
    c = tl.arange(0, BLOCK_C)[:, None]
    d = tl.arange(0, BLOCK_D)
    e = (tl.program_id(0) % columns) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    tile = (c < C) & (d < D)[None, :]
    column = (c < C) & (e < E)
    state = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    for n in range(chunks):
        at = head + n
        tl.store(States + (at * D + d[:, None]) * E + e, state, mask=(d < D)[:, None] & (e < E))
        carried = tl.load(Carried + (at * C + c) * D + d[None, :], mask=tile, other=0.0)
        keys = tl.load(Keys + (at * C + c) * D + d[None, :], mask=tile, other=0.0)
        own = tl.load(Own + (at * C + c) * E + e, mask=column, other=0.0)
        new = own - tl.dot(carried, state, input_precision="tf32x3")
        tl.store(New + (at * C + c) * E + e, new, mask=column)
        state = tl.load(Decay + at) * state + tl.dot(tl.trans(keys), new, input_precision="tf32x3")


@triton.jit
def _backward(Carried, Keys, Decay, Dstates, Dnew, Grads, Dout, chunks, C: tl.constexpr, D: tl.constexpr,
              E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    columns = tl.cdiv(E, BLOCK_E)
    head = (tl.program_id(0) // columns).to(tl.int64) * chunks
    c = tl.arange(0, BLOCK_C)[:, None]
    d = tl.arange(0, BLOCK_D)
    e = (tl.program_id(0) % columns) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    tile = (c < C) & (d < D)[None, :]
    column = (c < C) & (e < E)
    square = (d < D)[:, None] & (e < E)
    grad = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    for back in range(chunks):
        at = head + (chunks - 1 - back)
        tl.store(Grads + (at * D + d[:, None]) * E + e, grad, mask=square)
        carried = tl.load(Carried + (at * C + c) * D + d[None, :], mask=tile, other=0.0)
        keys = tl.load(Keys + (at * C + c) * D + d[None, :], mask=tile, other=0.0)
        new = tl.load(Dnew + (at * C + c) * E + e, mask=column, other=0.0) + tl.dot(
            keys, grad, input_precision="tf32x3"
        )
        tl.store(Dout + (at * C + c) * E + e, new, mask=column)
        dstates = tl.load(Dstates + (at * D + d[:, None]) * E + e, mask=square, other=0.0)
        grad = dstates + tl.load(Decay + at) * grad - tl.dot(tl.trans(carried), new, input_precision="tf32x3")


def forward(own: Tensor, carried: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """States (heads, N, D, E) that chunks begin with, and new (heads, N, C, E); all float32 and contiguous."""
    heads, N, C, E = own.shape
    D = keys.shape[3]
    states, new = own.new_empty(heads, N, D, E), torch.empty_like(own)
    size = _blocks(C, D, E)
    _forward[(triton.cdiv(E, size["BLOCK_E"]) * heads,)](
        own, carried, keys, decay, states, new, N, C=C, D=D, E=E, **size
    )
    return states, new


def backward(carried: Tensor, keys: Tensor, decay: Tensor, dstates: Tensor, dnew: Tensor) -> tuple[Tensor, Tensor]:
    """G (heads, N, D, E), and dnew in all (heads, N, C, E)."""
    heads, N, C, E = dnew.shape
    D = keys.shape[3]
    grads, out = torch.empty_like(dstates), torch.empty_like(dnew)
    size = _blocks(C, D, E)
    _backward[(triton.cdiv(E, size["BLOCK_E"]) * heads,)](
        carried, keys, decay, dstates, dnew, grads, out, N, C=C, D=D, E=E, **size
    )
    return grads, out


COLUMNS = 16  # of M for a program: few, so that there are many programs


def _blocks(C: int, D: int, E: int) -> dict[str, int]:
    c, d, e = (max(16, triton.next_power_of_2(n)) for n in (C, D, E))
    return {"BLOCK_C": c, "BLOCK_D": d, "BLOCK_E": min(e, COLUMNS), "num_warps": 4, "num_stages": 2}
