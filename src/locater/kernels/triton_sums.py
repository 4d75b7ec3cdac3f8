"""Sums over the rows of each head, added to accumulators: one launch for a dozen columns and a look at the output.

Sums of columns are float64. Of the programs of a head the first adds up its rows; the others read parts of the head's
output and add NaN where they find a number that is not finite, so the order in which programs end changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.terms import Terms
from locater.kernels.triton_kernels import rows_of_statistics
from locater.kernels.triton_launch import LAUNCHES, remember

PART = 1 << 15  # numbers of a head's output that one program reads


def add_sums(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    rows: Tensor | None,
    output: Tensor | None,
    sums: Tensor,
    maxima: Tensor,
    stats: Tensor | None = None,
) -> None:
    """Add the statistics of a call without masks but causal and window, of all rows or of those at `rows` (R,), to
    `sums` (H, columns) float64, in the order of `head_sums.COLUMNS`, and to `maxima` (H, 1) float32.

    A head whose `output` (B, T, H, V) is not finite in one of the rows gets NaN for `sums[:, SPOILED]`.
    """
    (B, H, T, _), S = q.shape, k.shape[-2]
    rows = None if rows is None else rows.contiguous()
    if stats is None or rows is not None:
        stats, _ = rows_of_statistics(q, k, terms, True, False, rows)
    number = stats.shape[-1]
    V, strides = (0, (0, 0, 0, 0)) if output is None else (output.shape[-1], output.stride())
    shape = ("sums", B, H, T, S, number, terms.causal, terms.window, V, strides, sums.stride(0), rows is None)
    address = tuple(0 if x is None else x.data_ptr() % 16 for x in (output, rows, sums, maxima))
    key = (*shape, *address, None if output is None else output.dtype, q.device)
    if key in LAUNCHES:
        kernel, grid, rest = LAUNCHES[key]
        kernel[grid](stats, rows, output, sums, maxima, *rest)
        return
    wide = max(16, triton.next_power_of_2(V))
    tile = max(1, 4096 // wide)
    each = max(tile, PART // wide // tile * tile)  # rows that one program reads
    grid = (H, 1 + (triton.cdiv(B * number, each) if V else 0), 1)
    rest = [sums.stride(0), maxima.stride(0), *strides[:3], B, H, number, T, S, terms.window or 0, B * H * number, each]
    fixed = {"V": V, "CAUSAL": terms.causal, "WINDOW": terms.window is not None, "SOME": rows is not None}
    fixed |= {"BLOCK": 512, "BLOCK_R": tile, "BLOCK_V": wide, "num_warps": 4}
    made = sums_kernel[grid](stats, rows, output, sums, maxima, *rest, **fixed)
    remember(key, sums_kernel, made, grid, rest, 5, fixed)


@triton.jit
def _add(Sums, column: tl.constexpr, values):
    tl.atomic_add(Sums + column, tl.sum(values, 0))


@triton.jit(do_not_specialize=["B", "number", "total", "each"])
def sums_kernel(Stats, Rows, Output, Sums, Maxima, sh, mh, ob, ot, oh, B, H, number, T, S, window, total, each,
                V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
                BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Stats (8, B, H, number). Rows of the batch are counted through: n = b * number + r."""
    h = tl.program_id(0)
    part = tl.program_id(1)
    Sums += h * sh
    last = (B * number).to(tl.int32)
    total = total.to(tl.int64)
    if part == 0:
        entropies = tl.zeros([BLOCK], tl.float64)
        masses, tops, shares, distances = entropies, entropies, entropies, entropies
        selves, ratios, sinks = entropies, entropies, entropies
        wide_rows = tl.zeros([BLOCK], tl.int32)
        first_rows = tl.zeros([BLOCK], tl.int32)
        odd = tl.zeros([BLOCK], tl.int32)
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, last, BLOCK):
            n = start + tl.arange(0, BLOCK)
            inside = n < last
            r = n % number
            row = Stats + ((n // number).to(tl.int64) * H + h) * number + r
            i = r
            if SOME:
                i = tl.load(Rows + r, mask=inside, other=0).to(tl.int32)
            at = i + (S - T)
            high = tl.zeros([BLOCK], tl.int32) + S
            low = tl.zeros([BLOCK], tl.int32)
            if CAUSAL:
                high = at + 1
            if WINDOW:
                low = tl.maximum(at - window + 1, 0)
                if not CAUSAL:
                    high = tl.minimum(at + window, S)
            lse = tl.load(row, mask=inside, other=0.0)
            entropy = tl.load(row + total, mask=inside, other=0.0)
            top = tl.load(row + 2 * total, mask=inside, other=float("-inf"))
            squares = tl.load(row + 4 * total, mask=inside, other=float("inf"))
            entropies += entropy.to(tl.float64)
            masses += tl.load(row + 3 * total, mask=inside, other=0.0).to(tl.float64)
            tops += tl.exp(top - lse).to(tl.float64)
            shares += (1 / tl.where(squares < 1.1754943508222875e-38, 1.1754943508222875e-38, squares)).to(tl.float64)
            distances += tl.load(row + 5 * total, mask=inside, other=0.0).to(tl.float64)
            sinks += tl.load(row + 6 * total, mask=inside, other=0.0).to(tl.float64)
            selves += tl.load(row + 7 * total, mask=inside, other=0.0).to(tl.float64)
            wide = high - low > 1
            ratio = entropy / tl.log(tl.maximum(high - low, 2).to(tl.float32))
            ratios += tl.where(wide, ratio, 0.0).to(tl.float64)
            wide_rows += (inside & wide).to(tl.int32)
            first_rows += (inside & (low == 0)).to(tl.int32)
            odd |= (top != top).to(tl.int32)
            largest = tl.maximum(largest, top)
        tl.store(Sums, tl.load(Sums) + 1)
        tl.store(Sums + 1, tl.load(Sums + 1) + last.to(tl.float64))
        tl.store(Sums + 2, tl.load(Sums + 2) + tl.sum(wide_rows, 0).to(tl.float64))
        tl.store(Sums + 3, tl.load(Sums + 3) + tl.sum(first_rows, 0).to(tl.float64))
        _add(Sums, 4, entropies)
        _add(Sums, 5, masses)
        _add(Sums, 6, tops)
        _add(Sums, 7, shares)
        _add(Sums, 8, distances)
        _add(Sums, 9, selves)
        _add(Sums, 10, ratios)
        _add(Sums, 11, sinks)
        before = tl.load(Maxima + h * mh)
        new = tl.maximum(before, tl.max(largest, 0))
        new = tl.where((tl.max(odd, 0) > 0) | (before != before), float("nan"), new)
        tl.store(Maxima + h * mh, new)
    elif V > 0:
        v = tl.arange(0, BLOCK_V)
        none = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
        first = (part - 1) * each
        for start in range(first, tl.minimum(first + each, last), BLOCK_R):
            n = start + tl.arange(0, BLOCK_R)
            inside = n < last
            i = n % number
            if SOME:
                i = tl.load(Rows + i, mask=inside, other=0).to(tl.int32)
            x = Output + (n // number).to(tl.int64)[:, None] * ob + i.to(tl.int64)[:, None] * ot + h * oh + v[None, :]
            none += tl.load(x, mask=inside[:, None] & (v < V)[None, :], other=0.0).to(tl.float32) * 0.0
        nothing = tl.sum(tl.sum(none, 1), 0)
        if nothing != nothing:
            for column in tl.static_range(4, 16):
                tl.atomic_add(Sums + column, nothing.to(tl.float64))
