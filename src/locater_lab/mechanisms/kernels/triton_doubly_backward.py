"""The gradient of doubly normalized attention in Triton; names are those of `triton_doubly`.

With dp_ij = do_i.v_j, a_ij = u A_ij (dp_ij - do.(A v)_i) and w_ij = (1 - u) W_ij (dp_ij - do.(W v)_i):
    dE_ij = a_ij + w_ij + c_j P_ij,   c_j = -sum_i a_ij,   P_ij = exp(E_ij - L_j) = A_ij exp(r_i) of queries that count
so dk_j is one pass over queries, which gives c_j too: sum_i (a + w) q_i + c_j sum_i P q_i; then dq is one over keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.triton_parts import EMPTY, LOG2E, load_rows
from locater_lab.mechanisms.kernels.triton_doubly import TILES, launch, shown_tokens
from locater_lab.mechanisms.kernels.triton_tiles import blocks_of, launch_sizes, program_of


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
