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

import triton
import triton.language as tl

from locater.kernels.triton_parts import EMPTY, LOG2E, capped, key_span, key_span_of, load_rows

LN2 = tl.constexpr(0.6931471805599453)
# where maxima start: below any logit, and so far above EMPTY that the difference of both is EMPTY again
LEAST = tl.constexpr(-1.0e15)


@triton.jit
def program_place(H, heads, blocks, together):
    """Batch, head, both, and number of this program's block. Blocks of `together` heads run side by side, so that their
    keys stay in the cache; heads follow one another only where all of them would not fit."""
    n = tl.program_id(0)
    group = n // (together * blocks)
    width = tl.minimum(together, heads - group * together)
    n -= group * together * blocks
    head = (group * together + n % width).to(tl.int64)
    return head // H, head % H, head, n // width


@triton.jit
def logit_terms(x, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
                CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr, DOC: tl.constexpr,
                MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """Logits of products x in natural units after scale, bias and cap (just x where the scale alone acts on it: see
    log2_unit), and which of them count. i and j are rows and keys along either axis. Rows past the end are not masked:
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
def log2_unit(scale, CAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr):
    """From what logit_terms returns to units of log 2: one multiplication for the scale and the change of base where it
    can be.
    """
    unit = scale * LOG2E
    if BIAS or CAP or ALIBI:
        unit = LOG2E * 1.0
    return unit


@triton.jit
def in_lanes(x, LANES: tl.constexpr):
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
    x = in_lanes(x, LANES)
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


@triton.jit
def store_rows(Out, at, inside, m, top, s, a, s2, far, first_s, self_s, Sinks, h, rows, SINKS: tl.constexpr,
               EXTENDED: tl.constexpr, PER_KEY: tl.constexpr):  # fmt: skip
    """The statistics of rows from their sums, which are relative to m; `top` is the largest logit. Returns what 2^(x -
    m) is multiplied by to be a weight."""
    shown = top > LEAST
    base, total = m, s
    if SINKS:
        sink = tl.load(Sinks + h).to(tl.float32) * LOG2E
        base = tl.maximum(m, sink)
        total = s * tl.exp2(m - base) + tl.exp2(sink - base)
    rest = (base - m) + tl.log2(tl.maximum(total, 1e-37))  # L - m, without the rounding of L
    w = tl.where(shown, tl.exp2(-rest), 0.0)
    nothing = float("-inf")
    rows = rows.to(tl.int64)
    tl.store(Out + at, tl.where(shown, (m + rest) * LN2, nothing), mask=inside)
    tl.store(Out + rows + at, tl.where(shown, LN2 * (rest * s - a) * w, 0.0), mask=inside)
    tl.store(Out + 2 * rows + at, tl.where(shown, top * LN2, nothing), mask=inside)
    tl.store(Out + 3 * rows + at, s * w, mask=inside)
    if EXTENDED:
        tl.store(Out + 4 * rows + at, s2 * w * w, mask=inside)
        tl.store(Out + 5 * rows + at, far * w, mask=inside)
        tl.store(Out + 6 * rows + at, first_s * w, mask=inside)
        tl.store(Out + 7 * rows + at, self_s * w, mask=inside)
    if PER_KEY:  # the log-sum-exp in two parts: at logits of 1e4 one float32 has no digits left
        tl.store(Out + 8 * rows + at, tl.where(shown, m, float("inf")), mask=inside)
        tl.store(Out + 9 * rows + at, tl.where(shown, rest, 0.0), mask=inside)
    return w


@triton.jit(do_not_specialize=["heads", "together", "rows"])
def rows_kernel(Q, K, Out, Count, Sinks, Rows, Spans, Whole, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt, kb, kh,
                 kt: tl.constexpr, mb, mh, mt, bb, bh, bt, H, GROUP, heads, together, T, S, scale, cap, window, first,
                 number, rows,
                 D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr,
                 DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
                 SINKS: tl.constexpr, EXTENDED: tl.constexpr, COUNT: tl.constexpr, PER_KEY: tl.constexpr,
                 SOME: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """SOME: of the `number` rows listed in Rows, in rising order; otherwise `number` is T, all of them.

    SPAN 1: in place of a mask, the keys of a row are those from Spans[0, b, i] to Spans[1, b, i]; does nothing unless
    Whole says that all rows are such. SPAN 2: with the mask, if they are not. 0: neither is there."""
    if SPAN > 0:
        if (tl.load(Whole) != 0) == (SPAN == 2):
            return
    b, h, head, block = program_place(H, heads, tl.cdiv(number, BLOCK_M), together)
    block = tl.cdiv(number, BLOCK_M) - 1 - block  # the longest rows of a causal mask start first
    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    i = r
    if SOME:
        i = tl.load(Rows + tl.minimum(r, number - 1)).to(tl.int32)
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
    unit = log2_unit(scale, CAP, BIAS, ALIBI)
    row = block * BLOCK_M + (S - T)
    behind = (i + (S - T))[:, None] - 2 * tl.arange(0, LANES)[None, :]
    if SOME:
        low, high, plain_high = key_span_of(tl.min(i, 0) + (S - T), tl.max(i, 0) + 1 + (S - T), S, window, CAUSAL,
                                            WINDOW, PAD or DOC or MASK, BLOCK_N)  # fmt: skip
    else:
        low, high, plain_high = key_span(block, T, S, window, CAUSAL, WINDOW, PAD or DOC or MASK, BLOCK_M, BLOCK_N)
    plain_low = low
    if SPAN == 1:
        begin = tl.load(Spans + b * T + tl.minimum(i, T - 1))
        end = tl.load(Spans + (heads // H + b) * T + tl.minimum(i, T - 1))
        count = end - begin
        low = tl.min(tl.where(count > 0, begin, S), 0) // BLOCK_N * BLOCK_N
        high = tl.max(end, 0)
        plain_low = tl.minimum(tl.cdiv(tl.max(begin, 0), BLOCK_N) * BLOCK_N, tl.maximum(high, low))
        plain_high = tl.maximum(tl.min(end, 0) // BLOCK_N * BLOCK_N, plain_low)
    # first tiles whose keys are all visible, where there is no mask to build, then those after and those before them
    for PHASE in tl.static_range(3 if SPAN == 1 else 2):
        for start in range(
            plain_high if PHASE == 1 else plain_low if PHASE == 0 else low,
            high if PHASE == 1 else plain_high if PHASE == 0 else plain_low,
            BLOCK_N,
        ):
            k = load_rows(keys + tl.cast(start, tl.int64) * kt, d, start + n < S, D, BLOCK_D, PHASE > 0)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            x, seen = logit_terms(x, i[:, None], (start + n)[None, :], b, h, T, S, scale, cap, window, Doc, Pad, Mask,
                                  Bias, Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI,
                                  PHASE > 0)  # fmt: skip
            if PHASE > 0 and SPAN == 1:
                seen = ((start + n)[None, :] >= begin[:, None]) & ((start + n)[None, :] < end[:, None])
            if PHASE > 0:
                x = tl.where(seen, x, EMPTY)
            if BIAS:
                x = tl.maximum(x, EMPTY)  # a bias of -inf is a mask
            m, s, a, s2, far, first_s, self_s = _add_tile(
                x, unit, behind - start, 0 if SOME else start - row, start, m, s, a, s2, far, first_s, self_s, first,
                CAUSAL, EXTENDED, PHASE > 0, BLOCK_M, BLOCK_N)  # fmt: skip
            if COUNT and BIAS:
                count += tl.sum((x > EMPTY).to(tl.int32), 1)
            elif COUNT and PHASE > 0 and SPAN != 1:
                count += tl.sum(seen.to(tl.int32), 1)
    lane_m = m
    m = tl.max(lane_m, 1)
    shift = lane_m - m[:, None]
    alpha = tl.exp2(shift)
    at = head * number + r
    if COUNT:
        tl.store(Count + at, count, mask=r < number)
    store_rows(Out, at, r < number, m, m, tl.sum(alpha * s, 1), tl.sum(alpha * (a + shift * s), 1),
               tl.sum(alpha * alpha * s2, 1), tl.sum(alpha * far, 1), tl.sum(alpha * first_s, 1),
               tl.sum(alpha * self_s, 1), Sinks, h, rows, SINKS, EXTENDED, PER_KEY)  # fmt: skip
