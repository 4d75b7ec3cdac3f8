"""Attention in Triton whose weights are a polynomial of q.k, divided by their sum over a row: no T x S matrix.

With x = scale q_i.k_j, of q / |q| and k / |k| where UNIT says so, for every query i and key j in view:
    p = (1 + x)^2 + 1  or  1 + x,  out_i = sum p v / sum p,  dx = p' (do.v_j - do.out_i) / sum p,  p' = 2 (1 + x) or 1
The first is twice the Taylor polynomial 1 + x + x^2 / 2; the factor cancels. There is no exponential to wait for, so
arithmetic on tiles counts: scale and lengths are in q and k before the products, and 1 / sum p in do. Weights are
computed again for the gradient, once with rows of queries (dq) and once with rows of keys (dk, dv).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.triton_parts import key_span, load_rows
from locater_lab.mechanisms.kernels.triton_tiles import (
    blocks_of,
    in_lanes,
    inverse_length,
    launch_sizes,
    program_of,
    seen_keys,
    through_length,
    tile_width,
)


@triton.jit
def _weight(y, ORDER: tl.constexpr):
    """Of y = 1 + x."""
    return y * y + 1 if ORDER == 2 else y


@triton.jit
def _normalise(K, Unit, Inverse, kb, kh, kt, HEADS, S, D: tl.constexpr, BLOCK_N: tl.constexpr,
               BLOCK_D: tl.constexpr):  # fmt: skip
    """k / |k| (B, K, S, D), and 1 / |k|."""
    b, h, head, block = program_of(HEADS, tl.cdiv(S, BLOCK_N))
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = load_rows(K + b * kb + h * kh + j[:, None].to(tl.int64) * kt + d[None, :], d, j < S, D, BLOCK_D, True)
    inverse = inverse_length(k, True)
    tl.store(Inverse + head * S + j, inverse, mask=j < S)
    unit = (k.to(tl.float32) * inverse[:, None]).to(k.dtype)
    tl.store(Unit + (head * S + j[:, None]) * D + d[None, :], unit, mask=(j < S)[:, None] & (d < D)[None, :])


@triton.jit
def _forward(Q, K, V, Pad, Out, Total, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, H, GROUP, T, S, scale,
             D: tl.constexpr, E: tl.constexpr, ORDER: tl.constexpr, UNIT: tl.constexpr, CAUSAL: tl.constexpr,
             PAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    b, h, head, block = program_of(H, tl.cdiv(T, BLOCK_M))
    block = tl.cdiv(T, BLOCK_M) - 1 - block  # the longest rows of a causal mask start first
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    q = (q.to(tl.float32) * (inverse_length(q, UNIT) * scale)[:, None]).to(q.dtype)
    keys = K + b * kb + (h // GROUP) * kh + n[:, None].to(tl.int64) * kt + d[None, :]
    values = V + b * vb + (h // GROUP) * vh + n[:, None].to(tl.int64) * vt + e[None, :]
    s = tl.zeros([BLOCK_M, LANES], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    low, high, plain = key_span(block, T, S, 0, CAUSAL, False, PAD, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):  # first tiles whose keys are all in view
        for start in range(plain if EDGE else low, high if EDGE else plain, BLOCK_N):
            at = tl.cast(start, tl.int64)
            k = load_rows(keys + at * kt, d, start + n < S, D, BLOCK_D, EDGE)
            v = load_rows(values + at * vt, e, start + n < S, E, BLOCK_E, EDGE)
            p = _weight(tl.dot(q, tl.trans(k), input_precision=PRECISION) + 1, ORDER)
            if EDGE:
                p = tl.where(seen_keys(i[:, None], (start + n)[None, :], b, h, T, S, Pad, pb, ph, CAUSAL, PAD), p, 0.0)
            s += tl.sum(in_lanes(p, LANES), 2)
            out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
    total = tl.sum(s, 1)
    shown = total > 0
    inverse = tl.where(shown, 1 / tl.where(shown, total, 1.0), 0.0)  # a row that sees nothing, and its gradient: zero
    tl.store(Total + head * T + i, inverse, mask=i < T)
    where = Out + (head * T + i[:, None]) * E + e[None, :]
    tl.store(where, (out * inverse[:, None]).to(Out.dtype.element_ty), mask=(i < T)[:, None] & (e < E)[None, :])


@triton.jit
def _queries(Q, K, V, Pad, Do, Out, Total, Delta, Ready, Scaled, Dq, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, H,
             GROUP, T, S, scale, D: tl.constexpr, E: tl.constexpr, ORDER: tl.constexpr, UNIT: tl.constexpr,
             CAUSAL: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_E: tl.constexpr):  # fmt: skip
    """dq; and for `_keys` the queries that x is of, do / sum p and do.out / sum p (FOLDED), or do.out alone."""
    b, h, head, block = program_of(H, tl.cdiv(T, BLOCK_M))
    block = tl.cdiv(T, BLOCK_M) - 1 - block
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    raw = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    inverse = inverse_length(raw, UNIT)
    q = (raw.to(tl.float32) * (inverse * scale)[:, None]).to(raw.dtype)
    of_q = (head * T + i[:, None]) * D + d[None, :]
    of_out = (head * T + i[:, None]) * E + e[None, :]
    tl.store(Ready + of_q, q, mask=(i < T)[:, None] & (d < D)[None, :])
    do = load_rows(Do + of_out, e, i < T, E, BLOCK_E, True)
    out = load_rows(Out + of_out, e, i < T, E, BLOCK_E, True)
    total = tl.load(Total + head * T + i, mask=i < T, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if FOLDED:
        do = (do.to(tl.float32) * total[:, None]).to(do.dtype)
        delta = delta * total
        tl.store(Scaled + of_out, do, mask=(i < T)[:, None] & (e < E)[None, :])
    tl.store(Delta + head * T + i, delta, mask=i < T)
    keys = K + b * kb + (h // GROUP) * kh + n[:, None].to(tl.int64) * kt + d[None, :]
    values = V + b * vb + (h // GROUP) * vh + n[:, None].to(tl.int64) * vt + e[None, :]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, high, plain = key_span(block, T, S, 0, CAUSAL, False, PAD, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):
        for start in range(plain if EDGE else low, high if EDGE else plain, BLOCK_N):
            at = tl.cast(start, tl.int64)
            k = load_rows(keys + at * kt, d, start + n < S, D, BLOCK_D, EDGE)
            v = load_rows(values + at * vt, e, start + n < S, E, BLOCK_E, EDGE)
            dx = tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None]
            if ORDER == 2:
                dx = dx * (tl.dot(q, tl.trans(k), input_precision=PRECISION) + 1)
            if EDGE:
                dx = tl.where(
                    seen_keys(i[:, None], (start + n)[None, :], b, h, T, S, Pad, pb, ph, CAUSAL, PAD), dx, 0.0
                )
            dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = dq * (scale * ORDER)
    if not FOLDED:
        dq = dq * total[:, None]
    dq = through_length(dq, raw, inverse, UNIT)
    tl.store(Dq + of_q, dq.to(Dq.dtype.element_ty), mask=(i < T)[:, None] & (d < D)[None, :])


@triton.jit
def _keys(Q, K, V, Inverse, Pad, Do, Total, Delta, Dk, Dv, kb, kh, kt, vb, vh, vt, pb, ph, H, GROUP, T, S,
          D: tl.constexpr, E: tl.constexpr, ORDER: tl.constexpr, UNIT: tl.constexpr, CAUSAL: tl.constexpr,
          PAD: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Tiles lie with keys in rows, so that both products take them as they are. One query head's part of dk and dv."""
    b, h, head, block = program_of(H, tl.cdiv(S, BLOCK_N))
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    key = (b * kb + (h // GROUP) * kh) + j[:, None].to(tl.int64) * kt
    k = load_rows(K + key + d[None, :], d, j < S, D, BLOCK_D, True)
    value = (b * vb + (h // GROUP) * vh) + j[:, None].to(tl.int64) * vt
    v = load_rows(V + value + e[None, :], e, j < S, E, BLOCK_E, True)
    queries = Q + (head * T + r[:, None]) * D + d[None, :]
    grads = Do + (head * T + r[:, None]) * E + e[None, :]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    low = 0
    middle = 0  # from here on every row sees every key of the block
    if CAUSAL:
        low = tl.maximum(0, block * BLOCK_N - (S - T)) // BLOCK_M * BLOCK_M
        middle = tl.cdiv(tl.maximum(0, (block + 1) * BLOCK_N - 1 - (S - T)), BLOCK_M) * BLOCK_M
    plain = T // BLOCK_M * BLOCK_M  # rows past the end are masked
    middle = tl.minimum(middle, T)
    if PAD:
        middle = T
    for PART in tl.static_range(3):  # along the edge of the mask, without one, and along the end
        for start in range(low if PART == 0 else middle if PART == 1 else tl.maximum(plain, middle),
                           middle if PART == 0 else plain if PART == 1 else T, BLOCK_M):  # fmt: skip
            i = start + r
            at = tl.cast(start, tl.int64)
            q = load_rows(queries + at * D, d, i < T, D, BLOCK_D, PART != 1)
            do = load_rows(grads + at * E, e, i < T, E, BLOCK_E, PART != 1)
            delta = tl.load(Delta + head * T + i, mask=i < T, other=0.0)[None, :]
            y = tl.dot(k, tl.trans(q), input_precision=PRECISION) + 1
            dx = tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta
            p = _weight(y, ORDER)
            if not FOLDED:
                total = tl.load(Total + head * T + i, mask=i < T, other=0.0)[None, :]
                p = p * total
                dx = dx * total
            if ORDER == 2:
                dx = dx * y
            if PART != 1:
                seen = seen_keys(i[None, :], j[:, None], b, h, T, S, Pad, pb, ph, CAUSAL, PAD)
                p = tl.where(seen, p, 0.0)
                dx = tl.where(seen, dx, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
    where = Dk + (head * S + j[:, None]) * D + d[None, :]
    dk = dk * ORDER
    if UNIT:
        x = k.to(tl.float32)
        inverse = tl.load(Inverse + (b * (H // GROUP) + h // GROUP) * S + j, mask=j < S, other=0.0)
        dk = (dk - x * tl.sum(x * dk, 1)[:, None]) * inverse[:, None]
    tl.store(where, dk.to(Dk.dtype.element_ty), mask=(j < S)[:, None] & (d < D)[None, :])
    where = Dv + (head * S + j[:, None]) * E + e[None, :]
    tl.store(where, dv.to(Dv.dtype.element_ty), mask=(j < S)[:, None] & (e < E)[None, :])


LANES = 4


def forward(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, scale: float, order: int, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, 1 / sum p of every row (B, H, T), and with `unit` k / |k| and 1 / |k| (B, K, S): what the gradient
    needs.
    """
    B, H, T, D = q.shape
    K, S, E = v.shape[1:]
    out = torch.empty(B, H, T, E, dtype=v.dtype, device=q.device)
    total = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    ready = torch.empty(B, K, S if unit else 0, D, dtype=k.dtype, device=q.device)
    inverse = torch.empty(B, K, S if unit else 0, dtype=torch.float32, device=q.device)
    if unit:
        k = k if k.stride(-1) == 1 else k.contiguous()
        _normalise[(blocks_of(S, 64) * B * K,)](
            k, ready, inverse, *k.stride()[:3], K, S, D=D, BLOCK_N=64, BLOCK_D=tile_width(D)
        )
    (q, k, v, keys), strides, numbers, flags = _launch(q, ready if unit else k, v, padding, order, unit, causal)
    size = launch_sizes(q, v, TILES["forward"])
    # where a mask is loaded, the compiler may lay tiles out as it does masks, not as a tensor core has them
    lanes = LANES if size["BLOCK_M"] >= 64 and keys is None else 1
    if T:
        _forward[(blocks_of(T, size["BLOCK_M"]) * B * H,)](
            q, k, v, keys, out, total, *strides, *numbers, scale, **flags, **size, LANES=lanes
        )
    return out, total, ready, inverse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    ready: Tensor,
    inverse: Tensor,
    grad: Tensor,
    padding: Tensor | None,
    scale: float,
    order: int,
    unit: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    B, H, T, D = q.shape
    K, S, E = v.shape[1:]
    grad = grad.contiguous()
    # half precision has the range of small numbers where it is bfloat16: do / sum p may vanish in float16
    folded = q.dtype != torch.float16
    delta = torch.empty_like(total)
    dq, of_x = (torch.empty(B, H, T, D, dtype=q.dtype, device=q.device) for _ in range(2))
    scaled = torch.empty_like(grad) if folded else grad
    kind = k.dtype if H == K else torch.float32  # heads that share keys are added below
    dk = torch.empty(B, H, S, D, dtype=kind, device=q.device)
    dv = torch.empty(B, H, S, E, dtype=kind, device=q.device)
    (q, k, v, keys), strides, numbers, flags = _launch(q, ready if unit else k, v, padding, order, unit, causal)
    flags["FOLDED"] = folded
    if T:
        size = launch_sizes(q, v, TILES["queries"])
        _queries[(blocks_of(T, size["BLOCK_M"]) * B * H,)](
            q, k, v, keys, grad, out, total, delta, of_x, scaled, dq, *strides, *numbers, scale, **flags, **size
        )
    size = launch_sizes(q, v, TILES["keys"])
    _keys[(blocks_of(S, size["BLOCK_N"]) * B * H,)](
        of_x, k, v, inverse, keys, scaled, total, delta, dk, dv, *strides[3:], *numbers, **flags, **size
    )
    if H != K:
        dk, dv = (x.unflatten(1, (K, -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


def _launch(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, order: int, unit: bool, causal: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], list[int], list[int], dict[str, Any]]:
    """Tensors as the kernels read them, strides, numbers, and compile-time switches."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    H, T = q.shape[1:3]
    keys = None if padding is None else padding.to(torch.int8).contiguous()
    apart = [0, 0] if keys is None else [0 if keys.shape[axis] == 1 else keys.stride(axis) for axis in (0, 1)]
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *apart]
    flags = {
        "D": q.shape[3],
        "E": v.shape[3],
        "ORDER": order,
        "UNIT": unit,
        "CAUSAL": causal,
        "PAD": keys is not None,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }
    return (q, k, v, keys), strides, [H, H // k.shape[1], T, k.shape[2]], flags


# rows of queries, keys, warps, stages: up to 64 channels, the fastest of four or five on an H200, and above
TILES = {
    "forward": ((128, 64, 4, 3), (128, 64, 8, 2)),
    "queries": ((64, 128, 4, 3), (64, 64, 4, 2)),
    "keys": ((64, 64, 4, 2), (64, 64, 4, 2)),
}
