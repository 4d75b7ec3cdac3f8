"""The weight of each row on one key of its own, such as the first of its sequence: a product, and no loop over keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.terms import Terms
from locater.kernels.triton_launch import LAUNCHES, keep_kernel, launch_arguments, tensor_layout
from locater.kernels.triton_parts import EMPTY, LOG2E, load_rows
from locater.kernels.triton_rows import _terms, _unit
from locater.torch_private import launch_compiled

COLUMN = 6  # of the statistics: weight on the first keys


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
    rest = [*strides, *at.stride(), heads, group, *sizes, number, COLUMN * B * H * number]
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
    x, seen = _terms(x, i, j, b, h, T, S, scale, cap, window, Doc, Pad, Mask, Bias, Alibi, mb, mh, mt, bb, bh, bt,
                     CAUSAL, WINDOW, CAP, PAD, DOC, MASK, BIAS, ALIBI, True)  # fmt: skip
    if BIAS:
        seen = seen & (x > EMPTY)
    lse = tl.load(Stats + head * number + r, mask=inside, other=0.0)
    weight = tl.exp2(x * _unit(scale, CAP, BIAS, ALIBI) - lse * LOG2E)
    weight = tl.where(lse == float("-inf"), 0.0, weight)
    tl.store(Stats + skipped.to(tl.int64) + head * number + r, tl.where(there & seen, weight, -1.0), mask=inside)
