"""Attention statistics in Triton: one online softmax over key blocks, no T x S matrix, logits recomputed for gradients.

Rows (i, queries) and columns (j, keys) are tiles of BLOCK_M x BLOCK_N logits x in units of log 2, so that exp is exp2.
Per row, relative to the running maximum m:

    s = sum 2^(x-m),   a = sum (x-m) 2^(x-m)
    H = ln 2 ((L-m) s - a) 2^(m-L)   with L the log2-sum-exp, sink included

Taking a relative to m keeps the entropy of logits near 10^4 exact to float32; the textbook difference lse - sum p x
does not.

What bounds these kernels is arithmetic on logits, not products, so the loop over keys has nothing that is not needed in
it. A thread of a tensor core's tile holds columns 8c + 2l and 8c + 2l + 1 of a row, l one of four lanes. Each row is
therefore four running softmaxes, one per l, that meet after the loop: no exchange between threads inside it. Masks act
on tiles at the edge alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.terms import AttentionStatistics, Terms
from locater.kernels.triton_parts import EMPTY, LOG2E, capped, key_span, load_rows

LN2 = tl.constexpr(0.6931471805599453)
# where maxima start: below any logit, and so far above EMPTY that the difference of both is EMPTY again
LEAST = tl.constexpr(-1.0e15)


@triton.jit
def _program(H, heads, blocks, together):
    """Batch, head, both, and number of this program's block. Blocks of `together` heads run side by side, so that their
    keys stay in the cache; heads follow one another only where all of them would not fit."""
    n = tl.program_id(0)
    group = n // (together * blocks)
    width = tl.minimum(together, heads - group * together)
    n -= group * together * blocks
    head = (group * together + n % width).to(tl.int64)
    return head // H, head % H, head, n // width


@triton.jit
def _terms(x, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
           CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr, DOC: tl.constexpr,
           MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """Logits of products x in natural units after scale, bias and cap (just x where the scale alone acts on it: see
    _unit), and which of them count. i and j are rows and keys along either axis. Rows past the end are not masked:
    nobody keeps them."""
    at = i + (S - T)
    if BIAS or CAP or ALIBI:
        x = x * scale
    if ALIBI:
        x -= tl.load(Alibi + h) * tl.abs(at - j).to(tl.float32)
    if BIAS:
        x += tl.load(Bias + b * bb + h * bh + i.to(tl.int64) * bt + j, mask=(i < T) & (j < S), other=0.0).to(tl.float32)
    if CAP:
        x = capped(x, cap)
    seen = j <= at
    if EDGE:
        if not CAUSAL:
            seen = (j < S) & (i >= 0)
        if WINDOW:
            seen = seen & (tl.abs(at - j) < window)
        if PAD:
            seen = seen & (tl.load(Pad + b * S + j, mask=j < S, other=0) != 0)
        if DOC:
            seen = seen & (
                tl.load(Doc + b * S + at, mask=i < T, other=-1) == tl.load(Doc + b * S + j, mask=j < S, other=-2)
            )
        if MASK:
            seen = seen & (
                tl.load(Mask + b * mb + h * mh + i.to(tl.int64) * mt + j, mask=(i < T) & (j < S), other=0) != 0
            )
    return x, seen


@triton.jit
def _unit(scale, CAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr):
    """From what _terms returns to units of log 2: one multiplication for the scale and the change of base where it can
    be.
    """
    unit = scale * LOG2E
    if BIAS or CAP or ALIBI:
        unit = LOG2E * 1.0
    return unit


@triton.jit
def _lanes(x, LANES: tl.constexpr):
    """(M, N) as (M, LANES, N / LANES): with four lanes, the last axis has the columns that one thread of a tensor
    core's tile holds.

    Where masks or biases are loaded, the compiler may keep the logits as it keeps those. The last axis is then spread
    over threads that are no neighbours, which Triton 3.6 adds up wrongly: such kernels have one lane."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if LANES == 4:
        x = tl.permute(tl.reshape(x, [M, N // 8, 4, 2]), [0, 2, 1, 3])
    return tl.reshape(x, [M, LANES, N // LANES])


@triton.jit
def _add_tile(x, unit, behind, ahead, start, m, s, a, s2, far, first_s, self_s, first, CAUSAL: tl.constexpr,
              EXTENDED: tl.constexpr, EDGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """One step of the online softmax with its companions; x * unit is in units of log 2. `behind` (M, LANES): the row's
    position less that of the lane's first key; `ahead`: the tile's first key less its first row. EDGE: with masks; a
    causal row's own key is in one."""
    LANES: tl.constexpr = m.shape[1]
    x = _lanes(x, LANES)
    n = tl.arange(0, BLOCK_N // LANES)
    new = tl.maximum(m, tl.max(x, 2) * unit)
    shift = m - new
    alpha = tl.exp2(shift)
    y = x * unit - new[:, :, None]
    e = tl.exp2(y)
    a = alpha * (a + shift * s) + tl.sum(y * e, 2)
    here = tl.sum(e, 2)
    s = alpha * s + here
    if EXTENDED:
        s2 = alpha * alpha * s2 + tl.sum(e * e, 2)
        column = n[None, None, :]
        if LANES == 4:
            # from the lane's first key: the same in every thread, so a constant in the code
            column = ((n // 2) * 8 + n % 2)[None, None, :]
        if CAUSAL:  # keys ahead have weight 0: sum e (i - j) without a tile of distances
            far = alpha * far + (behind.to(tl.float32) * here - tl.sum(e * column.to(tl.float32), 2))
        else:
            far = alpha * far + tl.sum(e * tl.abs(behind.to(tl.float32)[:, :, None] - column.to(tl.float32)), 2)
        first_s = alpha * first_s
        if start < first:
            lane = 2 * tl.arange(0, LANES)[None, :, None]
            first_s += tl.sum(tl.where(column + lane < first - start, e, 0.0), 2)
        if EDGE or not CAUSAL:
            self_s = alpha * self_s
            if (ahead > -BLOCK_N) & (ahead < BLOCK_M):
                self_s += tl.sum(tl.where(column == behind[:, :, None], e, 0.0), 2)
    return new, s, a, s2, far, first_s, self_s


@triton.jit(do_not_specialize=["heads", "together", "rows"])
def _rows_kernel(Q, K, Out, Count, Sinks, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt, kb, kh, kt: tl.constexpr, mb,
                 mh, mt, bb, bh, bt, H, GROUP, heads, together, T, S, scale, cap, window, first, rows,
                 D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr,
                 DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
                 SINKS: tl.constexpr, EXTENDED: tl.constexpr, COUNT: tl.constexpr, PER_KEY: tl.constexpr,
                 PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_D: tl.constexpr):  # fmt: skip
    b, h, head, block = _program(H, heads, tl.cdiv(T, BLOCK_M), together)
    block = tl.cdiv(T, BLOCK_M) - 1 - block  # the longest rows of a causal mask start first
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    keys = K + b * kb + (h // GROUP) * kh + (n[:, None] * kt + d[None, :])
    LANES: tl.constexpr = 1 if PAD or DOC or MASK or BIAS else 4
    m = tl.full([BLOCK_M, LANES], LEAST, tl.float32)
    s = tl.zeros([BLOCK_M, LANES], tl.float32)
    a = tl.zeros([BLOCK_M, LANES], tl.float32)
    s2 = tl.zeros([BLOCK_M, LANES], tl.float32)
    far = tl.zeros([BLOCK_M, LANES], tl.float32)
    first_s = tl.zeros([BLOCK_M, LANES], tl.float32)
    self_s = tl.zeros([BLOCK_M, LANES], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    unit = _unit(scale, CAP, BIAS, ALIBI)
    row = block * BLOCK_M + (S - T)
    behind = (i + (S - T))[:, None] - 2 * tl.arange(0, LANES)[None, :]
    low, high, plain_high = key_span(block, T, S, window, CAUSAL, WINDOW, PAD or DOC or MASK, BLOCK_M, BLOCK_N)
    # first tiles whose keys are all visible, where there is no mask to build, then the others
    for EDGE in tl.static_range(2):
        for start in range(plain_high if EDGE else low, high if EDGE else plain_high, BLOCK_N):
            k = load_rows(keys + tl.cast(start, tl.int64) * kt, d, start + n < S, D, BLOCK_D, EDGE)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            x, seen = _terms(x, i[:, None], (start + n)[None, :], b, h, T, S, scale, cap, window, Doc, Pad, Mask,
                             Bias, Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI,
                             EDGE)  # fmt: skip
            if EDGE:
                x = tl.where(seen, x, EMPTY)
            if BIAS:
                x = tl.maximum(x, EMPTY)  # a bias of -inf is a mask
            m, s, a, s2, far, first_s, self_s = _add_tile(
                x, unit, behind - start, start - row, start, m, s, a, s2, far, first_s, self_s, first,
                CAUSAL, EXTENDED, EDGE, BLOCK_M, BLOCK_N)  # fmt: skip
            if COUNT and EDGE:
                count += tl.sum(seen.to(tl.int32), 1)
    lane_m = m
    m = tl.max(lane_m, 1)
    shift = lane_m - m[:, None]
    alpha = tl.exp2(shift)
    a = tl.sum(alpha * (a + shift * s), 1)
    s = tl.sum(alpha * s, 1)
    shown = m > LEAST
    top, total = m, s
    if SINKS:
        sink = tl.load(Sinks + h).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        total = s * tl.exp2(m - top) + tl.exp2(sink - top)
    rest = (top - m) + tl.log2(tl.maximum(total, 1e-37))  # L - m, without the rounding of L
    w = tl.where(shown, tl.exp2(-rest), 0.0)
    at = head * T + i
    inside = i < T
    nothing = float("-inf")
    rows = rows.to(tl.int64)
    tl.store(Out + at, tl.where(shown, (m + rest) * LN2, nothing), mask=inside)
    tl.store(Out + rows + at, tl.where(shown, LN2 * (rest * s - a) * w, 0.0), mask=inside)
    tl.store(Out + 2 * rows + at, tl.where(shown, m * LN2, nothing), mask=inside)
    tl.store(Out + 3 * rows + at, s * w, mask=inside)
    if COUNT:
        tl.store(Count + at, count, mask=inside)
    if EXTENDED:
        tl.store(Out + 4 * rows + at, tl.sum(alpha * alpha * s2, 1) * w * w, mask=inside)
        tl.store(Out + 5 * rows + at, tl.sum(alpha * far, 1) * w, mask=inside)
        tl.store(Out + 6 * rows + at, tl.sum(alpha * first_s, 1) * w, mask=inside)
        tl.store(Out + 7 * rows + at, tl.sum(alpha * self_s, 1) * w, mask=inside)
    if PER_KEY:  # the log-sum-exp in two parts: at logits of 1e4 one float32 has no digits left
        tl.store(Out + 8 * rows + at, tl.where(shown, m, float("inf")), mask=inside)
        tl.store(Out + 9 * rows + at, tl.where(shown, rest, 0.0), mask=inside)


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
def _query_gradient_kernel(Q, K, Lse, Pull, Grad, DQ, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt, kb, kh,
                           kt: tl.constexpr, mb, mh, mt, bb, bh, bt, H, GROUP, heads, together, T, S, scale, cap,
                           window, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
                           PAD: tl.constexpr, DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
                           ALIBI: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                           BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    b, h, head, block = _program(H, heads, tl.cdiv(T, BLOCK_M), together)
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
    unit = _unit(scale, CAP, BIAS, ALIBI)
    low, high, plain_high = key_span(block, T, S, window, CAUSAL, WINDOW, PAD or DOC or MASK, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):
        for start in range(plain_high if EDGE else low, high if EDGE else plain_high, BLOCK_N):
            k = load_rows(keys + tl.cast(start, tl.int64) * kt, d, start + n < S, D, BLOCK_D, EDGE)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            x, seen = _terms(x, i[:, None], (start + n)[None, :], b, h, T, S, scale, cap, window, Doc, Pad, Mask,
                             Bias, Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI,
                             EDGE)  # fmt: skip
            dq = tl.dot(
                _slope(x, seen, unit, lse, pull, cap, CAP, BIAS, EDGE).to(k.dtype), k, dq, input_precision=PRECISION
            )
    tile = (i < T)[:, None] & (d < D)[None, :]
    tl.store(DQ + (head * T + i[:, None]) * D + d[None, :], dq * (grad * (scale * LN2))[:, None], mask=tile)


@triton.jit(do_not_specialize=["heads", "together"])
def _columns_kernel(Q, K, Lse, Pull, Grad, Out, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt: tl.constexpr, kb, kh, kt,
                    mb, mh, mt, bb, bh, bt, H, GROUP, heads, together, T, S, scale, cap, window, D: tl.constexpr,
                    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr,
                    DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
                    PRECISION: tl.constexpr, RECEIVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_D: tl.constexpr):  # fmt: skip
    """Sums over queries for a block of keys: weight received by each key, or the gradient of the keys (one query head's
    part). Tiles lie with keys in rows: sums along a row stay in a thread, and the second product takes the tile as it
    is. Lse and Pull in units of log 2; for the weight received they are the two parts of the log-sum-exp, infinity in
    the first where a row sees nothing."""
    b, h, head, block = _program(H, heads, tl.cdiv(S, BLOCK_N), together)
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
    unit = _unit(scale, CAP, BIAS, ALIBI)
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
            x, seen = _terms(x, i[None, :], j[:, None], b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias,
                             Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI,
                             EDGE)  # fmt: skip
            lse = tl.load(Lse + at + start, mask=i < T, other=-EMPTY)[None, :]
            pull = tl.load(Pull + at + start, mask=i < T, other=0.0)[None, :]
            if RECEIVED:
                p = tl.exp2((x * unit - lse) - pull)
                if EDGE:
                    p = tl.where(seen, p, 0.0)
                got += tl.sum(_lanes(p, LANES), 2)
            else:
                slope = _slope(x, seen, unit, lse, pull, cap, CAP, BIAS, EDGE)
                slope *= tl.load(Grad + at + start, mask=i < T, other=0.0)[None, :]
                dk = tl.dot(slope.to(q.dtype), q, dk, input_precision=PRECISION)
    if RECEIVED:
        tl.store(Out + head * S + j, tl.sum(got, 1), mask=j < S)
    else:
        tile = (j < S)[:, None] & (d < D)[None, :]
        tl.store(Out + (head * S + j[:, None]) * D + d[None, :], dk * (scale * LN2), mask=tile)


# A second launch with the same shapes, strides, alignment and terms goes straight to the compiled kernel: Triton's own
# dispatch costs more host time than 4,096 tokens take on the GPU. The calling convention of compiled kernels is that of
# Triton 3.6 and later.
LAUNCHES: dict[tuple[Any, ...], tuple[Any, tuple[int, int, int], list[Any]]] = {}
REPEATABLE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


def statistics(q: Tensor, k: Tensor, terms: Terms, extended: bool, per_key: bool) -> AttentionStatistics:
    """q (B, H, T, D), k (B, K, S, D); float32 or half precision, sums in float32."""
    B, H, T, D = q.shape
    scale = terms.scale_for(D)
    if scale <= 0:  # the running maximum of unscaled products needs a positive scale
        terms, q = replace(terms, scale=-scale or 1.0), -q if scale else torch.zeros_like(q)
    S = k.shape[-2]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out = torch.empty(10 if per_key else 8 if extended else 4, B, H, T, dtype=torch.float32, device=q.device)
    generic = _generic(terms)
    bare = not generic and terms.bias is None and terms.alibi is None and terms.sinks is None
    ready = terms if bare else _prepared(terms)
    count = torch.empty(B, H, T, dtype=torch.int32, device=q.device) if generic else None
    layout = tuple((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in (q, k))
    key = (terms, extended, per_key, q.device, layout)
    if bare and key in LAUNCHES:
        kernel, grid, rest = LAUNCHES[key]
        kernel[grid](q, k, out, *rest)
    elif T:
        arguments, flags = _launch(q, k, ready)
        size = _blocks(D, q.dtype, "extended" if extended else "plain", S)
        flags |= {"SINKS": terms.sinks is not None, "EXTENDED": extended, "COUNT": generic, "PER_KEY": per_key}
        grid = (B * H * triton.cdiv(T, size["BLOCK_M"]), 1, 1)
        rest = [count, ready.sinks, *arguments, terms.first, B * H * T]
        kernel = _rows_kernel[grid](q, k, out, *rest, **flags, **size)
        if bare and REPEATABLE and kernel is not None:
            if len(LAUNCHES) >= 256:
                LAUNCHES.clear()
            names = _rows_kernel.arg_names[3 + len(rest) :]
            LAUNCHES[key] = kernel, grid, rest + [(flags | size)[name] for name in names]
    if count is None:
        count = _visible_counts(terms, T, S, q.device).expand(B, H, T)
    lse, entropy, top, mass = out[:4].unbind()
    more = out[4:8].unbind() if extended else (None,) * 4
    received = _received(q, k, terms, ready, out[8], out[9]) if per_key else None
    return AttentionStatistics(lse, entropy, top, count, mass, *more, received)


def _received(q: Tensor, k: Tensor, terms: Terms, ready: Terms, base: Tensor, rest: Tensor) -> Tensor:
    B, H, T, D = q.shape
    S = k.shape[-2]
    out = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    arguments, flags = _launch(q, k, ready)
    size = _blocks(D, q.dtype, "received", S)
    if S:
        _columns_kernel[(B * H * triton.cdiv(S, size["BLOCK_N"]),)](
            q, k, base, rest, None, out, *arguments, **flags, RECEIVED=True, **size
        )
    lookers = torch.zeros(1, 1, S, device=q.device) if _generic(terms) else _lookers(terms, T, S, q.device)
    step = max(1, (1 << 24) // max(1, S))
    for start in range(0, T if _generic(terms) else 0, step):
        lookers = lookers + terms.visible(slice(start, min(T, start + step)), T, S, q.device).sum(2)
    return out / lookers.clamp_min(1)


def entropy_gradient(
    q: Tensor, k: Tensor, terms: Terms, lse: Tensor, entropy: Tensor, mass: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad * entropy) with respect to q and k."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[-2]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    shown = lse > -torch.inf
    base = torch.where(shown, lse * LOG2E.value, -EMPTY.value)
    pull, weight = (1 - mass + entropy) * LOG2E.value, torch.where(shown, -grad.float(), 0.0).contiguous()
    dq = torch.empty(B, H, T, D, dtype=q.dtype, device=q.device)
    # heads that share keys are added below
    dk = torch.empty(B, H, S, D, dtype=k.dtype if H == K else torch.float32, device=q.device)
    ready = _prepared(terms)
    arguments, flags = _launch(q, k, ready)
    size = _blocks(D, q.dtype, "queries", S)
    _query_gradient_kernel[(B * H * triton.cdiv(T, size["BLOCK_M"]),)](
        q, k, base, pull, weight, dq, *arguments, **flags, **size
    )
    size = _blocks(D, q.dtype, "keys", S)
    _columns_kernel[(B * H * triton.cdiv(S, size["BLOCK_N"]),)](
        q, k, base, pull, weight, dk, *arguments, **flags, RECEIVED=False, **size
    )
    return dq, dk if H == K else dk.unflatten(1, (K, -1)).sum(2).to(k.dtype)


def _generic(terms: Terms) -> bool:
    return terms.padding is not None or terms.documents is not None or terms.mask is not None


def _prepared(terms: Terms) -> Terms:
    """The same terms with tensors as the kernels read them: contiguous, small types."""

    def ready(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        return None if x is None else x.to(dtype or x.dtype).contiguous()

    return replace(
        terms,
        padding=ready(terms.padding, torch.int8),
        documents=ready(terms.documents, torch.int32),
        mask=ready(terms.mask, torch.int8),
        bias=ready(terms.bias),
        alibi=ready(terms.alibi, torch.float32),
        sinks=ready(terms.sinks),
    )


def _launch(q: Tensor, k: Tensor, terms: Terms) -> tuple[list[Any], dict[str, Any]]:
    """Tensors, strides and sizes; compile-time switches."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[-2]
    strides = [*q.stride()[:3], *k.stride()[:3]]
    for x in (terms.mask, terms.bias):
        strides += [0, 0, 0] if x is None else [0 if x.shape[axis] == 1 else x.stride(axis) for axis in range(3)]
    together = max(1, min(B * H, CACHE // max(1, S * D * k.element_size())))
    arguments = [terms.documents, terms.padding, terms.mask, terms.bias, terms.alibi, *strides]
    arguments += [H, H // K, B * H, together, T, S, terms.scale_for(D), terms.softcap or 1.0, terms.window or 0]
    flags = {
        "D": D,
        "CAUSAL": terms.causal,
        "WINDOW": terms.window is not None,
        "CAP": terms.softcap is not None,
        "PAD": terms.padding is not None,
        "DOC": terms.documents is not None,
        "MASK": terms.mask is not None,
        "BIAS": terms.bias is not None,
        "ALIBI": terms.alibi is not None,
        # three products of rounded parts: float32 to a few 1e-7
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }
    return arguments, flags


CACHE = 24 << 20  # bytes of keys that programs running at one time share
Tile = tuple[int, int, int, int, int | None]  # BLOCK_M, BLOCK_N, warps, stages, most registers of a thread
TILES: dict[tuple[str, int, str], Tile] = {  # the fastest on an H200 (benchmarks/results/attention-tuning.json)
    ("half", 64, "plain"): (64, 128, 4, 2, 128),
    ("half", 64, "extended"): (128, 128, 4, 2, None),
    ("half", 64, "received"): (64, 64, 4, 3, None),
    ("half", 64, "queries"): (64, 64, 4, 3, None),
    ("half", 64, "keys"): (64, 128, 4, 2, None),
    ("half", 128, "plain"): (64, 64, 4, 2, None),
    ("half", 128, "extended"): (64, 64, 4, 2, None),
    ("half", 128, "received"): (64, 64, 4, 3, None),
    ("half", 128, "queries"): (64, 64, 4, 3, None),
    ("half", 128, "keys"): (128, 64, 4, 2, None),
    ("float32", 128, "plain"): (64, 32, 4, 2, None),
    ("float32", 128, "extended"): (64, 32, 4, 2, None),
    ("float32", 128, "queries"): (128, 32, 8, 2, None),
    ("float32", 128, "keys"): (32, 32, 4, 3, None),
}
LONG = 12_288  # keys from which on the tiles of LONG_TILES are faster
LONG_TILES: dict[tuple[str, int, str], Tile] = {
    ("half", 64, "plain"): (64, 128, 4, 3, None),
    ("half", 128, "plain"): (128, 128, 4, 2, None),
    ("half", 128, "extended"): (128, 128, 4, 2, None),
}


def _blocks(D: int, dtype: torch.dtype, kernel: str, length: int) -> dict[str, int]:
    """Tile sizes and launch settings."""
    wide = max(16, triton.next_power_of_2(D))
    key = ("float32" if dtype == torch.float32 else "half", max(wide, 64), kernel)
    tile = TILES.get(key, (64, 64, 4, 2, None) if wide <= 128 else (64, 32, 4, 2, None))
    m, n, warps, stages, registers = LONG_TILES.get(key, tile) if length >= LONG else tile
    size = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": wide, "num_warps": warps, "num_stages": stages}
    return size if registers is None else size | {"maxnreg": registers}


def _visible_counts(terms: Terms, T: int, S: int, device: torch.device) -> Tensor:
    """Keys in view of each row where only causal and window masks act."""
    if terms.window is None:
        least = S - T + 1 if terms.causal else S
        return torch.arange(least, S + 1, dtype=torch.int32, device=device).expand(T)
    at = torch.arange(S - T, S, dtype=torch.int32, device=device)
    high = (at + (1 if terms.causal else terms.window)).clamp_max(S)
    return (high - (at - terms.window + 1).clamp_min(0)).clamp_min(0)


def _lookers(terms: Terms, T: int, S: int, device: torch.device) -> Tensor:
    """Rows that have each key in view, likewise."""
    j = torch.arange(S, dtype=torch.int32, device=device)
    low, high = torch.full_like(j, S - T), torch.full_like(j, S)
    if terms.causal:
        low = torch.maximum(low, j)
    if terms.window is not None:
        low = torch.maximum(low, j - terms.window + 1)
        high = torch.minimum(high, j + terms.window)
    return (high - low).clamp_min(0)
