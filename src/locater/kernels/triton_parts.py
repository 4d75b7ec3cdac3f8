"""Parts of several Triton kernels: rows of a tensor, the keys that a block of queries sees, the soft-cap; and blocks of
keys and values that the hardware fetches by a description of the tensor (TMA, from compute capability 9.0 on).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)
EMPTY = tl.constexpr(-1.0e30)  # a masked logit; finite, so that 0 x EMPTY is 0 and the difference of two of them is


@triton.jit
def load_rows(base, d, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr):
    """Rows of q, k or v at `base`; rows that are not inside are zero."""
    if BLOCK_D != D:
        rows = tl.load(base, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif EDGE:
        rows = tl.load(base, mask=inside[:, None], other=0.0)
    else:
        rows = tl.load(base)
    return rows


@triton.jit
def key_span(block, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, OTHER: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Key range of a block of rows: from `low`, all visible up to `plain_high`, masked up to `high`; multiples of
    BLOCK_N.
    """
    start = block * BLOCK_M + (S - T)  # position of the first row
    return key_span_of(start, start + BLOCK_M, S, window, CAUSAL, WINDOW, OTHER, BLOCK_N)


@triton.jit
def key_span_of(start, end, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, OTHER: tl.constexpr,
                BLOCK_N: tl.constexpr):  # fmt: skip
    """The same for rows whose positions are at least `start` and less than `end`."""
    low = 0
    high = S
    if CAUSAL:
        high = tl.minimum(S, end)
    if WINDOW:
        low = tl.maximum(0, start - window + 1) // BLOCK_N * BLOCK_N
        high = tl.minimum(high, end + window)
    plain_high = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        plain_high = tl.minimum(plain_high, start // BLOCK_N * BLOCK_N)  # a row's own key is in a masked tile
    if WINDOW or OTHER:
        plain_high = low
    return low, tl.maximum(high, low), tl.maximum(plain_high, low)


@triton.jit
def capped(x, cap):
    """cap tanh(x / cap)."""
    return cap * (1 - 2 / (1 + tl.exp2(x * (2 * LOG2E / cap))))


@triton.jit
def compared_kernel(x, y, nothing, one, count, factor, SIZE: tl.constexpr, TWICE: tl.constexpr):
    """Every kind of argument that kernels here have: tensors, None, the number 1, numbers, compile-time values."""
    at = tl.arange(0, SIZE)
    value = tl.load(x + at * one, mask=at < count, other=0.0) * factor
    if TWICE:
        value = value + value
    tl.store(y + at, value)


# ---- blocks that the hardware fetches ----


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def is_hopper(x: Tensor) -> bool:
    """Whether kernels that were written for the H100 and its kind are for this tensor's device. Later cards have them
    too, but Triton 3.7 fails to compile the kernels for these (compute capability 10.0).
    """
    return x.device.type != "cuda" or _capability(x.device) == 9


def takes_descriptors(x: Tensor) -> bool:
    """Whether the tensor (B, H, S, D) lies so that it can be fetched by descriptors."""
    size, steps = x.element_size(), x.stride()
    return steps[3] == 1 and all(step > 0 and step * size % 16 == 0 for step in steps[:3]) and x.data_ptr() % 16 == 0


def descriptor(x: Tensor, rows: int, wide: int) -> TensorDescriptor:
    """Of x (B, H, S, D), in blocks of (rows, wide)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, wide])
