"""Sums over the rows of each head, added to accumulators: one launch for a dozen columns and a look at the output.

Sums of columns are float64. Of the programs of a head the first adds up its rows; the others read parts of the head's
output and add NaN where they find a number that is not finite, so the order in which programs end changes nothing.

The weight of each row on one key of its own, such as the first of its sequence, comes from a kernel without a loop over
keys (`put_key_weights`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.terms import Terms
from locater.kernels.triton_kept_kernels import LAUNCHES, keep_kernel, launch_arguments, tensor_layout
from locater.kernels.triton_launches import prepare_call, rows_of_prepared, visible_counts
from locater.kernels.triton_parts import EMPTY, LOG2E, load_rows
from locater.kernels.triton_rows import log2_unit, logit_terms
from locater.torch_private import launch_compiled

BLOCK, WARPS = 2048, 16  # rows at a time of the one program that adds up a head: what it costs is waiting for memory
PART = 1 << 15  # numbers of a head's output that one program reads


def add_sums(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    rows: Tensor | None,
    output: Tensor | None,
    sums: Tensor,
    maxima: Tensor,
    counted: Tensor | None = None,
    first: Tensor | None = None,
    stats: Tensor | None = None,
    spans: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add the statistics of a call, of all rows or of those at `rows` (R,), to `sums` (H, columns) float64, in the
    order of `dispatch.SUMMED`, and to `maxima` (H, 1) float32. A head whose `output` (B, T, H, V) is not finite in one
    of the rows gets NaN in columns 4 to 15.

    Calls with masks come with the rows that count, `counted` (B, T), and the `first` key (B, T) of each row's sequence,
    negative where it is not there. Without masks every row counts, and key 0 is the first. `spans`: of the mask, as
    `rows_of_statistics` takes them.
    """
    (B, H, T, _), S = q.shape, k.shape[-2]
    rows = None if rows is None else rows.contiguous()
    counted = None if counted is None else counted.view(torch.int8)
    count = None
    if stats is None or rows is not None or first is not None:
        q, k, terms = prepare_call(q, k, terms)
        stats, count = rows_of_prepared(q, k, terms, True, False, rows, spans)
    if first is not None:
        put_key_weights(q, k, terms, rows, first, stats)
        if count is None:
            visible = visible_counts(terms, T, S, q.device)
            count = (visible if rows is None else visible[rows]).expand(stats.shape[1:]).contiguous()
    _add(stats, count, rows, counted, output, sums, maxima, (B, H, T, S, terms.causal, terms.window))


def _add(
    stats: Tensor,
    count: Tensor | None,
    rows: Tensor | None,
    counted: Tensor | None,
    output: Tensor | None,
    sums: Tensor,
    maxima: Tensor,
    shape: tuple[Any, ...],
) -> None:
    key = ("sums", shape, *(tensor_layout(x) for x in (stats, count, rows, counted, output, sums, maxima)), sums.device)
    tensors = (stats, count, rows, counted, output, sums, maxima)
    if key in LAUNCHES:
        kernel, grid, rest = LAUNCHES[key]
        launch_compiled(kernel, grid, (*tensors, *rest))
        return
    (B, H, T, S, causal, window), number = shape, stats.shape[-1]
    V, strides = (0, (0, 0, 0)) if output is None else (output.shape[-1], output.stride()[:3])
    wide = max(16, triton.next_power_of_2(V))
    tile = max(1, 8192 // wide)
    each = max(tile, PART // wide // tile * tile)  # rows that one program reads
    grid = (H, 1 + (triton.cdiv(B * number, each) if V else 0), 1)
    rest = [sums.stride(0), maxima.stride(0), *strides, *((0, 0) if counted is None else counted.stride())]
    rest += [B, H, number, T, S, window or 0, B * H * number, each]
    fixed = {"V": V, "CAUSAL": causal, "WINDOW": window is not None, "SOME": rows is not None}
    fixed |= {"MASKED": counted is not None, "BLOCK": BLOCK, "BLOCK_R": tile, "BLOCK_V": wide, "num_warps": WARPS}
    made = sums_kernel[grid](*tensors, *rest, **fixed)
    keep_kernel(key, sums_kernel, made, grid, rest, len(tensors), fixed)


@triton.jit(do_not_specialize=["B", "number", "total", "each"])
def sums_kernel(Stats, Count, Rows, Counted, Output, Sums, Maxima, sh, mh, ob, ot, oh, cb, ct, B, H, number, T, S,
                window, total, each, V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOME: tl.constexpr,
                MASKED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Stats (8, B, H, number). Rows of the batch are counted through: n = b * number + r. MASKED: rows have their
    number of keys in Count (B, H, number), some do not count, and a weight on the first key below 0 says that a row may
    not look there."""
    h = tl.program_id(0)
    part = tl.program_id(1)
    Sums += h * sh
    last = (B * number).to(tl.int32)
    total = total.to(tl.int64)
    if part == 0:
        entropies = tl.zeros([BLOCK], tl.float64)
        masses, tops, shares, distances = entropies, entropies, entropies, entropies
        selves, ratios, sinks = entropies, entropies, entropies
        all_rows = tl.zeros([BLOCK], tl.int32)
        wide_rows, first_rows, odd = all_rows, all_rows, all_rows
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, last, BLOCK):
            n = start + tl.arange(0, BLOCK)
            shown = n < last
            r = n % number
            b = (n // number).to(tl.int64)
            row = Stats + (b * H + h) * number + r
            i = r
            if SOME:
                i = tl.load(Rows + r, mask=shown, other=0).to(tl.int32)
            lse = tl.load(row, mask=shown, other=0.0)
            entropy = tl.load(row + total, mask=shown, other=0.0)
            top = tl.load(row + 2 * total, mask=shown, other=float("-inf"))
            mass = tl.load(row + 3 * total, mask=shown, other=0.0)
            squares = tl.load(row + 4 * total, mask=shown, other=1.0)
            distance = tl.load(row + 5 * total, mask=shown, other=0.0)
            sink = tl.load(row + 6 * total, mask=shown, other=0.0)
            own = tl.load(row + 7 * total, mask=shown, other=0.0)
            if MASKED:
                visible = tl.load(Count + (b * H + h) * number + r, mask=shown, other=0)
                shown &= (tl.load(Counted + b * cb + i.to(tl.int64) * ct, mask=shown, other=0) != 0) & (visible > 0)
                look = (sink < 0) == 0  # NaN looks
            else:
                at = i + (S - T)
                visible = tl.zeros([BLOCK], tl.int32) + S
                if CAUSAL:
                    visible = at + 1
                look = shown
                if WINDOW:
                    if not CAUSAL:
                        visible = tl.minimum(at + window, S)
                    visible -= tl.maximum(at - window + 1, 0)
                    look = at < window
            wide = visible > 1
            all_rows += shown.to(tl.int32)
            wide_rows += (shown & wide).to(tl.int32)
            first_rows += (shown & look).to(tl.int32)
            entropies += tl.where(shown, entropy, 0.0).to(tl.float64)
            masses += tl.where(shown, mass, 0.0).to(tl.float64)
            tops += tl.where(shown, tl.exp(top - lse), 0.0).to(tl.float64)
            least = 1.1754943508222875e-38  # NaN stays
            shares += tl.where(shown, 1 / tl.where(squares < least, least, squares), 0.0).to(tl.float64)
            distances += tl.where(shown, distance, 0.0).to(tl.float64)
            sinks += tl.where(shown & look, sink, 0.0).to(tl.float64)
            selves += tl.where(shown, own, 0.0).to(tl.float64)
            ratio = entropy / tl.log(tl.maximum(visible, 2).to(tl.float32))
            ratios += tl.where(shown & wide, ratio, 0.0).to(tl.float64)
            odd |= (shown & (top != top)).to(tl.int32)
            largest = tl.where(shown, tl.maximum(largest, top), largest)
        tl.store(Sums, tl.load(Sums) + 1)
        tl.store(Sums + 1, tl.load(Sums + 1) + tl.sum(all_rows, 0).to(tl.float64))
        tl.store(Sums + 2, tl.load(Sums + 2) + tl.sum(wide_rows, 0).to(tl.float64))
        tl.store(Sums + 3, tl.load(Sums + 3) + tl.sum(first_rows, 0).to(tl.float64))
        tl.atomic_add(Sums + 4, tl.sum(entropies, 0))
        tl.atomic_add(Sums + 5, tl.sum(masses, 0))
        tl.atomic_add(Sums + 6, tl.sum(tops, 0))
        tl.atomic_add(Sums + 7, tl.sum(shares, 0))
        tl.atomic_add(Sums + 8, tl.sum(distances, 0))
        tl.atomic_add(Sums + 9, tl.sum(selves, 0))
        tl.atomic_add(Sums + 10, tl.sum(ratios, 0))
        tl.atomic_add(Sums + 11, tl.sum(sinks, 0))
        before = tl.load(Maxima + h * mh)
        new = tl.maximum(before, tl.max(largest, 0))
        new = tl.where((tl.max(odd, 0) > 0) | (before != before), float("nan"), new)
        tl.store(Maxima + h * mh, new)
    elif V > 0:
        v = tl.arange(0, BLOCK_V)
        none = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
        begin = (part - 1) * each
        for start in range(begin, tl.minimum(begin + each, last), BLOCK_R):
            n = start + tl.arange(0, BLOCK_R)
            shown = n < last
            b = (n // number).to(tl.int64)
            i = n % number
            row = Stats + (b * H + h) * number + i
            if SOME:
                i = tl.load(Rows + i, mask=shown, other=0).to(tl.int32)
            i = i.to(tl.int64)
            if MASKED:
                shown &= tl.load(Counted + b * cb + i * ct, mask=shown, other=0) != 0
                shown &= tl.load(row, mask=shown, other=0.0) != float("-inf")
            x = Output + b[:, None] * ob + i[:, None] * ot + h * oh + v[None, :]
            none += tl.load(x, mask=shown[:, None] & (v < V)[None, :], other=0.0).to(tl.float32) * 0.0
        nothing = tl.sum(tl.sum(none, 1), 0)
        if nothing != nothing:
            for column in tl.static_range(4, 16):
                tl.atomic_add(Sums + column, nothing.to(tl.float64))


# ---- weight of each row on one key


KEY_WEIGHT = 6  # column of the statistics: weight on the first keys


def put_key_weights(q: Tensor, k: Tensor, terms: Terms, rows: Tensor | None, at: Tensor, stats: Tensor) -> None:
    """Put into column 6 of the statistics (8, B, H, R) the weight on the key `at` (B, T) of each row, or -1 where the
    row may not look at it; a negative key is none. The call is one that `prepare_call` returned.
    """
    (B, H, _, D), number = q.shape, stats.shape[-1]
    tensors = (q, k, stats, at, rows, terms.documents, terms.padding, terms.mask, terms.bias, terms.alibi)
    key = (
        "sink",
        terms.scale,
        terms.causal,
        terms.window,
        terms.softcap,
        q.device,
        *(tensor_layout(x) for x in tensors),
    )
    if key in LAUNCHES:
        kernel, grid, rest = LAUNCHES[key]
        launch_compiled(kernel, grid, (*tensors, *rest))
        return
    arguments, fixed = launch_arguments(q, k, terms)
    strides, (heads, group, _, _, *sizes) = arguments[5:17], arguments[17:]
    wide = max(16, triton.next_power_of_2(D))
    fixed = {name: x for name, x in fixed.items() if name != "PRECISION"}
    fixed |= {"SOME": rows is not None, "BLOCK": max(16, 4096 // wide), "BLOCK_D": wide, "num_warps": 4}
    grid = (triton.cdiv(number, fixed["BLOCK"]) * B * H, 1, 1)
    rest = [*strides, *at.stride(), heads, group, *sizes, number, KEY_WEIGHT * B * H * number]
    made = sink_kernel[grid](*tensors, *rest, **fixed)
    keep_kernel(key, sink_kernel, made, grid, rest, len(tensors), fixed)


@triton.jit(do_not_specialize=["number", "skipped"])
def sink_kernel(Q, K, Stats, At, Rows, Doc, Pad, Mask, Bias, Alibi, qb, qh, qt, kb, kh, kt, mb, mh, mt, bb, bh, bt, fb,
                ft, H, GROUP, T, S, scale, cap, window, number, skipped, D: tl.constexpr, CAUSAL: tl.constexpr,
                WINDOW: tl.constexpr, CAP: tl.constexpr, PAD: tl.constexpr, DOC: tl.constexpr, MASK: tl.constexpr,
                BIAS: tl.constexpr, ALIBI: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    blocks = tl.cdiv(number, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // H, head % H
    r = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = r < number
    i = r
    if SOME:
        i = tl.load(Rows + r, mask=inside, other=0).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    far = i.to(tl.int64)
    j = tl.load(At + b * fb + far * ft, mask=inside, other=-1).to(tl.int32)
    there = inside & (j >= 0) & (j < S)
    j = tl.where(there, j, 0)
    q = load_rows(Q + b * qb + h * qh + far[:, None] * qt + d[None, :], d, inside, D, BLOCK_D, True)
    k = load_rows(
        K + b * kb + (h // GROUP) * kh + j.to(tl.int64)[:, None] * kt + d[None, :], d, there, D, BLOCK_D, True
    )
    x = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    x, seen = logit_terms(x, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
                          CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI, True)  # fmt: skip
    if BIAS:
        seen = seen & (x > EMPTY)
    lse = tl.load(Stats + head * number + r, mask=inside, other=0.0)
    weight = tl.exp2(x * log2_unit(scale, CAP, BIAS, ALIBI) - lse * LOG2E)
    weight = tl.where(lse == float("-inf"), 0.0, weight)
    tl.store(Stats + skipped.to(tl.int64) + head * number + r, tl.where(there & seen, weight, -1.0), mask=inside)
