"""The gradient of the entropy, and the weight that each key receives, in Triton: logits are computed again.

Names and units are those of `triton_rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from locater.kernels.triton_parts import EMPTY, key_span, load_rows
from locater.kernels.triton_rows import LN2, in_lanes, log2_unit, logit_terms, program_place


@triton.jit
def _slope(x, seen, unit, lse, pull, cap, CAP: tl.constexpr, BIAS: tl.constexpr, EDGE: tl.constexpr):
    """p (log2 p + pull): times -ln 2 the slope of the entropy on a logit before the cap. lse is in units of log 2, 1e30
    where no key is.
    """
    y = x * unit - lse
    if BIAS:
        y = tl.maximum(y, EMPTY)
    slope = tl.exp2(y) * (y + pull)
    if CAP:
        slope = slope * (1 - (x / cap) * (x / cap))
    if EDGE:
        slope = tl.where(seen, slope, 0.0)
    return slope


@triton.jit(do_not_specialize=["heads", "together"])
def query_gradient_kernel(Q, K, Lse, Pull, Grad, DQ, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt, kb, kh,
                           kt: tl.constexpr, mb, mh, mt, bb, bh, bt, H, GROUP, heads, together, T, S, scale, cap,
                           window, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
                           PAD: tl.constexpr, DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
                           ALIBI: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                           BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    b, h, head, block = program_place(H, heads, tl.cdiv(T, BLOCK_M), together)
    block = tl.cdiv(T, BLOCK_M) - 1 - block
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    keys = K + b * kb + (h // GROUP) * kh + (n[:, None] * kt + d[None, :])
    at = head * T + i
    lse = tl.load(Lse + at, mask=i < T, other=-EMPTY)[:, None]
    pull = tl.load(Pull + at, mask=i < T, other=0.0)[:, None]
    grad = tl.load(Grad + at, mask=i < T, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    unit = log2_unit(scale, CAP, BIAS, ALIBI)
    low, high, plain_high = key_span(block, T, S, window, CAUSAL, WINDOW, PAD or DOC or MASK, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):
        for start in range(plain_high if EDGE else low, high if EDGE else plain_high, BLOCK_N):
            k = load_rows(keys + tl.cast(start, tl.int64) * kt, d, start + n < S, D, BLOCK_D, EDGE)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            x, seen = logit_terms(x, i[:, None], (start + n)[None, :], b, h, T, S, scale, cap, window, Doc, Pad, Mask,
                                  Bias, Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI,
                                  EDGE)  # fmt: skip
            dq = tl.dot(
                _slope(x, seen, unit, lse, pull, cap, CAP, BIAS, EDGE).to(k.dtype), k, dq, input_precision=PRECISION
            )
    tile = (i < T)[:, None] & (d < D)[None, :]
    tl.store(DQ + (head * T + i[:, None]) * D + d[None, :], dq * (grad * (scale * LN2))[:, None], mask=tile)


@triton.jit(do_not_specialize=["heads", "together"])
def columns_kernel(Q, K, Lse, Pull, Grad, Out, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt: tl.constexpr, kb, kh, kt,
                    mb, mh, mt, bb, bh, bt, H, GROUP, heads, together, T, S, scale, cap, window, D: tl.constexpr,
                    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr,
                    DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
                    PRECISION: tl.constexpr, RECEIVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_D: tl.constexpr):  # fmt: skip
    """Sums over queries for a block of keys: weight received by each key, or the gradient of the keys (one query head's
    part). Tiles lie with keys in rows: sums along a row stay in a thread, and the second product takes the tile as it
    is. Lse and Pull in units of log 2; for the weight received they are the two parts of the log-sum-exp, infinity in
    the first where a row sees nothing."""
    b, h, head, block = program_place(H, heads, tl.cdiv(S, BLOCK_N), together)
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_M)
    k = load_rows(
        K + b * kb + (h // GROUP) * kh + j[:, None].to(tl.int64) * kt + d[None, :], d, j < S, D, BLOCK_D, True
    )
    queries = Q + b * qb + h * qh + (r[:, None] * qt + d[None, :])
    at = head * T + r
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    LANES: tl.constexpr = 1 if PAD or DOC or MASK or BIAS else 4
    got = tl.zeros([BLOCK_N, LANES], tl.float32)
    unit = log2_unit(scale, CAP, BIAS, ALIBI)
    first_row = 0
    last_row = T
    if CAUSAL:
        first_row = tl.maximum(0, block * BLOCK_N - (S - T)) // BLOCK_M * BLOCK_M
    if WINDOW:
        first_row = tl.maximum(first_row, tl.maximum(0, block * BLOCK_N - (S - T) - window) // BLOCK_M * BLOCK_M)
        last_row = tl.minimum(T, (block + 1) * BLOCK_N - (S - T) + window)
    plain_row = first_row  # from here on every row sees every key of the block; rows past the end have no weight
    if CAUSAL:
        plain_row = tl.maximum(
            first_row, tl.cdiv(tl.maximum(0, (block + 1) * BLOCK_N - 1 - (S - T)), BLOCK_M) * BLOCK_M
        )
    if WINDOW or PAD or DOC or MASK:
        plain_row = last_row
    for EDGE in tl.static_range(2):
        for start in range(
            first_row if EDGE else plain_row, tl.minimum(plain_row, last_row) if EDGE else last_row, BLOCK_M
        ):
            i = start + r
            q = load_rows(queries + tl.cast(start, tl.int64) * qt, d, i < T, D, BLOCK_D, True)
            x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            x, seen = logit_terms(x, i[None, :], j[:, None], b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias,
                                  Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI,
                                  EDGE)  # fmt: skip
            lse = tl.load(Lse + at + start, mask=i < T, other=-EMPTY)[None, :]
            pull = tl.load(Pull + at + start, mask=i < T, other=0.0)[None, :]
            if RECEIVED:
                p = tl.exp2((x * unit - lse) - pull)
                if EDGE:
                    p = tl.where(seen, p, 0.0)
                got += tl.sum(in_lanes(p, LANES), 2)
            else:
                slope = _slope(x, seen, unit, lse, pull, cap, CAP, BIAS, EDGE)
                slope *= tl.load(Grad + at + start, mask=i < T, other=0.0)[None, :]
                dk = tl.dot(slope.to(q.dtype), q, dk, input_precision=PRECISION)
    if RECEIVED:
        tl.store(Out + head * S + j, tl.sum(got, 1), mask=j < S)
    else:
        tile = (j < S)[:, None] & (d < D)[None, :]
        tl.store(Out + (head * S + j[:, None]) * D + d[None, :], dk * (scale * LN2), mask=tile)
