"""Attention statistics of long rows: `rows_kernel` with a reference that stays, and keys fetched by descriptors.

What bounds the loop is arithmetic on logits, the exponentials first. Here each lane of a row takes its reference from
the first tile of keys and keeps it: nothing is rescaled in the loop, exponentials do not wait for a maximum, and with
descriptors no address is computed. Floating numbers are as exact at 2^20 as at 1; where a later logit exceeds the
reference by more than REACH units of log 2, the block of rows is computed again with a running maximum, in the same
program. Names and units are those of `triton_rows`. For calls without masks but causal ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.terms import Terms
from locater.kernels.triton_descriptors import descriptor, takes_descriptors
from locater.kernels.triton_launch import LAUNCHES, launch_arguments, layout, remember
from locater.kernels.triton_parts import key_span, load_rows
from locater.kernels.triton_rows import LEAST, _add_tile, _lanes, _program, _unit, lane_logits, load_keys, store_rows

REACH = tl.constexpr(24.0)  # the entropy then loses two decimals of its seven at most


@triton.jit
def _add_lazily(x, unit, behind, ahead, start, m, top, s, a, s2, far, first_s, self_s, first, CAUSAL: tl.constexpr,
                EXTENDED: tl.constexpr, EDGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """`_add_tile` with sums relative to m (M, 4), which does not change; `top` is the largest x so far."""
    x = _lanes(x, 4)
    n = tl.arange(0, BLOCK_N // 4)
    top = tl.maximum(top, tl.max(x, 2))
    y = x * unit - m[:, :, None]
    e = tl.exp2(y)
    a += tl.sum(y * e, 2)
    here = tl.sum(e, 2)
    s += here
    if EXTENDED:
        s2 += tl.sum(e * e, 2)
        column = ((n // 2) * 8 + n % 2)[None, None, :]
        if CAUSAL:
            far += behind.to(tl.float32) * here - tl.sum(e * column.to(tl.float32), 2)
        else:
            far += tl.sum(e * tl.abs(behind.to(tl.float32)[:, :, None] - column.to(tl.float32)), 2)
        if start < first:
            lane = 2 * tl.arange(0, 4)[None, :, None]
            first_s += tl.sum(tl.where(column + lane < first - start, e, 0.0), 2)
        if EDGE or not CAUSAL:
            if (ahead > -BLOCK_N) & (ahead < BLOCK_M):
                self_s += tl.sum(tl.where(column == behind[:, :, None], e, 0.0), 2)
    return top, s, a, s2, far, first_s, self_s


@triton.jit(do_not_specialize=["heads", "together", "rows"])
def lazy_rows_kernel(Q, K, Kd, Out, Sinks, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt, kb, kh, kt: tl.constexpr, mb, mh,
                     mt, bb, bh, bt, H, GROUP, heads, together, T, S, scale, cap, window, first, rows,
                     D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
                     PAD: tl.constexpr, DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
                     ALIBI: tl.constexpr, SINKS: tl.constexpr, EXTENDED: tl.constexpr, PER_KEY: tl.constexpr,
                     PRECISION: tl.constexpr, LAZY: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Arguments as of `rows_kernel`, whose masks are all absent."""
    b, h, head, block = _program(H, heads, tl.cdiv(T, BLOCK_M), together)
    block = tl.cdiv(T, BLOCK_M) - 1 - block  # the longest rows of a causal mask start first
    hk = h // GROUP
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    keys = K + b * kb + hk * kh + (n[:, None] * kt + d[None, :])
    m = tl.full([BLOCK_M, 4], LEAST, tl.float32)
    top = m
    s = tl.zeros([BLOCK_M, 4], tl.float32)
    a = tl.zeros([BLOCK_M, 4], tl.float32)
    s2 = tl.zeros([BLOCK_M, 4], tl.float32)
    far = tl.zeros([BLOCK_M, 4], tl.float32)
    first_s = tl.zeros([BLOCK_M, 4], tl.float32)
    self_s = tl.zeros([BLOCK_M, 4], tl.float32)
    unit = _unit(scale, CAP, BIAS, ALIBI)
    row = block * BLOCK_M + (S - T)
    behind = (i + (S - T))[:, None] - 2 * tl.arange(0, 4)[None, :]
    _, high, plain_high = key_span(block, T, S, 0, CAUSAL, False, False, BLOCK_M, BLOCK_N)
    again = 1
    if LAZY:
        k = load_keys(Kd, keys, d, n, b, hk, 0, kt, S, D, BLOCK_D, BLOCK_N, True, TMA)
        x = lane_logits(q, k, i, n, h, T, S, scale, cap, 0, Alibi, CAUSAL, False, CAP, ALIBI, PRECISION, True)
        m, s, a, s2, far, first_s, self_s = _add_tile(
            x, unit, behind, -row, 0, m, s, a, s2, far, first_s, self_s, first, CAUSAL, EXTENDED, True, BLOCK_M,
            BLOCK_N)  # fmt: skip
        top = m / unit
        for EDGE in tl.static_range(2):
            for start in range(tl.maximum(plain_high, BLOCK_N) if EDGE else BLOCK_N, high if EDGE else plain_high,
                               BLOCK_N):  # fmt: skip
                k = load_keys(Kd, keys, d, n, b, hk, start, kt, S, D, BLOCK_D, BLOCK_N, EDGE, TMA)
                x = lane_logits(q, k, i, start + n, h, T, S, scale, cap, 0, Alibi, CAUSAL, False, CAP, ALIBI,
                                PRECISION, EDGE)  # fmt: skip
                top, s, a, s2, far, first_s, self_s = _add_lazily(
                    x, unit, behind - start, start - row, start, m, top, s, a, s2, far, first_s, self_s, first, CAUSAL,
                    EXTENDED, EDGE, BLOCK_M, BLOCK_N)  # fmt: skip
        top = top * unit
        again = (tl.max(tl.max(top - m, 1), 0) > REACH).to(tl.int32)
    if again != 0:
        m = tl.full([BLOCK_M, 4], LEAST, tl.float32)
        s = tl.zeros([BLOCK_M, 4], tl.float32)
        a = tl.zeros([BLOCK_M, 4], tl.float32)
        s2 = tl.zeros([BLOCK_M, 4], tl.float32)
        far = tl.zeros([BLOCK_M, 4], tl.float32)
        first_s = tl.zeros([BLOCK_M, 4], tl.float32)
        self_s = tl.zeros([BLOCK_M, 4], tl.float32)
        for EDGE in tl.static_range(2):
            for start in range(plain_high if EDGE else 0, high if EDGE else plain_high, BLOCK_N):
                k = load_keys(Kd, keys, d, n, b, hk, start, kt, S, D, BLOCK_D, BLOCK_N, EDGE, TMA)
                x = lane_logits(q, k, i, start + n, h, T, S, scale, cap, 0, Alibi, CAUSAL, False, CAP, ALIBI,
                                PRECISION, EDGE)  # fmt: skip
                m, s, a, s2, far, first_s, self_s = _add_tile(
                    x, unit, behind - start, start - row, start, m, s, a, s2, far, first_s, self_s, first, CAUSAL,
                    EXTENDED, EDGE, BLOCK_M, BLOCK_N)  # fmt: skip
        top = m
    lane_m = m
    m = tl.max(lane_m, 1)
    shift = lane_m - m[:, None]
    alpha = tl.exp2(shift)
    store_rows(Out, head * T + i, i < T, m, tl.max(top, 1), tl.sum(alpha * s, 1), tl.sum(alpha * (a + shift * s), 1),
               tl.sum(alpha * alpha * s2, 1), tl.sum(alpha * far, 1), tl.sum(alpha * first_s, 1),
               tl.sum(alpha * self_s, 1), Sinks, h, rows, SINKS, EXTENDED, PER_KEY)  # fmt: skip


Tile = tuple[int, int, int, int, int | None, bool]  # BLOCK_M, BLOCK_N, warps, stages, most registers of a thread, lazy
TILES: dict[tuple[int, bool], Tile] = {  # by channels, and whether extended
    (64, False): (64, 128, 4, 2, 128, True),
    (64, True): (64, 128, 4, 2, 128, True),
    (128, False): (64, 128, 4, 2, 128, True),
    (128, True): (64, 128, 4, 2, 128, True),
}
LEAST_KEYS = 4096  # from which on it is used


def takes_lazy(q: Tensor, k: Tensor, terms: Terms, extended: bool) -> bool:
    """Whether `lazily` is for this call: long rows in half precision, no mask but a causal one, and not few queries."""
    wide = max(64, triton.next_power_of_2(q.shape[3]))
    return (
        k.shape[2] >= LEAST_KEYS
        and q.shape[2] > 64
        and q.dtype in (torch.float16, torch.bfloat16)
        and (wide, extended) in TILES
        and not terms.has_masks
        and terms.window is None
    )


def lazily(q: Tensor, k: Tensor, terms: Terms, out: Tensor, extended: bool, per_key: bool) -> None:
    """Fills `out` as `rows_kernel` does."""
    (B, H, T, D), bare = q.shape, terms.alibi is None and terms.sinks is None
    wide = max(16, triton.next_power_of_2(D))
    m, n, warps, stages, registers, lazy = TILES[max(64, wide), extended]
    keys = descriptor(k, n, wide) if takes_descriptors(k) else None
    key = ("lazy", terms, extended, per_key, q.device, layout(q), layout(k)) if bare else None
    if key in LAUNCHES:
        kernel, grid, rest = LAUNCHES[key]
        kernel[grid](q, k, keys, out, None, *rest)
        return
    alibi, sinks = (None if x is None else x.float().contiguous() for x in (terms.alibi, terms.sinks))
    arguments, flags = launch_arguments(q, k, replace(terms, alibi=alibi))
    flags |= {"SINKS": sinks is not None, "EXTENDED": extended, "PER_KEY": per_key, "TMA": keys is not None}
    flags |= {"LAZY": lazy, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": wide}
    size = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
    grid, rest = (B * H * triton.cdiv(T, m), 1, 1), [*arguments, terms.first, B * H * T]
    kernel = lazy_rows_kernel[grid](q, k, keys, out, sinks, *rest, **flags, **size)
    if key is not None:
        remember(key, lazy_rows_kernel, kernel, grid, rest, 5, flags)
