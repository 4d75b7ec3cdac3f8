"""Doubly normalized attention in Triton, alone or mixed with softmax attention: no T x S matrix.

With E = scale q.k and L_j = log sum_i exp(E_ij) over the queries that count:
    A_ij = exp(E_ij - L_j - r_i), r_i = log sum_j exp(E_ij - L_j);   W_ij = exp(E_ij - l_i), the softmax
    out = u A v + (1 - u) W v
Logarithms are in units of log 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.triton_parts import EMPTY, LOG2E, load_rows
from locater_lab.mechanisms.kernels.triton_tiles import blocks_of, in_lanes, launch_sizes, program_of

LEAST = tl.constexpr(-1.0e15)  # where maxima start: below any logit, and so far above EMPTY that 2^(EMPTY - LEAST) is 0


@triton.jit
def shown_tokens(Mask, mb, mh, b, h, at, length, MASKED: tl.constexpr):
    """Which of the tokens `at` there are, and the mask (b, h, length) shows."""
    inside = at < length
    if MASKED:
        inside = inside & (tl.load(Mask + b * mb + h * mh + at, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _columns(Q, K, Rows, Lse, qb, qh, qt, kb, kh, kt, rb, H, GROUP, T, S, scale, D: tl.constexpr, ROWS: tl.constexpr,
             PRECISION: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_D: tl.constexpr):  # fmt: skip
    """L of a block of keys; 0 where no query counts. A sum for each lane, so that threads exchange nothing."""
    b, h, head, block = program_of(H, tl.cdiv(S, BLOCK_M))
    j = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = load_rows(
        K + b * kb + (h // GROUP) * kh + j[:, None].to(tl.int64) * kt + d[None, :], d, j < S, D, BLOCK_D, True
    )
    queries = Q + b * qb + h * qh + n[:, None].to(tl.int64) * qt + d[None, :]
    m = tl.full([BLOCK_M, LANES], LEAST, tl.float32)
    s = tl.zeros([BLOCK_M, LANES], tl.float32)
    unit = scale * LOG2E
    plain = T // BLOCK_N * BLOCK_N
    if ROWS:
        plain = 0
    for EDGE in tl.static_range(2):
        for start in range(plain if EDGE else 0, T if EDGE else plain, BLOCK_N):
            q = load_rows(queries + tl.cast(start, tl.int64) * qt, d, start + n < T, D, BLOCK_D, EDGE)
            x = tl.dot(k, tl.trans(q), input_precision=PRECISION) * unit
            if EDGE:
                x = tl.where(shown_tokens(Rows, rb, 0, b, h, start + n, T, ROWS)[None, :], x, EMPTY)
            x = in_lanes(x, LANES)
            new = tl.maximum(m, tl.max(x, 2))
            s = s * tl.exp2(m - new) + tl.sum(tl.exp2(x - new[:, :, None]), 2)
            m = new
    most = tl.max(m, 1)
    total = tl.sum(s * tl.exp2(m - most[:, None]), 1)
    tl.store(Lse + head * S + j, tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), 0.0), mask=j < S)


@triton.jit
def _tile(q, keys, values, Pad, Lse, pb, ph, b, h, head, start, n, d, e, kt, vt, S, unit, D: tl.constexpr,
          E: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
          EDGE: tl.constexpr):  # fmt: skip
    """x = E and y = E - L of a block of keys, EMPTY where a key is not seen, and its values."""
    at = tl.cast(start, tl.int64)
    k = load_rows(keys + at * kt, d, start + n < S, D, BLOCK_D, EDGE)
    v = load_rows(values + at * vt, e, start + n < S, E, BLOCK_E, EDGE)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * unit
    y = x - tl.load(Lse + head * S + start + n, mask=start + n < S, other=0.0)[None, :]
    if EDGE:
        seen = shown_tokens(Pad, pb, ph, b, h, start + n, S, PAD)[None, :]
        x = tl.where(seen, x, EMPTY)
        y = tl.where(seen, y, EMPTY)
    return x, y, v


@triton.jit
def _softmax_step(y, v, m, s, out, PRECISION: tl.constexpr, EDGE: tl.constexpr):
    """A block of logits and values added to a softmax with a running maximum m."""
    new = tl.maximum(m, tl.max(y, 1))
    p = tl.exp2(y - new[:, None])
    if EDGE:  # of a row that has seen nothing, the maximum is EMPTY too
        p = tl.where(y > EMPTY, p, 0.0)
    alpha = tl.exp2(m - new)
    s = alpha * s + tl.sum(p, 1)
    return new, s, tl.dot(p.to(v.dtype), v, out * alpha[:, None], input_precision=PRECISION)


@triton.jit
def _forward(Q, K, V, Pad, Lse, Mix, Out, First, Difference, R, L, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, H, GROUP,
             T, S, scale, D: tl.constexpr, E: tl.constexpr, MIXED: tl.constexpr, PAD: tl.constexpr,
             PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, block = program_of(H, tl.cdiv(T, BLOCK_M))
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    keys = K + b * kb + (h // GROUP) * kh + n[:, None].to(tl.int64) * kt + d[None, :]
    values = V + b * vb + (h // GROUP) * vh + n[:, None].to(tl.int64) * vt + e[None, :]
    unit = scale * LOG2E
    m = tl.full([BLOCK_M], EMPTY, tl.float32)
    s = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    m2 = tl.full([BLOCK_M], EMPTY, tl.float32)
    s2 = tl.zeros([BLOCK_M], tl.float32)
    out2 = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    plain = S // BLOCK_N * BLOCK_N
    if PAD:
        plain = 0
    for EDGE in tl.static_range(2):
        for start in range(plain if EDGE else 0, S if EDGE else plain, BLOCK_N):
            x, y, v = _tile(q, keys, values, Pad, Lse, pb, ph, b, h, head, start, n, d, e, kt, vt, S, unit, D, E, PAD,
                            PRECISION, BLOCK_D, BLOCK_E, EDGE)  # fmt: skip
            m, s, out = _softmax_step(y, v, m, s, out, PRECISION, EDGE)
            if MIXED:
                m2, s2, out2 = _softmax_step(x, v, m2, s2, out2, PRECISION, EDGE)
    shown = s > 0
    inside = (i < T)[:, None] & (e < E)[None, :]
    where = (head * T + i[:, None]) * E + e[None, :]
    out = out / tl.where(shown, s, 1.0)[:, None]
    tl.store(R + head * T + i, tl.where(shown, m + tl.log2(tl.where(shown, s, 1.0)), -EMPTY), mask=i < T)
    if MIXED:
        out2 = out2 / tl.where(shown, s2, 1.0)[:, None]
        tl.store(L + head * T + i, tl.where(shown, m2 + tl.log2(tl.where(shown, s2, 1.0)), -EMPTY), mask=i < T)
        tl.store(First + where, out.to(First.dtype.element_ty), mask=inside)
        tl.store(Difference + where, (out - out2).to(Difference.dtype.element_ty), mask=inside)
        u = tl.load(Mix + h)
        out = u * out + (1 - u) * out2
    tl.store(Out + where, out.to(Out.dtype.element_ty), mask=inside)


def forward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, rows: Tensor | None, mix: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    """The output, A v and A v - W v (of no size without `mix`), and L (B, H, S), r and l (B, H, T) in units of log 2.

    The difference is kept because the gradient of u is made of it: it has few digits left where both are rounded.
    """
    B, H, T, _ = q.shape
    S, E = v.shape[2:]
    out = torch.empty(B, H, T, E, dtype=v.dtype, device=q.device)
    first, difference = (torch.empty_like(out) if mix is not None else out.new_empty(0) for _ in range(2))
    column = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    r, lse = (torch.empty(B, H, T if n else 0, dtype=torch.float32, device=q.device) for n in (True, mix is not None))
    (q, k, v, keys, rows), strides, apart, numbers, flags = launch(q, k, v, keys, rows, scale)
    size = launch_sizes(q, v, TILES["columns"])
    del size["BLOCK_E"]
    _columns[(blocks_of(S, size["BLOCK_M"]) * B * H,)](
        q, k, rows, column, *strides[:6], apart[2], *numbers, D=flags["D"], ROWS=rows is not None,
        PRECISION=flags["PRECISION"], LANES=4 if rows is None and size["BLOCK_M"] >= 64 else 1, **size,
    )  # fmt: skip
    size = launch_sizes(q, v, TILES["mixed" if mix is not None else "forward"])
    if T:
        _forward[(blocks_of(T, size["BLOCK_M"]) * B * H,)](
            q, k, v, keys, column, mix, out, first, difference, r, lse, *strides, *apart[:2], *numbers,
            MIXED=mix is not None, PAD=keys is not None, **flags, **size,
        )  # fmt: skip
    return out, first, difference, column, r, lse


def launch(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, rows: Tensor | None, scale: float
) -> tuple[tuple[Any, ...], list[int], list[int], list[Any], dict[str, Any]]:
    """Tensors as the kernels read them, their strides and those of the masks, numbers, and compile-time switches."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    keys, rows = (None if x is None else x.to(torch.int8).contiguous() for x in (keys, rows))
    apart = [0, 0] if keys is None else [0 if keys.shape[axis] == 1 else keys.stride(axis) for axis in (0, 1)]
    apart.append(0 if rows is None or rows.shape[0] == 1 else rows.stride(0))
    numbers = [q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], scale]
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
    flags = {"D": q.shape[3], "E": v.shape[3], "PRECISION": precision}
    return (q, k, v, keys, rows), [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]], apart, numbers, flags


# rows of queries, keys (of `columns` the other way round), warps, stages: up to 64 channels, the fastest of three or
# four on an H200, and above
TILES = {
    "columns": ((64, 128, 4, 3), (128, 64, 8, 2)),
    "forward": ((128, 64, 8, 3), (128, 64, 8, 2)),
    "mixed": ((64, 64, 4, 3), (64, 64, 4, 2)),
    "keys": ((64, 128, 8, 2), (32, 64, 4, 2)),
    "queries": ((128, 64, 4, 3), (64, 64, 4, 2)),
}


# ---- The gradient ----
# With dp_ij = do_i.v_j, a_ij = u A_ij (dp_ij - do.(A v)_i) and w_ij = (1 - u) W_ij (dp_ij - do.(W v)_i):
#     dE_ij = a_ij + w_ij + c_j P_ij,   c_j = -sum_i a_ij,   P_ij = exp(E_ij - L_j) = A_ij exp(r_i) of queries that count
# so dk_j is one pass over queries, which gives c_j too: sum_i (a + w) q_i + c_j sum_i P q_i; then dq is one over keys.


@triton.jit
def _deltas(Do, First, Difference, Delta, Delta2, rows, E: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr,
            BLOCK_E: tl.constexpr):  # fmt: skip
    """do.(A v) and do.(W v) of every row."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_E)
    where = i[:, None] * E + e[None, :]
    inside = (i < rows)[:, None] & (e < E)[None, :]
    do = tl.load(Do + where, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(do * tl.load(First + where, mask=inside, other=0.0).to(tl.float32), 1)
    tl.store(Delta + i, delta, mask=i < rows)
    if MIXED:
        apart = tl.load(Difference + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(Delta2 + i, delta - tl.sum(do * apart, 1), mask=i < rows)


@triton.jit
def _keys(Q, K, V, Pad, Rows, Do, Lse, Mix, R, L, Delta, Delta2, C, Dk, Dv, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph,
          rb, H, GROUP, T, S, scale, D: tl.constexpr, E: tl.constexpr, MIXED: tl.constexpr, PAD: tl.constexpr,
          ROWS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
          BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """One query head's part of dk and dv, and c."""
    b, h, head, block = program_of(H, tl.cdiv(S, BLOCK_N))
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    shown = shown_tokens(Pad, pb, ph, b, h, j, S, PAD)
    key = b * kb + (h // GROUP) * kh + j[:, None].to(tl.int64) * kt
    k = load_rows(K + key + d[None, :], d, j < S, D, BLOCK_D, True)
    value = b * vb + (h // GROUP) * vh + j[:, None].to(tl.int64) * vt
    v = load_rows(V + value + e[None, :], e, j < S, E, BLOCK_E, True)
    column = tl.load(Lse + head * S + j, mask=j < S, other=0.0)
    u = 1.0
    if MIXED:
        u = tl.load(Mix + h)
    queries = Q + b * qb + h * qh + r[:, None].to(tl.int64) * qt + d[None, :]
    grads = Do + (head * T + r[:, None]) * E + e[None, :]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    met = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # sum_i P q_i
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    c = tl.zeros([BLOCK_N], tl.float32)
    plain = T // BLOCK_M * BLOCK_M
    for EDGE in tl.static_range(2):
        for start in range(plain if EDGE else 0, T if EDGE else plain, BLOCK_M):
            i = start + r
            at = tl.cast(start, tl.int64)
            q = load_rows(queries + at * qt, d, i < T, D, BLOCK_D, EDGE)
            do = load_rows(grads + at * E, e, i < T, E, BLOCK_E, EDGE)
            row = tl.load(R + head * T + i, mask=i < T, other=-EMPTY)  # weights of rows past the end are 0
            x = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            p = tl.exp2(x - column[:, None] - row[None, :])
            dx = u * p * (dp - tl.load(Delta + head * T + i, mask=i < T, other=0.0)[None, :])
            c -= tl.sum(dx, 1)
            counts = shown_tokens(Rows, rb, 0, b, h, i, T, ROWS) & (row < -EMPTY)
            share = p * tl.where(counts, tl.exp2(tl.where(counts, row, 0.0)), 0.0)[None, :]
            p = u * p
            if MIXED:
                row = tl.load(L + head * T + i, mask=i < T, other=-EMPTY)
                w = (1 - u) * tl.exp2(x - row[None, :])
                dx += w * (dp - tl.load(Delta2 + head * T + i, mask=i < T, other=0.0)[None, :])
                p += w
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
            met = tl.dot(share.to(q.dtype), q, met, input_precision=PRECISION)
    c = tl.where(shown, c, 0.0)
    tl.store(C + head * S + j, c, mask=j < S)
    dk = tl.where(shown[:, None], (dk + c[:, None] * met) * scale, 0.0)
    where = Dk + (head * S + j[:, None]) * D + d[None, :]
    tl.store(where, dk.to(Dk.dtype.element_ty), mask=(j < S)[:, None] & (d < D)[None, :])
    dv = tl.where(shown[:, None], dv, 0.0)
    where = Dv + (head * S + j[:, None]) * E + e[None, :]
    tl.store(where, dv.to(Dv.dtype.element_ty), mask=(j < S)[:, None] & (e < E)[None, :])


@triton.jit
def _queries(Q, K, V, Pad, Rows, Do, Lse, Mix, R, L, Delta, Delta2, C, Dq, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph,
             rb, H, GROUP, T, S, scale, D: tl.constexpr, E: tl.constexpr, MIXED: tl.constexpr, PAD: tl.constexpr,
             ROWS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, block = program_of(H, tl.cdiv(T, BLOCK_M))
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    do = load_rows(Do + (head * T + i[:, None]) * E + e[None, :], e, i < T, E, BLOCK_E, True)
    keys = K + b * kb + (h // GROUP) * kh + n[:, None].to(tl.int64) * kt + d[None, :]
    values = V + b * vb + (h // GROUP) * vh + n[:, None].to(tl.int64) * vt + e[None, :]
    row = tl.load(R + head * T + i, mask=i < T, other=-EMPTY)
    counts = shown_tokens(Rows, rb, 0, b, h, i, T, ROWS) & (row < -EMPTY)
    mass = tl.where(counts, tl.exp2(tl.where(counts, row, 0.0)), 0.0)
    delta = tl.load(Delta + head * T + i, mask=i < T, other=0.0)
    u = 1.0
    row2 = row
    delta2 = delta
    if MIXED:
        u = tl.load(Mix + h)
        row2 = tl.load(L + head * T + i, mask=i < T, other=-EMPTY)
        delta2 = tl.load(Delta2 + head * T + i, mask=i < T, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    plain = S // BLOCK_N * BLOCK_N
    if PAD:
        plain = 0
    for EDGE in tl.static_range(2):
        for start in range(plain if EDGE else 0, S if EDGE else plain, BLOCK_N):
            j = start + n
            at = tl.cast(start, tl.int64)
            k = load_rows(keys + at * kt, d, j < S, D, BLOCK_D, EDGE)
            v = load_rows(values + at * vt, e, j < S, E, BLOCK_E, EDGE)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            column = tl.load(Lse + head * S + j, mask=j < S, other=0.0)[None, :]
            c = tl.load(C + head * S + j, mask=j < S, other=0.0)[None, :]
            p = tl.exp2(x - column - row[:, None])
            dx = p * (u * (dp - delta[:, None]) + c * mass[:, None])
            if MIXED:
                dx += (1 - u) * tl.exp2(x - row2[:, None]) * (dp - delta2[:, None])
            if EDGE:
                dx = tl.where(shown_tokens(Pad, pb, ph, b, h, j, S, PAD)[None, :], dx, 0.0)
            dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)
    where = Dq + (head * T + i[:, None]) * D + d[None, :]
    tl.store(where, (dq * scale).to(Dq.dtype.element_ty), mask=(i < T)[:, None] & (d < D)[None, :])


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: tuple[Tensor, ...],
    grad: Tensor,
    keys: Tensor | None,
    rows: Tensor | None,
    mix: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dmix (H, or of no size); `saved` is what `forward` returned."""
    out, first, difference, column, r, lse = saved
    B, H, T, D = q.shape
    K, S, E = v.shape[1:]
    grad = grad.contiguous()
    delta, delta2 = torch.empty_like(r), torch.empty_like(lse)
    c = torch.empty_like(column)
    dq = torch.empty(B, H, T, D, dtype=q.dtype, device=q.device)
    kind = k.dtype if H == K else torch.float32  # heads that share keys are added below
    dk = torch.empty(B, H, S, D, dtype=kind, device=q.device)
    dv = torch.empty(B, H, S, E, dtype=kind, device=q.device)
    (q, k, v, keys, rows), strides, apart, numbers, flags = launch(q, k, v, keys, rows, scale)
    flags |= {"MIXED": mix is not None, "PAD": keys is not None, "ROWS": rows is not None}
    size = launch_sizes(q, v, TILES["keys"])
    if T:
        _deltas[(blocks_of(B * H * T, 64),)](
            grad, out if mix is None else first, difference, delta, delta2, B * H * T, E=E, MIXED=mix is not None,
            BLOCK=64, BLOCK_E=size["BLOCK_E"],
        )  # fmt: skip
    _keys[(blocks_of(S, size["BLOCK_N"]) * B * H,)](
        q, k, v, keys, rows, grad, column, mix, r, lse, delta, delta2, c, dk, dv, *strides, *apart, *numbers, **flags,
        **size,
    )  # fmt: skip
    size = launch_sizes(q, v, TILES["queries"])
    if T:
        _queries[(blocks_of(T, size["BLOCK_M"]) * B * H,)](
            q, k, v, keys, rows, grad, column, mix, r, lse, delta, delta2, c, dq, *strides, *apart, *numbers, **flags,
            **size,
        )  # fmt: skip
    if H != K:
        dk, dv = (x.unflatten(1, (K, -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv, delta.new_empty(0) if mix is None else (delta - delta2).sum((0, 2))
