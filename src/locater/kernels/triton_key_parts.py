"""Attention statistics of few queries and many keys, as in decoding with a cache: the keys are split over programs.

One program per head would leave most of a GPU idle. Here each takes a part of the keys for all the query heads that
share them (so that keys are read once), and keeps the sums of its part; a second kernel brings the parts of a row to
one maximum. Names and units are those of `triton_rows`. Each column of a tile is a running softmax of its own until the
end, so that the loop has no sums over threads: what bounds it is reading the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.terms import Terms
from locater.kernels.triton_kept_kernels import launch, launch_arguments
from locater.kernels.triton_parts import EMPTY, load_rows
from locater.kernels.triton_rows import LEAST, log2_unit, logit_terms, store_rows


@triton.jit(do_not_specialize=["S", "parts", "rows"])
def parts_kernel(Q, K, Part, Count, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt, kb, kh, kt: tl.constexpr, mb, mh, mt, bb,
                 bh, bt, H, GROUP, T, S, scale, cap, window, first, rows, parts, part_keys, D: tl.constexpr,
                 CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr, DOC: tl.constexpr,
                 MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, EXTENDED: tl.constexpr,
                 COUNT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_D: tl.constexpr):  # fmt: skip
    """Sums over keys [part * part_keys, ...) of the GROUP * T rows that share a key head; Part is (7, parts, rows)."""
    part = tl.program_id(0) % parts
    rest = tl.program_id(0) // parts
    blocks = tl.cdiv(GROUP * T, BLOCK_M)
    r = (rest % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = r < GROUP * T
    K_heads = H // GROUP
    b = (rest // blocks // K_heads).to(tl.int64)
    hk = (rest // blocks % K_heads).to(tl.int64)
    h = hk * GROUP + tl.minimum(r // T, GROUP - 1)
    i = r % T
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    q = load_rows(Q + b * qb + h[:, None] * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, inside, D, BLOCK_D, True)
    keys = K + b * kb + hk * kh + (n[:, None] * kt + d[None, :])
    m = tl.full([BLOCK_M, BLOCK_N], LEAST, tl.float32)
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    a = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    s2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    far = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first_s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    self_s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    unit = log2_unit(scale, CAP, BIAS, ALIBI)
    behind = (i + (S - T))[:, None]
    low = part * part_keys
    high = tl.minimum(S, low + part_keys)
    if WINDOW:  # parts that no row looks at have no keys
        low = tl.maximum(low, tl.maximum(0, S - T - window + 1) // BLOCK_N * BLOCK_N)
    plain_high = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        plain_high = (S - T + 1) // BLOCK_N * BLOCK_N
    if WINDOW or PAD or DOC or MASK:
        plain_high = 0
    plain_high = tl.maximum(low, tl.minimum(plain_high, high))
    for EDGE in tl.static_range(2):
        for start in range(plain_high if EDGE else low, high if EDGE else plain_high, BLOCK_N):
            k = load_rows(keys + tl.cast(start, tl.int64) * kt, d, start + n < S, D, BLOCK_D, EDGE)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            x, seen = logit_terms(x, i[:, None], (start + n)[None, :], b, h[:, None], T, S, scale, cap, window, Doc,
                                  Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt, CAUSAL, WINDOW, CAP, PAD, DOC, MASK,
                                  BIAS, ALIBI, EDGE)  # fmt: skip
            if EDGE:
                x = tl.where(seen, x, EMPTY)
            if BIAS:
                x = tl.maximum(x, EMPTY)  # a bias of -inf is a mask
            new = tl.maximum(m, x * unit)
            shift = m - new
            alpha = tl.exp2(shift)
            y = x * unit - new
            e = tl.exp2(y)
            m = new
            a = alpha * (a + shift * s) + y * e
            s = alpha * s + e
            if EXTENDED:
                distance = behind - (start + n)[None, :]
                s2 = alpha * alpha * s2 + e * e
                far = alpha * far + e * tl.abs(distance).to(tl.float32)
                first_s = alpha * first_s + tl.where((start + n < first)[None, :], e, 0.0)
                self_s = alpha * self_s + tl.where(distance == 0, e, 0.0)
            if COUNT and BIAS:
                count += tl.sum((x > EMPTY).to(tl.int32), 1)
            elif COUNT and EDGE:
                count += tl.sum(seen.to(tl.int32), 1)
    at = part * rows.to(tl.int64) + (b * H + h) * T + i
    apart = parts * rows.to(tl.int64)
    column_m = m
    m = tl.max(column_m, 1)
    shift = column_m - m[:, None]
    alpha = tl.exp2(shift)
    tl.store(Part + at, m, mask=inside)
    tl.store(Part + apart + at, tl.sum(alpha * s, 1), mask=inside)
    tl.store(Part + 2 * apart + at, tl.sum(alpha * (a + shift * s), 1), mask=inside)
    if EXTENDED:
        tl.store(Part + 3 * apart + at, tl.sum(alpha * alpha * s2, 1), mask=inside)
        tl.store(Part + 4 * apart + at, tl.sum(alpha * far, 1), mask=inside)
        tl.store(Part + 5 * apart + at, tl.sum(alpha * first_s, 1), mask=inside)
        tl.store(Part + 6 * apart + at, tl.sum(alpha * self_s, 1), mask=inside)
    if COUNT:
        tl.store(Count + at, count, mask=inside)


@triton.jit(do_not_specialize=["rows", "parts"])
def join_kernel(Part, Count, Out, Seen, Sinks, H, T, rows, parts, SINKS: tl.constexpr, EXTENDED: tl.constexpr,
                COUNT: tl.constexpr, PER_KEY: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The parts of each row as one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, PARTS)
    inside = at < rows
    tile = inside[:, None] & (p < parts)[None, :]
    where = Part + p[None, :] * rows.to(tl.int64) + at[:, None]
    apart = parts * rows.to(tl.int64)
    part_m = tl.load(where, mask=tile, other=LEAST)
    part_s = tl.load(where + apart, mask=tile, other=0.0)
    m = tl.max(part_m, 1)
    shift = part_m - m[:, None]
    alpha = tl.exp2(shift)
    s = tl.sum(alpha * part_s, 1)
    a = tl.sum(alpha * (tl.load(where + 2 * apart, mask=tile, other=0.0) + shift * part_s), 1)
    s2 = s
    far = s
    first_s = s
    self_s = s
    if EXTENDED:
        s2 = tl.sum(alpha * alpha * tl.load(where + 3 * apart, mask=tile, other=0.0), 1)
        far = tl.sum(alpha * tl.load(where + 4 * apart, mask=tile, other=0.0), 1)
        first_s = tl.sum(alpha * tl.load(where + 5 * apart, mask=tile, other=0.0), 1)
        self_s = tl.sum(alpha * tl.load(where + 6 * apart, mask=tile, other=0.0), 1)
    if COUNT:
        seen = tl.load(Count + p[None, :] * rows.to(tl.int64) + at[:, None], mask=tile, other=0)
        tl.store(Seen + at, tl.sum(seen, 1), mask=inside)
    store_rows(Out, at, inside, m, m, s, a, s2, far, first_s, self_s, Sinks, (at // T) % H, rows, SINKS, EXTENDED,
               PER_KEY)  # fmt: skip


SHARED = 64  # rows that share keys, up to which the keys are split
PROGRAMS = 528  # that a GPU is to have: four for each of an H200's 132 processors
LEAST_KEYS = 256  # of a part
TILE = (64, 4, 3)  # BLOCK_N, warps, stages


def count_parts(q: Tensor, k: Tensor) -> int:
    """Into how many parts the keys are split: 1 unless rows are few and keys many."""
    B, H, T, _ = q.shape
    K, S = k.shape[1], k.shape[2]
    shared = T * (H // K)
    if shared > SHARED and T > 1:
        return 1
    return max(1, min(PROGRAMS // (B * K * triton.cdiv(shared, SHARED)), S // LEAST_KEYS, 256))


def statistics_in_parts(
    q: Tensor, k: Tensor, terms: Terms, parts: int, out: Tensor, count: Tensor | None, extended: bool, per_key: bool
) -> None:
    """Fills `out` and `count` as `rows_kernel` does."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    arguments, flags = launch_arguments(q, k, terms)
    numbers = arguments[:19] + arguments[21:]  # without the order of heads
    n = TILE[0] if D <= 128 else 32
    m = min(SHARED, max(16, triton.next_power_of_2(T * (H // K))))
    part_keys = triton.cdiv(triton.cdiv(S, n), parts) * n
    parts, rows = triton.cdiv(S, part_keys), B * H * T
    sums = torch.empty(7 if extended else 3, parts, rows, dtype=torch.float32, device=q.device)
    seen = None if count is None else torch.empty(parts, rows, dtype=torch.int32, device=q.device)
    both = {"EXTENDED": extended, "COUNT": count is not None}
    size = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    size |= {"num_warps": TILE[1], "num_stages": TILE[2]}
    launch(
        parts_kernel,
        (parts * B * K * triton.cdiv(T * (H // K), m), 1, 1),
        [q, k, sums, seen, *numbers, terms.first, rows, parts, part_keys],
        flags | both | size,
    )
    size = {"BLOCK": 16, "PARTS": triton.next_power_of_2(parts), "SINKS": terms.sinks is not None, "PER_KEY": per_key}
    ends = [sums, seen, out, count, terms.sinks, H, T, rows, parts]
    launch(join_kernel, (triton.cdiv(rows, 16), 1, 1), ends, both | size)
