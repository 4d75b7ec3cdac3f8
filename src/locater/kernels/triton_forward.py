"""Attention and the statistics of its rows in one pass over the keys: the Triton kernel and its launch.

The tile of weights that is multiplied with the values has the terms of all sums of `triton_rows`, so q k^T and its
exponentials are computed once. Names, units and lanes are those of `triton_rows`.

A row has one reference for its four lanes, because the product with the values adds their columns up. LAZY: it is the
maximum of the first tile, and stays. Sums and output then need no rescaling in the loop, and exponentials do not wait
for a maximum; floating numbers are as exact at 2^20 as at 1. Where a later logit exceeds the reference by more than
`reach` units of log 2, the block of rows is computed again with a running maximum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.terms import Terms
from locater.kernels.triton_kept_kernels import LAUNCHES, keep_kernel, launch_arguments, tensor_layout
from locater.kernels.triton_parts import EMPTY, descriptor, key_span, load_rows, takes_descriptors
from locater.kernels.triton_rows import LEAST, in_lanes, log2_unit, logit_terms, program_place, store_rows
from locater.torch_private import launch_compiled


@triton.jit
def _load(Rows, pointers, d, n, b, h, start, stride, S, D: tl.constexpr, BLOCK_D: tl.constexpr,
          BLOCK_N: tl.constexpr, EDGE: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """A block of keys or values, by a descriptor (zeros past the end) or by pointers."""
    if TMA:
        rows = Rows.load([b.to(tl.int32), h.to(tl.int32), start, 0]).reshape([BLOCK_N, BLOCK_D])
    else:
        rows = load_rows(pointers + tl.cast(start, tl.int64) * stride, d, start + n < S, D, BLOCK_D, EDGE)
    return rows


@triton.jit
def _logits(q, k, i, j, h, T, S, scale, cap, window, Alibi, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
            CAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """Products and terms; x * unit is in units of log 2, EMPTY where a key is not seen."""
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    x, seen = logit_terms(x, i[:, None], j[None, :], 0, h, T, S, scale, cap, window, None, None, None, None, Alibi, 0,
                          0, 0, 0, 0, 0, CAUSAL, WINDOW, CAP, False, False, False, False, ALIBI, EDGE)  # fmt: skip
    if EDGE:
        x = tl.where(seen, x, EMPTY)
    return x


@triton.jit
def _add_sums(y, e, behind, ahead, start, s, a, s2, far, first_s, self_s, first, CAUSAL: tl.constexpr,
              EXTENDED: tl.constexpr, EDGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The sums of a tile of weights e = 2^y, in four lanes."""
    a += tl.sum(in_lanes(y * e, 4), 2)
    e = in_lanes(e, 4)
    here = tl.sum(e, 2)
    s += here
    if EXTENDED:
        n = tl.arange(0, BLOCK_N // 4)
        column = ((n // 2) * 8 + n % 2)[None, None, :]
        s2 += tl.sum(e * e, 2)
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
    return s, a, s2, far, first_s, self_s


@triton.jit(do_not_specialize=["heads", "together", "rows"])
def forward_kernel(Q, K, V, Kd, Vd, Result, Out, Sinks, vb, vh, vt: tl.constexpr, ob, oh, ot, reach, Doc, Pad, Mask,
                   Bias, Alibi, qb, qh, qt, kb, kh, kt: tl.constexpr, mb, mh, mt, bb, bh, bt, H, GROUP, heads,
                   together, T, S, scale, cap, window, first, rows, D: tl.constexpr, E: tl.constexpr,
                   CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr, DOC: tl.constexpr,
                   MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
                   EXTENDED: tl.constexpr, PRECISION: tl.constexpr, LAZY: tl.constexpr,
                   TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                   BLOCK_E: tl.constexpr):  # fmt: skip
    """From `Doc` on the arguments are those of `rows_kernel`."""
    b, h, head, block = program_place(H, heads, tl.cdiv(T, BLOCK_M), together)
    block = tl.cdiv(T, BLOCK_M) - 1 - block  # the longest rows of a causal mask start first
    hk = h // GROUP
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    keys = K + b * kb + hk * kh + (n[:, None] * kt + d[None, :])
    values = V + b * vb + hk * vh + (n[:, None] * vt + c[None, :])
    m = tl.full([BLOCK_M], LEAST, tl.float32)
    top = tl.full([BLOCK_M, 4], EMPTY, tl.float32)
    s = tl.zeros([BLOCK_M, 4], tl.float32)
    a = tl.zeros([BLOCK_M, 4], tl.float32)
    s2 = tl.zeros([BLOCK_M, 4], tl.float32)
    far = tl.zeros([BLOCK_M, 4], tl.float32)
    first_s = tl.zeros([BLOCK_M, 4], tl.float32)
    self_s = tl.zeros([BLOCK_M, 4], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    unit = log2_unit(scale, CAP, BIAS, ALIBI)
    row = block * BLOCK_M + (S - T)
    behind = (i + (S - T))[:, None] - 2 * tl.arange(0, 4)[None, :]
    low, high, plain_high = key_span(block, T, S, window, CAUSAL, WINDOW, False, BLOCK_M, BLOCK_N)
    again = 1
    if LAZY:
        k = _load(Kd, keys, d, n, b, hk, low, kt, S, D, BLOCK_D, BLOCK_N, True, TMA)
        x = _logits(q, k, i, low + n, h, T, S, scale, cap, window, Alibi, CAUSAL, WINDOW, CAP, ALIBI,
                        PRECISION, True)  # fmt: skip
        m = tl.maximum(tl.max(x, 1) * unit, LEAST)
        for EDGE in tl.static_range(2):
            for start in range(plain_high if EDGE else low, high if EDGE else plain_high, BLOCK_N):
                k = _load(Kd, keys, d, n, b, hk, start, kt, S, D, BLOCK_D, BLOCK_N, EDGE, TMA)
                x = _logits(q, k, i, start + n, h, T, S, scale, cap, window, Alibi, CAUSAL, WINDOW, CAP, ALIBI,
                            PRECISION, EDGE)  # fmt: skip
                y = x * unit - m[:, None]
                e = tl.exp2(y)
                top = tl.maximum(top, tl.max(in_lanes(x, 4), 2))
                s, a, s2, far, first_s, self_s = _add_sums(
                    y, e, behind - start, start - row, start, s, a, s2, far, first_s, self_s, first, CAUSAL,
                    EXTENDED, EDGE, BLOCK_M, BLOCK_N)  # fmt: skip
                v = _load(Vd, values, c, n, b, hk, start, vt, S, E, BLOCK_E, BLOCK_N, EDGE, TMA)
                out = tl.dot(e.to(v.dtype), v, out, input_precision=PRECISION)
        again = (tl.max(tl.max(top, 1) * unit - m, 0) > reach).to(tl.int32)
    if again != 0:
        m = tl.full([BLOCK_M], LEAST, tl.float32)
        s = tl.zeros([BLOCK_M, 4], tl.float32)
        a = tl.zeros([BLOCK_M, 4], tl.float32)
        s2 = tl.zeros([BLOCK_M, 4], tl.float32)
        far = tl.zeros([BLOCK_M, 4], tl.float32)
        first_s = tl.zeros([BLOCK_M, 4], tl.float32)
        self_s = tl.zeros([BLOCK_M, 4], tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for EDGE in tl.static_range(2):
            for start in range(plain_high if EDGE else low, high if EDGE else plain_high, BLOCK_N):
                k = _load(Kd, keys, d, n, b, hk, start, kt, S, D, BLOCK_D, BLOCK_N, EDGE, TMA)
                x = _logits(q, k, i, start + n, h, T, S, scale, cap, window, Alibi, CAUSAL, WINDOW, CAP, ALIBI,
                            PRECISION, EDGE)  # fmt: skip
                new = tl.maximum(m, tl.max(x, 1) * unit)
                shift = (m - new)[:, None]
                alpha = tl.exp2(shift)
                y = x * unit - new[:, None]
                e = tl.exp2(y)
                m = new
                s, a, s2, far, first_s, self_s = _add_sums(
                    y, e, behind - start, start - row, start, alpha * s, alpha * (a + shift * s), alpha * alpha * s2,
                    alpha * far, alpha * first_s, alpha * self_s, first, CAUSAL, EXTENDED, EDGE, BLOCK_M,
                    BLOCK_N)  # fmt: skip
                v = _load(Vd, values, c, n, b, hk, start, vt, S, E, BLOCK_E, BLOCK_N, EDGE, TMA)
                out = tl.dot(e.to(v.dtype), v, out * alpha, input_precision=PRECISION)
        largest = m
    else:
        largest = tl.max(top, 1) * unit
    w = store_rows(Out, head * T + i, i < T, m, largest, tl.sum(s, 1), tl.sum(a, 1), tl.sum(s2, 1), tl.sum(far, 1),
                   tl.sum(first_s, 1), tl.sum(self_s, 1), Sinks, h, rows, SINKS, EXTENDED, False)  # fmt: skip
    where = Result + b * ob + h * oh + i[:, None].to(tl.int64) * ot + c[None, :]
    tl.store(where, (out * w[:, None]).to(Result.dtype.element_ty), mask=(i < T)[:, None] & (c < E)[None, :])


REACH = 24.0  # of the first tile's maximum, in units of log 2: the entropy then loses two decimals of its seven at most
REACH_HALF = 12.0  # weights of float16 end at 2^16
Tile = tuple[int, int, int, int, int | None]  # BLOCK_M, BLOCK_N, warps, stages, most registers of a thread
TILES: dict[tuple[int, bool], Tile] = {  # by width, and whether extended (benchmarks/results/attention-variants.json)
    (64, False): (64, 64, 4, 3, 128),
    (64, True): (128, 64, 4, 3, None),
    (128, False): (64, 64, 4, 3, None),
    (128, True): (64, 64, 4, 3, None),
}
SMALL: Tile = (64, 32, 4, 2, None)  # what fits any card's shared memory, for float32 and the widest heads


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms, extended: bool) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, E), which lies in memory as (B, T, H, E), and the numbers of each row (4 or 8, B, H, T) in the
    order of `AttentionStatistics`, without the count of keys.
    """
    (B, H, T, D), E = q.shape, v.shape[3]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    o = torch.empty(B, T, H, E, dtype=v.dtype, device=q.device).transpose(1, 2)
    out = torch.empty(8 if extended else 4, B, H, T, dtype=torch.float32, device=q.device)
    wide, deep = (max(16, triton.next_power_of_2(x)) for x in (D, E))
    small = q.dtype == torch.float32 or max(wide, deep) > 128
    m, n, warps, stages, registers = SMALL if small else TILES[max(wide, deep, 64), extended]
    tma = takes_descriptors(k) and takes_descriptors(v)
    tensors = [q, k, v, descriptor(k, n, wide) if tma else None, descriptor(v, n, deep) if tma else None, o, out]
    sinks = None if terms.sinks is None else terms.sinks.contiguous()
    alibi = None if terms.alibi is None else terms.alibi.float().contiguous()
    key = ("forward", replace(terms, sinks=None, alibi=None), extended, sinks is None, alibi is None, tma, q.device,
           *(tensor_layout(x) for x in (q, k, v)))  # fmt: skip
    bare = sinks is None and alibi is None
    if bare and key in LAUNCHES:
        kernel, grid, rest = LAUNCHES[key]
        launch_compiled(kernel, grid, (*tensors, None, *rest))
        return o, out
    arguments, flags = launch_arguments(q, k, replace(terms, alibi=alibi))
    rest = [*v.stride()[:3], *o.stride()[:3], REACH_HALF if v.dtype == torch.float16 else REACH, *arguments]
    rest += [terms.first, B * H * T]
    flags |= {"E": E, "SINKS": sinks is not None, "EXTENDED": extended, "TMA": tma}
    flags |= {"LAZY": terms.window is None, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": wide, "BLOCK_E": deep}
    size = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
    grid = (B * H * triton.cdiv(T, m), 1, 1)
    kernel = forward_kernel[grid](*tensors, sinks, *rest, **flags, **size)
    if bare:
        keep_kernel(key, forward_kernel, kernel, grid, rest, len(tensors) + 1, flags)
    return o, out
