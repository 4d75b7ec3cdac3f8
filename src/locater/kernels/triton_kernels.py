"""Attention statistics in Triton: one online softmax over key blocks, no T x S matrix, logits recomputed for gradients.

Rows (i, queries) and columns (j, keys) are tiles of BLOCK_M x BLOCK_N logits x in units of log 2, so that exp is exp2. Per row,
relative to the running maximum m:

    s = sum 2^(x-m)        a = sum (x-m) 2^(x-m)        ->  H = ln 2 ((L-m) s - a) 2^(m-L),   L = log2-sum-exp with the sink

Taking a relative to m keeps the entropy of logits near 10^4 exact to float32; the textbook difference lse - sum p x does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.terms import AttentionStatistics, Terms

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EMPTY = tl.constexpr(-1.0e30)  # finite, so that 0 x EMPTY is 0


@triton.jit
def _tile(q, k, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
          CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr, DOC: tl.constexpr,
          MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
          RAW: tl.constexpr = False):  # fmt: skip
    """Logits of a tile in natural units after scale, bias and cap (RAW: before the scale, where nothing else acts on them), and
    which of them count. i and j are positions in rows and keys."""
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if not RAW:
        x = x * scale
    at = i + (S - T)
    distance = at[:, None] - j[None, :]
    inside = (i < T)[:, None] & (j < S)[None, :]
    if ALIBI:
        x -= tl.load(Alibi + h) * tl.abs(distance).to(tl.float32)
    if BIAS:
        x += tl.load(Bias + b * bb + h * bh + i[:, None].to(tl.int64) * bt + j[None, :], mask=inside, other=0.0).to(tl.float32)
    if CAP:
        x = cap * (1 - 2 / (1 + tl.exp2(x * (2 * LOG2E / cap))))  # cap * tanh(x / cap)
    seen = inside
    if EDGE:
        if CAUSAL:
            seen = seen & (distance >= 0)
        if WINDOW:
            seen = seen & (tl.abs(distance) < window)
        if PAD:
            seen = seen & (tl.load(Pad + b * S + j, mask=j < S, other=0) != 0)[None, :]
        if DOC:
            mine = tl.load(Doc + b * S + at, mask=i < T, other=-1)
            theirs = tl.load(Doc + b * S + j, mask=j < S, other=-2)
            seen = seen & (mine[:, None] == theirs[None, :])
        if MASK:
            seen = seen & (tl.load(Mask + b * mb + h * mh + i[:, None].to(tl.int64) * mt + j[None, :], mask=inside, other=0) != 0)
    return x, seen, distance


@triton.jit
def _add_tile(x, unit, seen, distance, at, j, m, s, a, s2, far, first_s, self_s, count, first, EDGE: tl.constexpr, COUNT: tl.constexpr,
              EXTENDED: tl.constexpr, FIRST_TILE: tl.constexpr, SELF: tl.constexpr, BEHIND: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """One step of the online softmax with its companions; x * unit is in units of log 2. BEHIND: every key is before its query."""
    if BIAS:
        seen = seen & (x > -1.0e29)  # a bias of -inf is a mask
    if EDGE or BIAS:
        x = tl.where(seen, x, EMPTY)
    new = tl.maximum(m, tl.max(x, 1) * unit)
    shift = m - new
    alpha = tl.exp2(shift)
    y = x * unit - new[:, None]
    if EDGE or BIAS:
        y = tl.where(seen, y, EMPTY)  # fused with the subtraction, EMPTY * unit leaves a rounding of 1e22 behind
    e = tl.exp2(y)
    a = alpha * (a + shift * s) + tl.sum(y * e, 1)
    here = tl.sum(e, 1)
    s = alpha * s + here
    if EXTENDED:
        s2 = alpha * alpha * s2 + tl.sum(e * e, 1)
        if BEHIND:  # sum e (i - j) without a tile of distances
            far = alpha * far + at.to(tl.float32) * here - tl.sum(e * j.to(tl.float32)[None, :], 1)
        else:
            far = alpha * far + tl.sum(e * tl.abs(distance).to(tl.float32), 1)
        first_s = alpha * first_s
        self_s = alpha * self_s
        if FIRST_TILE:
            first_s += tl.sum(tl.where((j < first)[None, :], e, 0.0), 1)
        if SELF:
            self_s += tl.sum(tl.where(distance == 0, e, 0.0), 1)
    if COUNT:
        count += tl.sum(seen.to(tl.int32), 1)
    return new, s, a, s2, far, first_s, self_s, count


@triton.jit
def _rows_kernel(Q, K, Lse, Entropy, Max, Mass, Count, Squares, Far, First, Self, Base, Rest, Doc, Pad, Mask, Bias, Alibi, Sinks,
                 qb, qh, qt, kb, kh, kt, mb, mh, mt, bb, bh, bt, H, GROUP, T, S, scale, cap, window, first,
                 D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr, DOC: tl.constexpr,
                 MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, EXTENDED: tl.constexpr,
                 COUNT: tl.constexpr, PER_KEY: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows of a causal mask start first
    b = tl.program_id(0).to(tl.int64) // H
    h = tl.program_id(0).to(tl.int64) % H
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = tl.load(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], mask=(i < T)[:, None] & (d < D)[None, :], other=0.0)
    keys = K + b * kb + (h // GROUP) * kh + d[None, :]
    m = tl.full([BLOCK_M], EMPTY, tl.float32)
    s = tl.zeros([BLOCK_M], tl.float32)
    a = tl.zeros([BLOCK_M], tl.float32)
    s2 = tl.zeros([BLOCK_M], tl.float32)
    far = tl.zeros([BLOCK_M], tl.float32)
    first_s = tl.zeros([BLOCK_M], tl.float32)
    self_s = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    RAW: tl.constexpr = not (BIAS or CAP or ALIBI)
    unit = LOG2E * 1.0
    if RAW:
        unit = scale * LOG2E  # one multiplication for the scale and the change of base
    at = i + (S - T)
    low, high, plain_high = _span(block, T, S, window, CAUSAL, WINDOW, PAD or DOC or MASK, BLOCK_M, BLOCK_N)
    head = low
    if EXTENDED:  # tiles that hold the first keys count them; they come first, and are few
        head = tl.minimum(tl.maximum(low, ((first + BLOCK_N - 1) // BLOCK_N) * BLOCK_N), high)
        for start in range(low, head, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            k = tl.load(keys + j[:, None].to(tl.int64) * kt, mask=(j < S)[:, None] & (d < D)[None, :], other=0.0)
            x, seen, distance = _tile(q, k, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
                                      CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI, True, PRECISION, RAW)  # fmt: skip
            m, s, a, s2, far, first_s, self_s, count = _add_tile(
                x, unit, seen, distance, at, j, m, s, a, s2, far, first_s, self_s, count, first,
                True, COUNT, EXTENDED, True, True, False, BIAS)  # fmt: skip
    plain_high = tl.maximum(plain_high, head)
    for start in range(head, plain_high, BLOCK_N):  # every key of these tiles is visible: no mask to build
        j = start + tl.arange(0, BLOCK_N)
        k = tl.load(keys + j[:, None].to(tl.int64) * kt, mask=(d < D)[None, :], other=0.0)
        x, seen, distance = _tile(q, k, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
                                  CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI, False, PRECISION, RAW)  # fmt: skip
        m, s, a, s2, far, first_s, self_s, count = _add_tile(
            x, unit, seen, distance, at, j, m, s, a, s2, far, first_s, self_s, count, first,
            False, COUNT, EXTENDED, False, not CAUSAL, CAUSAL, BIAS)  # fmt: skip
    for start in range(plain_high, high, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k = tl.load(keys + j[:, None].to(tl.int64) * kt, mask=(j < S)[:, None] & (d < D)[None, :], other=0.0)
        x, seen, distance = _tile(q, k, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
                                  CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI, True, PRECISION, RAW)  # fmt: skip
        m, s, a, s2, far, first_s, self_s, count = _add_tile(
            x, unit, seen, distance, at, j, m, s, a, s2, far, first_s, self_s, count, first,
            True, COUNT, EXTENDED, False, True, False, BIAS)  # fmt: skip
    shown = m > -1.0e20  # far below any logit, far above EMPTY in any unit
    top, total = m, s
    if SINKS:
        sink = tl.load(Sinks + h).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        total = s * tl.exp2(m - top) + tl.exp2(sink - top)
    rest = (top - m) + tl.log2(tl.maximum(total, 1e-37))  # L - m, without the rounding of L
    w = tl.where(shown, tl.exp2(-rest), 0.0)
    row = tl.program_id(0).to(tl.int64) * T + i
    inside = i < T
    nothing = float("-inf")
    tl.store(Lse + row, tl.where(shown, (m + rest) * LN2, nothing), mask=inside)
    tl.store(Max + row, tl.where(shown, m * LN2, nothing), mask=inside)
    tl.store(Mass + row, s * w, mask=inside)
    tl.store(Entropy + row, tl.where(shown, LN2 * (rest * s - a) * w, 0.0), mask=inside)
    if COUNT:
        tl.store(Count + row, count, mask=inside)
    if PER_KEY:  # the log-sum-exp in two parts: at logits of 1e4 one float32 has no digits left
        tl.store(Base + row, tl.where(shown, m, float("inf")), mask=inside)
        tl.store(Rest + row, tl.where(shown, rest, 0.0), mask=inside)
    if EXTENDED:
        tl.store(Squares + row, s2 * w * w, mask=inside)
        tl.store(Far + row, far * w, mask=inside)
        tl.store(First + row, first_s * w, mask=inside)
        tl.store(Self + row, self_s * w, mask=inside)


@triton.jit
def _span(block, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, OTHER: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Key range of a block of rows: from `low`, all visible up to `plain_high`, masked up to `high`; multiples of BLOCK_N."""
    start = block * BLOCK_M + (S - T)  # position of the first row
    low = 0
    high = S
    if CAUSAL:
        high = tl.minimum(S, start + BLOCK_M)
    if WINDOW:
        low = tl.maximum(0, start - window + 1) // BLOCK_N * BLOCK_N
        high = tl.minimum(high, start + BLOCK_M + window)
    plain_high = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        plain_high = tl.minimum(plain_high, start // BLOCK_N * BLOCK_N)  # a row's own key is in a masked tile
    if WINDOW or OTHER:
        plain_high = low
    return low, tl.maximum(high, low), tl.maximum(plain_high, low)


@triton.jit
def _slope_tile(x, seen, lse, pull, grad, cap, CAP: tl.constexpr):
    """d(sum grad * H) / d(q k^T scale) of a tile: -p (log p + 1 - mass + H) grad, through the cap."""
    log_p = x - lse[:, None]
    p = tl.where(seen, tl.exp2(log_p * LOG2E), 0.0)
    slope = -p * (log_p + pull[:, None]) * grad[:, None]
    slope = tl.where(p > 0, slope, 0.0)
    if CAP:
        slope = slope * (1 - (x / cap) * (x / cap))
    return slope


@triton.jit
def _query_gradient_kernel(Q, K, Lse, Pull, Grad, DQ, Doc, Pad, Mask, Bias, Alibi,
                           qb, qh, qt, kb, kh, kt, mb, mh, mt, bb, bh, bt, H, GROUP, T, S, scale, cap, window,
                           D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr,
                           DOC: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
                           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    b = tl.program_id(0).to(tl.int64) // H
    h = tl.program_id(0).to(tl.int64) % H
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    tile = (i < T)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], mask=tile, other=0.0)
    at = tl.program_id(0).to(tl.int64) * T + i
    lse = tl.load(Lse + at, mask=i < T, other=0.0)
    shown = lse > float("-inf")
    lse = tl.where(shown, lse, 0.0)
    pull = tl.load(Pull + at, mask=i < T, other=0.0)
    grad = tl.where(shown, tl.load(Grad + at, mask=i < T, other=0.0), 0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, high, plain_high = _span(block, T, S, window, CAUSAL, WINDOW, True, BLOCK_M, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k = tl.load(K + b * kb + (h // GROUP) * kh + j[:, None].to(tl.int64) * kt + d[None, :],
                    mask=(j < S)[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
        x, seen, distance = _tile(q, k, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
                                  CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI, True, PRECISION)  # fmt: skip
        slope = _slope_tile(x, seen, lse, pull, grad, cap, CAP)
        dq += tl.dot(slope.to(k.dtype), k, input_precision=PRECISION)
    tl.store(DQ + (tl.program_id(0).to(tl.int64) * T + i[:, None]) * D + d[None, :], dq * scale, mask=tile)


@triton.jit
def _columns_kernel(Q, K, Lse, Pull, Grad, Out, Doc, Pad, Mask, Bias, Alibi,
                    qb, qh, qt, kb, kh, kt, mb, mh, mt, bb, bh, bt, H, GROUP, T, S, scale, cap, window,
                    D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr, DOC: tl.constexpr,
                    MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr, RECEIVED: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Sums over queries for a block of keys: weight received by each key, or the gradient of the keys (one query head's part)."""
    block = tl.program_id(1)
    b = tl.program_id(0).to(tl.int64) // H
    h = tl.program_id(0).to(tl.int64) % H
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    tile = (j < S)[:, None] & (d < D)[None, :]
    k = tl.load(K + b * kb + (h // GROUP) * kh + j[:, None].to(tl.int64) * kt + d[None, :], mask=tile, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    got = tl.zeros([BLOCK_N], tl.float32)
    first_row = 0
    last_row = T
    if CAUSAL:
        first_row = tl.maximum(0, block * BLOCK_N - (S - T)) // BLOCK_M * BLOCK_M
    if WINDOW:
        first_row = tl.maximum(first_row, tl.maximum(0, block * BLOCK_N - (S - T) - window) // BLOCK_M * BLOCK_M)
        last_row = tl.minimum(T, (block + 1) * BLOCK_N - (S - T) + window)
    for start in range(first_row, last_row, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        q = tl.load(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], mask=(i < T)[:, None] & (d < D)[None, :], other=0.0)
        at = tl.program_id(0).to(tl.int64) * T + i
        x, seen, distance = _tile(q, k, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
                                  CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI, True, PRECISION)  # fmt: skip
        lse = tl.load(Lse + at, mask=i < T, other=0.0)
        if RECEIVED:  # Lse and Pull hold the two parts, in log 2; a row that sees nothing has infinity in the first
            rest = tl.load(Pull + at, mask=i < T, other=0.0)
            got += tl.sum(tl.where(seen, tl.exp2(x * LOG2E - lse[:, None] - rest[:, None]), 0.0), 0)
        else:
            shown = lse > float("-inf")
            seen = seen & shown[:, None]
            lse = tl.where(shown, lse, 0.0)
            pull = tl.load(Pull + at, mask=i < T, other=0.0)
            grad = tl.load(Grad + at, mask=i < T, other=0.0)
            slope = _slope_tile(x, seen, lse, pull, grad, cap, CAP)
            dk += tl.dot(tl.trans(slope).to(q.dtype), q, input_precision=PRECISION)
    if RECEIVED:
        tl.store(Out + tl.program_id(0).to(tl.int64) * S + j, got, mask=j < S)
    else:
        tl.store(Out + (tl.program_id(0).to(tl.int64) * S + j[:, None]) * D + d[None, :], dk * scale, mask=tile)


def statistics(
    q: Tensor, k: Tensor, terms: Terms, extended: bool, per_key: bool, blocks: dict[str, int] | None = None
) -> AttentionStatistics:
    """q (B, H, T, D), k (B, K, S, D); float32 or half precision, sums in float32."""
    if terms.scale <= 0:  # the running maximum of unscaled products needs a positive scale
        terms, q = replace(terms, scale=-terms.scale or 1.0), -q if terms.scale else torch.zeros_like(q)
    B, H, T, D = q.shape
    S = k.shape[-2]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    generic = terms.padding is not None or terms.documents is not None or terms.mask is not None
    rows = {name: torch.empty(B, H, T, dtype=torch.float32, device=q.device) for name in ("lse", "entropy", "max", "mass")}
    more = {
        name: torch.empty(B, H, T, dtype=torch.float32, device=q.device) if extended else None
        for name in ("squares", "far", "first", "self")
    }
    count = torch.empty(B, H, T, dtype=torch.int32, device=q.device) if generic else None
    parts = [torch.empty(B, H, T, dtype=torch.float32, device=q.device) if per_key else None for _ in range(2)]
    ready = _prepared(terms)
    arguments, flags = _launch(q, k, ready)
    size = blocks or _blocks(D, q.dtype, extended)
    if T:
        _rows_kernel[(B * H, triton.cdiv(T, size["BLOCK_M"]))](
            q, k, rows["lse"], rows["entropy"], rows["max"], rows["mass"], count,
            more["squares"], more["far"], more["first"], more["self"], *parts,
            *_tensors(ready), ready.sinks, *arguments, terms.first,
            **flags, SINKS=terms.sinks is not None, EXTENDED=extended, COUNT=generic, PER_KEY=per_key, **size,
        )  # fmt: skip
    if count is None:
        count = _visible_counts(terms, T, S, q.device).expand(B, H, T)
    received = _received(q, k, terms, ready, parts, size) if per_key else None
    return AttentionStatistics(
        rows["lse"], rows["entropy"], rows["max"], count, rows["mass"],
        more["squares"], more["far"], more["first"], more["self"], received,
    )  # fmt: skip


def _received(q: Tensor, k: Tensor, terms: Terms, ready: Terms, parts: list[Tensor | None], size: dict[str, int]) -> Tensor:
    B, H, T, _ = q.shape
    S = k.shape[-2]
    out = torch.zeros(B, H, S, dtype=torch.float32, device=q.device)
    arguments, flags = _launch(q, k, ready)
    _columns_kernel[(B * H, triton.cdiv(S, size["BLOCK_N"]))](
        q, k, *parts, parts[0], out, *_tensors(ready), *arguments, **flags, RECEIVED=True, **size
    )  # fmt: skip
    lookers = torch.zeros(1, 1, S, dtype=torch.float32, device=q.device)
    step = max(1, (1 << 24) // max(1, S))
    for start in range(0, T, step):
        lookers = lookers + terms.visible(slice(start, min(T, start + step)), T, S, q.device).sum(2)
    return out / lookers.clamp_min(1)


def entropy_gradient(q: Tensor, k: Tensor, terms: Terms, lse: Tensor, entropy: Tensor, mass: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad * entropy) with respect to q and k."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[-2]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    pull, grad = 1 - mass + entropy, grad.float().contiguous()
    dq = torch.empty(B, H, T, D, dtype=torch.float32, device=q.device)
    dk = torch.empty(B, H, S, D, dtype=torch.float32, device=q.device)
    ready = _prepared(terms)
    arguments, flags = _launch(q, k, ready)
    size = _blocks(D, q.dtype, backward=True)
    _query_gradient_kernel[(B * H, triton.cdiv(T, size["BLOCK_M"]))](
        q, k, lse, pull, grad, dq, *_tensors(ready), *arguments, **flags, **size
    )  # fmt: skip
    _columns_kernel[(B * H, triton.cdiv(S, size["BLOCK_N"]))](
        q, k, lse, pull, grad, dk, *_tensors(ready), *arguments, **flags, RECEIVED=False, **size
    )  # fmt: skip
    return dq.to(q.dtype), dk.unflatten(1, (K, -1)).sum(2).to(k.dtype)


def _prepared(terms: Terms) -> Terms:
    """The same terms with tensors as the kernels read them: contiguous, small types."""

    def ready(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        return None if x is None else x.to(dtype or x.dtype).contiguous()

    return replace(
        terms, padding=ready(terms.padding, torch.int8), documents=ready(terms.documents, torch.int32), mask=ready(terms.mask, torch.int8),
        bias=ready(terms.bias), alibi=ready(terms.alibi, torch.float32), sinks=ready(terms.sinks),
    )  # fmt: skip


def _tensors(terms: Terms) -> list[Tensor | None]:
    return [terms.documents, terms.padding, terms.mask, terms.bias, terms.alibi]


def _launch(q: Tensor, k: Tensor, terms: Terms) -> tuple[list[Any], dict[str, Any]]:
    """Strides and sizes, then compile-time switches."""
    _, H, T, D = q.shape
    K, S = k.shape[1], k.shape[-2]
    strides = [*q.stride()[:3], *k.stride()[:3]]
    for held in (terms.mask, terms.bias):
        strides += [0, 0, 0] if held is None else [0 if held.shape[axis] == 1 else held.stride(axis) for axis in range(3)]
    arguments = [*strides, H, H // K, T, S, terms.scale, terms.softcap or 1.0, terms.window or 0]
    flags = {
        "D": D, "CAUSAL": terms.causal, "WINDOW": terms.window is not None, "CAP": terms.softcap is not None,
        "PAD": terms.padding is not None, "DOC": terms.documents is not None, "MASK": terms.mask is not None,
        "BIAS": terms.bias is not None, "ALIBI": terms.alibi is not None,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",  # three products of rounded parts: float32 to a few 1e-7
    }  # fmt: skip
    return arguments, flags


TILES = {  # (head size, extended): BLOCK_M, BLOCK_N, warps, stages; the fastest on an H200 (benchmarks/results/attention-tuning.json)
    (64, False): (128, 128, 8, 3),
    (64, True): (64, 64, 4, 3),
    (128, False): (128, 128, 8, 2),
    (128, True): (64, 64, 4, 3),
}


def _blocks(D: int, dtype: torch.dtype, extended: bool = False, backward: bool = False) -> dict[str, int]:
    """Tile sizes and launch settings."""
    wide = max(16, triton.next_power_of_2(D))
    if wide > 128:
        m, n, warps, stages = 64, 32, 4, 2
    elif dtype == torch.float32:
        m, n, warps, stages = 64, 64, 4, 2
    elif backward:
        m, n, warps, stages = 64, 64, 4, 2
    else:
        m, n, warps, stages = TILES[max(wide, 64), extended]
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": wide, "num_warps": warps, "num_stages": stages}


def _visible_counts(terms: Terms, T: int, S: int, device: torch.device) -> Tensor:
    """Keys in view of each row where only causal and window masks act."""
    at = torch.arange(T, device=device) + (S - T)
    low, high = torch.zeros_like(at), torch.full_like(at, S)
    if terms.causal:
        high = torch.minimum(high, at + 1)
    if terms.window is not None:
        low = torch.maximum(low, at - terms.window + 1)
        high = torch.minimum(high, at + terms.window)
    return (high - low).clamp_min(0).to(torch.int32)
