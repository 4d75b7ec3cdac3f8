"""Attention and the statistics of its rows in one pass over the keys: the Triton kernel.

The tile of weights that goes into the product with the values is at hand for the sums of `triton_rows` too, so that q k^T
and its exponentials are computed once. Names, units and lanes are those of `triton_rows`.

A row has one maximum for its four lanes, because the product adds their columns up. Without masks to load, the maximum is
taken from the first tile alone and stays (LAZY): sums and output then need no rescaling in the loop, and exponentials do not
wait for a maximum. Floating numbers are as exact at 2^40 as at 1. Where a later logit exceeds the first tile's by more than
FAR, in units of log 2, the block of rows is computed again with a running maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from locater.kernels.triton_parts import EMPTY, LOG2E, key_span, load_rows
from locater.kernels.triton_rows import LEAST, LN2, _lanes, _program, _terms, _unit


@triton.jit
def _load(Rows, pointers, d, n, b, h, start, stride, S, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
          EDGE: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """A block of keys or values, by a descriptor (zeros past the end) or by pointers."""
    if TMA:
        rows = Rows.load([b.to(tl.int32), h.to(tl.int32), start, 0]).reshape([BLOCK_N, BLOCK_D])
    else:
        rows = load_rows(pointers + tl.cast(start, tl.int64) * stride, d, start + n < S, D, BLOCK_D, EDGE)
    return rows


@triton.jit
def _add_sums(y, e, behind, ahead, start, s, a, s2, far, first_s, self_s, first, CAUSAL: tl.constexpr,
              EXTENDED: tl.constexpr, EDGE: tl.constexpr, FIRST: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr):  # fmt: skip
    """The sums of a tile of weights e = 2^y, all relative to one maximum per row."""
    LANES: tl.constexpr = s.shape[1]
    a += tl.sum(_lanes(y * e, LANES), 2)
    e = _lanes(e, LANES)
    here = tl.sum(e, 2)
    s += here
    if EXTENDED:
        n = tl.arange(0, BLOCK_N // LANES)
        s2 += tl.sum(e * e, 2)
        column = n[None, None, :]
        if LANES == 4:
            column = ((n // 2) * 8 + n % 2)[None, None, :]
        if CAUSAL:
            far += behind.to(tl.float32) * here - tl.sum(e * column.to(tl.float32), 2)
        else:
            far += tl.sum(e * tl.abs(behind.to(tl.float32)[:, :, None] - column.to(tl.float32)), 2)
        if FIRST:
            if start < first:
                lane = 2 * tl.arange(0, LANES)[None, :, None]
                first_s += tl.sum(tl.where(column + lane < first - start, e, 0.0), 2)
        if EDGE or not CAUSAL:
            if (ahead > -BLOCK_N) & (ahead < BLOCK_M):
                self_s += tl.sum(tl.where(column == behind[:, :, None], e, 0.0), 2)
    return s, a, s2, far, first_s, self_s


@triton.jit(do_not_specialize=["heads", "together", "rows"])
def forward_kernel(Q, K, V, Kd, Vd, O, Out, Count, Sinks, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt, kb, kh,
                   kt: tl.constexpr, vb, vh, vt: tl.constexpr, ob, oh, ot, mb, mh, mt, bb, bh, bt, H, GROUP, heads,
                   together, T, S, scale, cap, window, first, rows, far_off, D: tl.constexpr, E: tl.constexpr,
                   CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr,
                   DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
                   SINKS: tl.constexpr, STATS: tl.constexpr, EXTENDED: tl.constexpr, COUNT: tl.constexpr,
                   PRECISION: tl.constexpr, LAZY: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, block = _program(H, heads, tl.cdiv(T, BLOCK_M), together)
    block = tl.cdiv(T, BLOCK_M) - 1 - block  # the longest rows of a causal mask start first
    hk = h // GROUP
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    keys = K + b * kb + hk * kh + (n[:, None] * kt + d[None, :])
    values = V + b * vb + hk * vh + (n[:, None] * vt + c[None, :])
    LANES: tl.constexpr = 1 if PAD or DOC or MASK or BIAS else 4
    m = tl.full([BLOCK_M], LEAST, tl.float32)
    top = tl.full([BLOCK_M, LANES], LEAST, tl.float32)
    s = tl.zeros([BLOCK_M, LANES], tl.float32)
    a = tl.zeros([BLOCK_M, LANES], tl.float32)
    s2 = tl.zeros([BLOCK_M, LANES], tl.float32)
    far = tl.zeros([BLOCK_M, LANES], tl.float32)
    first_s = tl.zeros([BLOCK_M, LANES], tl.float32)
    self_s = tl.zeros([BLOCK_M, LANES], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    unit = _unit(scale, CAP, BIAS, ALIBI)
    row = block * BLOCK_M + (S - T)
    behind = (i + (S - T))[:, None] - 2 * tl.arange(0, LANES)[None, :]
    low, high, plain_high = key_span(block, T, S, window, CAUSAL, WINDOW, PAD or DOC or MASK, BLOCK_M, BLOCK_N)
    again = 1
    if LAZY:
        k = _load(Kd, keys, d, n, b, hk, low, kt, S, D, BLOCK_D, BLOCK_N, True, TMA)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        x, seen = _terms(x, i[:, None], (low + n)[None, :], b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias,
                         Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI,
                         True)  # fmt: skip
        m = tl.maximum(tl.max(tl.where(seen, x, EMPTY), 1) * unit, LEAST)
        for EDGE in tl.static_range(2):
            for start in range(plain_high if EDGE else low, high if EDGE else plain_high, BLOCK_N):
                k = _load(Kd, keys, d, n, b, hk, start, kt, S, D, BLOCK_D, BLOCK_N, EDGE, TMA)
                x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                x, seen = _terms(x, i[:, None], (start + n)[None, :], b, h, T, S, scale, cap, window, Doc, Pad, Mask,
                                 Bias, Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS,
                                 ALIBI, EDGE)  # fmt: skip
                if EDGE:
                    x = tl.where(seen, x, EMPTY)
                y = x * unit - m[:, None]
                e = tl.exp2(y)
                top = tl.maximum(top, tl.max(_lanes(x, LANES), 2))
                if STATS:
                    s, a, s2, far, first_s, self_s = _add_sums(
                        y, e, behind - start, start - row, start, s, a, s2, far, first_s, self_s, first, CAUSAL,
                        EXTENDED, EDGE, True, BLOCK_M, BLOCK_N)  # fmt: skip
                else:
                    s += tl.sum(_lanes(e, LANES), 2)
                v = _load(Vd, values, c, n, b, hk, start, vt, S, E, BLOCK_E, BLOCK_N, EDGE, TMA)
                out = tl.dot(e.to(v.dtype), v, out, input_precision=PRECISION)
        top = top * unit
        again = (tl.max(tl.max(top, 1) - m, 0) > far_off).to(tl.int32)
    if again != 0:
        m = tl.full([BLOCK_M], LEAST, tl.float32)
        s = tl.zeros([BLOCK_M, LANES], tl.float32)
        a = tl.zeros([BLOCK_M, LANES], tl.float32)
        s2 = tl.zeros([BLOCK_M, LANES], tl.float32)
        far = tl.zeros([BLOCK_M, LANES], tl.float32)
        first_s = tl.zeros([BLOCK_M, LANES], tl.float32)
        self_s = tl.zeros([BLOCK_M, LANES], tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for EDGE in tl.static_range(2):
            for start in range(plain_high if EDGE else low, high if EDGE else plain_high, BLOCK_N):
                k = _load(Kd, keys, d, n, b, hk, start, kt, S, D, BLOCK_D, BLOCK_N, EDGE, TMA)
                x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                x, seen = _terms(x, i[:, None], (start + n)[None, :], b, h, T, S, scale, cap, window, Doc, Pad, Mask,
                                 Bias, Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS,
                                 ALIBI, EDGE)  # fmt: skip
                if EDGE:
                    x = tl.where(seen, x, EMPTY)
                if BIAS:
                    x = tl.maximum(x, EMPTY)  # a bias of -inf is a mask
                new = tl.maximum(m, tl.max(tl.max(_lanes(x, LANES), 2), 1) * unit)
                shift = (m - new)[:, None]
                alpha = tl.exp2(shift)
                y = x * unit - new[:, None]
                e = tl.exp2(y)
                m = new
                out = out * alpha
                if STATS:
                    s, a, s2, far, first_s, self_s = _add_sums(
                        y, e, behind - start, start - row, start, alpha * s, alpha * (a + shift * s),
                        alpha * alpha * s2, alpha * far, alpha * first_s, alpha * self_s, first, CAUSAL, EXTENDED,
                        EDGE, True, BLOCK_M, BLOCK_N)  # fmt: skip
                else:
                    s = alpha * s + tl.sum(_lanes(e, LANES), 2)
                if COUNT and EDGE:
                    count += tl.sum(seen.to(tl.int32), 1)
                v = _load(Vd, values, c, n, b, hk, start, vt, S, E, BLOCK_E, BLOCK_N, EDGE, TMA)
                out = tl.dot(e.to(v.dtype), v, out, input_precision=PRECISION)
        top = tl.zeros([BLOCK_M, LANES], tl.float32) + m[:, None]
    high_x = tl.max(top, 1)
    total_s = tl.sum(s, 1)
    total_a = tl.sum(a, 1)
    shown = high_x > LEAST
    ref, total = m, total_s
    if SINKS:
        sink = tl.load(Sinks + h).to(tl.float32) * LOG2E
        ref = tl.maximum(m, sink)
        total = total_s * tl.exp2(m - ref) + tl.exp2(sink - ref)
    rest = (ref - m) + tl.log2(tl.maximum(total, 1e-37))  # L - m, without the rounding of L
    w = tl.where(shown, tl.exp2(-rest), 0.0)
    at = head * T + i
    inside = i < T
    nothing = float("-inf")
    rows = rows.to(tl.int64)
    where = O + b * ob + h * oh + i[:, None].to(tl.int64) * ot + c[None, :]
    tl.store(where, (out * w[:, None]).to(O.dtype.element_ty), mask=inside[:, None] & (c < E)[None, :])
    tl.store(Out + at, tl.where(shown, (m + rest) * LN2, nothing), mask=inside)
    if STATS:
        tl.store(Out + rows + at, tl.where(shown, LN2 * (rest * total_s - total_a) * w, 0.0), mask=inside)
        tl.store(Out + 2 * rows + at, tl.where(shown, high_x * LN2, nothing), mask=inside)
        tl.store(Out + 3 * rows + at, total_s * w, mask=inside)
    if COUNT:
        tl.store(Count + at, count, mask=inside)
    if EXTENDED:
        tl.store(Out + 4 * rows + at, tl.sum(s2, 1) * w * w, mask=inside)
        tl.store(Out + 5 * rows + at, tl.sum(far, 1) * w, mask=inside)
        tl.store(Out + 6 * rows + at, tl.sum(first_s, 1) * w, mask=inside)
        tl.store(Out + 7 * rows + at, tl.sum(self_s, 1) * w, mask=inside)
