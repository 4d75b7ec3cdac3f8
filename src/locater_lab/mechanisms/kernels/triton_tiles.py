"""Parts of the kernels of mechanisms: the block of a program, the keys it sees, rows of tensors, lengths, lanes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SHORTEST = tl.constexpr(1e-12)  # a length below it is taken as this, as by torch.nn.functional.normalize


@triton.jit
def program_of(H, blocks):
    """Batch, head, both, and number of this program's block. On one axis: the others of a grid end at 65,535."""
    n = tl.program_id(0)
    head = (n // blocks).to(tl.int64)
    return head // H, head % H, head, n % blocks


@triton.jit
def seen_keys(i, j, b, h, T, S, Pad, pb, ph, CAUSAL: tl.constexpr, PAD: tl.constexpr, window=0,
              WINDOW: tl.constexpr = False):  # fmt: skip
    """Whether query i sees key j; they lie along either axis of a tile."""
    seen = (j < S) & (i < T)
    if WINDOW:
        seen = seen & (j <= i + (S - T) + window) & (j >= i + (S - T) - window)
    if CAUSAL:
        seen = seen & (j <= i + (S - T))
    if PAD:
        seen = seen & (tl.load(Pad + b * pb + h * ph + j, mask=j < S, other=0) != 0)
    return seen


@triton.jit
def rows_of(base, at, stride, c, SIZE: tl.constexpr, inside):
    """Rows `at` of a tensor, columns c; zeros for rows that are not inside."""
    return tl.load(base + at[:, None].to(tl.int64) * stride + c[None, :], mask=inside[:, None] & (c < SIZE)[None, :],
                   other=0.0)  # fmt: skip


@triton.jit
def inverse_length(rows, UNIT: tl.constexpr):
    """1 / |x| of every row, or 1."""
    if UNIT:
        x = rows.to(tl.float32)
        out = 1 / tl.maximum(tl.sqrt_rn(tl.sum(x * x, 1)), SHORTEST)
    else:
        out = tl.full([rows.shape[0]], 1.0, tl.float32)
    return out


@triton.jit
def through_length(grad, rows, inverse, UNIT: tl.constexpr):
    """The gradient of x from that of x / |x|."""
    if UNIT:
        unit = rows.to(tl.float32) * inverse[:, None]
        grad = (grad - unit * tl.sum(unit * grad, 1)[:, None]) * inverse[:, None]
    return grad


@triton.jit
def in_lanes(x, LANES: tl.constexpr):
    """(M, N) as (M, LANES, N / LANES): with four of them what one thread of a tensor core's tile holds of a row."""
    if LANES == 4:
        x = tl.permute(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), [0, 2, 1, 3])
    return tl.reshape(x, [x.shape[0], LANES, x.numel // x.shape[0] // LANES])


def blocks_of(length: int, block: int) -> int:
    """How many there are. (`triton.cdiv` takes microseconds, and a GPU waits for them.)"""
    return -(-length // block)


def tile_width(size: int) -> int:
    """The next power of two, and what a product takes at least."""
    return max(16, 1 << (size - 1).bit_length())


Tile = tuple[int, int, int, int]  # rows of queries, keys, warps, stages


def launch_sizes(q: Tensor, v: Tensor, tiles: tuple[Tile, Tile]) -> dict[str, int]:
    """What a kernel is launched with: the first tile for up to 64 channels, the second for up to 128. In float32, and
    above, a small one.
    """
    widths = [tile_width(x.shape[3]) for x in (q, v)]
    small = q.dtype == torch.float32 or max(widths) > 128
    M, N, warps, stages = (32, 32, 4, 2) if small else tiles[max(widths) > 64]
    sizes = {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_D": widths[0], "BLOCK_E": widths[1]}
    return sizes | {"num_warps": warps, "num_stages": stages}
