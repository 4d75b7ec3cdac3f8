"""Attention in Triton with weights that PyTorch's fused kernels do not know, forward and backward, no T x S matrix.

With z = scale q.k, for every query i and key j in view:
    capped softmax:  x = cap tanh(z / cap), p = exp(x - lse_i), out = sum p v;  dz = p (dp - do.out) (1 - (x / cap)^2)
    plain softmax:   x = z, where cap is 0: for windows, keys at most `window` away on either side
    sigmoid:         p = sigmoid(z + shift_i), out = sum p v;                   dz = p (1 - p) dp, dshift_i = sum dz
with dp_ij = do_i.v_j. Weights are computed again for the gradient, once with rows of queries (dq) and once with rows of
keys (dk, dv).
Tiles along the edge of a causal mask, and all of them where there is padding, have masks; the others have none.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater.kernels.triton_parts import EMPTY, LOG2E, capped, key_span, load_rows
from locater_lab.mechanisms.kernels.triton_tiles import blocks_of, program_of, seen_keys, tile_width


@triton.jit
def _logistic(z):
    return 1 / (1 + tl.exp2(-(z * LOG2E)))


@triton.jit
def _forward(Q, K, V, Out, Lse, Shift, Pad, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, H, GROUP, T, S, scale, cap,
             window, D: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, PAD: tl.constexpr, SIGMOID: tl.constexpr,
             CAPPED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, block = program_of(H, tl.cdiv(T, BLOCK_M))
    block = tl.cdiv(T, BLOCK_M) - 1 - block  # the longest rows of a causal mask start first
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    keys = K + b * kb + (h // GROUP) * kh + n[:, None].to(tl.int64) * kt + d[None, :]
    values = V + b * vb + (h // GROUP) * vh + n[:, None].to(tl.int64) * vt + e[None, :]
    m = tl.full([BLOCK_M], EMPTY, tl.float32)
    s = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    shift = tl.zeros([BLOCK_M], tl.float32)
    if SIGMOID:
        shift = tl.load(Shift + head * T + i, mask=i < T, other=0.0)
    low, high, plain = key_span(block, T, S, window + 1, CAUSAL, WINDOW, PAD, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):  # first tiles whose keys are all in view
        for start in range(plain if EDGE else low, high if EDGE else plain, BLOCK_N):
            at = tl.cast(start, tl.int64)
            k = load_rows(keys + at * kt, d, start + n < S, D, BLOCK_D, EDGE)
            v = load_rows(values + at * vt, e, start + n < S, E, BLOCK_E, EDGE)
            z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = (start + n)[None, :] < S
            if EDGE:
                seen = seen_keys(i[:, None], (start + n)[None, :], b, h, T, S, Pad, pb, ph, CAUSAL, PAD, window, WINDOW)
            if SIGMOID:
                p = _logistic(z + shift[:, None])
                if EDGE:
                    p = tl.where(seen, p, 0.0)
            else:
                x = (capped(z, cap) if CAPPED else z) * LOG2E
                if EDGE:
                    x = tl.where(seen, x, EMPTY)
                new = tl.maximum(m, tl.max(x, 1))
                p = tl.exp2(x - new[:, None])
                if EDGE:
                    p = tl.where(seen, p, 0.0)
                alpha = tl.exp2(m - new)
                s = alpha * s + tl.sum(p, 1)
                out = out * alpha[:, None]
                m = new
            out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
    if not SIGMOID:
        shown = s > 0
        out = out / tl.where(shown, s, 1.0)[:, None]
        tl.store(Lse + head * T + i, tl.where(shown, m + tl.log2(tl.where(shown, s, 1.0)), -EMPTY), mask=i < T)
    where = Out + (head * T + i[:, None]) * E + e[None, :]
    tl.store(where, out.to(Out.dtype.element_ty), mask=(i < T)[:, None] & (e < E)[None, :])


@triton.jit
def _slopes(z, dp, shift, delta, cap, SIGMOID: tl.constexpr, CAPPED: tl.constexpr):
    """Weights, and the gradient of z. `shift` is that of the row for a sigmoid, and its lse, in units of log 2, for a
    softmax.
    """
    if SIGMOID:
        p = _logistic(z + shift)
        dz = p * (1 - p) * dp
    elif CAPPED:
        x = capped(z, cap)
        p = tl.exp2(x * LOG2E - shift)
        dz = p * (dp - delta) * (1 - (x / cap) * (x / cap))
    else:
        p = tl.exp2(z * LOG2E - shift)
        dz = p * (dp - delta)
    return p, dz


@triton.jit
def _queries(Q, K, V, Do, Row, Delta, Pad, Dq, Dshift, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, H, GROUP, T, S,
             scale, cap, window, D: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, PAD: tl.constexpr,
             SIGMOID: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, block = program_of(H, tl.cdiv(T, BLOCK_M))
    block = tl.cdiv(T, BLOCK_M) - 1 - block
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    do = load_rows(Do + (head * T + i[:, None]) * E + e[None, :], e, i < T, E, BLOCK_E, True)
    keys = K + b * kb + (h // GROUP) * kh + n[:, None].to(tl.int64) * kt + d[None, :]
    values = V + b * vb + (h // GROUP) * vh + n[:, None].to(tl.int64) * vt + e[None, :]
    row = tl.load(Row + head * T + i, mask=i < T, other=0.0)
    delta = tl.load(Delta + head * T + i, mask=i < T, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dshift = tl.zeros([BLOCK_M], tl.float32)
    low, high, plain = key_span(block, T, S, window + 1, CAUSAL, WINDOW, PAD, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):
        for start in range(plain if EDGE else low, high if EDGE else plain, BLOCK_N):
            at = tl.cast(start, tl.int64)
            k = load_rows(keys + at * kt, d, start + n < S, D, BLOCK_D, EDGE)
            v = load_rows(values + at * vt, e, start + n < S, E, BLOCK_E, EDGE)
            z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            _, dz = _slopes(z, dp, row[:, None], delta[:, None], cap, SIGMOID, CAPPED)
            if EDGE:
                dz = tl.where(
                    seen_keys(i[:, None], (start + n)[None, :], b, h, T, S, Pad, pb, ph, CAUSAL, PAD, window, WINDOW),
                    dz,
                    0.0,
                )
            if SIGMOID:
                dshift += tl.sum(dz, 1)
            dq = tl.dot(dz.to(k.dtype), k, dq, input_precision=PRECISION)
    if SIGMOID:
        tl.store(Dshift + head * T + i, dshift, mask=i < T)
    where = Dq + (head * T + i[:, None]) * D + d[None, :]
    tl.store(where, (dq * scale).to(Dq.dtype.element_ty), mask=(i < T)[:, None] & (d < D)[None, :])


@triton.jit
def _keys(Q, K, V, Do, Row, Delta, Pad, Dk, Dv, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, H, GROUP, T, S, scale,
          cap, window, D: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, PAD: tl.constexpr, SIGMOID: tl.constexpr,
          CAPPED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
          BLOCK_E: tl.constexpr):  # fmt: skip
    """Tiles lie with keys in rows, so that both products take them as they are. One query head's part of dk and dv."""
    b, h, head, block = program_of(H, tl.cdiv(S, BLOCK_N))
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    k = load_rows(
        K + b * kb + (h // GROUP) * kh + j[:, None].to(tl.int64) * kt + d[None, :], d, j < S, D, BLOCK_D, True
    )
    v = load_rows(
        V + b * vb + (h // GROUP) * vh + j[:, None].to(tl.int64) * vt + e[None, :], e, j < S, E, BLOCK_E, True
    )
    queries = Q + b * qb + h * qh + r[:, None].to(tl.int64) * qt + d[None, :]
    grads = Do + (head * T + r[:, None]) * E + e[None, :]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    low = 0
    middle = 0  # from here on every row sees every key of the block
    if CAUSAL:
        low = tl.maximum(0, block * BLOCK_N - (S - T)) // BLOCK_M * BLOCK_M
        middle = tl.cdiv(tl.maximum(0, (block + 1) * BLOCK_N - 1 - (S - T)), BLOCK_M) * BLOCK_M
    plain = T // BLOCK_M * BLOCK_M  # rows past the end are masked
    end = T
    if WINDOW:
        low = tl.maximum(low, tl.maximum(0, block * BLOCK_N - (S - T) - window) // BLOCK_M * BLOCK_M)
        end = tl.minimum(T, tl.maximum(0, (block + 1) * BLOCK_N - (S - T) + window))
    middle = tl.minimum(middle, end)
    if PAD or WINDOW:
        middle = end
        plain = 0
    for PART in tl.static_range(3):  # along the edge of the mask, without one, and along the end
        for start in range(low if PART == 0 else middle if PART == 1 else tl.maximum(plain, middle),
                           middle if PART == 0 else plain if PART == 1 else end, BLOCK_M):  # fmt: skip
            i = start + r
            at = tl.cast(start, tl.int64)
            q = load_rows(queries + at * qt, d, i < T, D, BLOCK_D, PART != 1)
            do = load_rows(grads + at * E, e, i < T, E, BLOCK_E, PART != 1)
            row = tl.load(Row + head * T + i, mask=i < T, other=0.0)
            delta = tl.load(Delta + head * T + i, mask=i < T, other=0.0)
            z = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            p, dz = _slopes(z, dp, row[None, :], delta[None, :], cap, SIGMOID, CAPPED)
            if PART != 1:
                seen = seen_keys(i[None, :], j[:, None], b, h, T, S, Pad, pb, ph, CAUSAL, PAD, window, WINDOW)
                p = tl.where(seen, p, 0.0)
                dz = tl.where(seen, dz, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(dz.to(q.dtype), q, dk, input_precision=PRECISION)
    where = Dk + (head * S + j[:, None]) * D + d[None, :]
    tl.store(where, (dk * scale).to(Dk.dtype.element_ty), mask=(j < S)[:, None] & (d < D)[None, :])
    where = Dv + (head * S + j[:, None]) * E + e[None, :]
    tl.store(where, dv.to(Dv.dtype.element_ty), mask=(j < S)[:, None] & (e < E)[None, :])


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shift: Tensor | None,
    padding: Tensor | None,
    scale: float,
    cap: float,
    causal: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and a number of every row for the gradient: lse in units of log 2, or the shift of a sigmoid."""
    B, H, T, _ = q.shape
    out = torch.empty(B, H, T, v.shape[3], dtype=v.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device) if shift is None else shift
    arguments, flags, keep = _launch(q, k, v, padding, scale, cap, causal, shift is not None, window)
    size = _blocks(q, v, "forward")
    if T:
        _forward[(blocks_of(T, size["BLOCK_M"]) * B * H,)](
            *keep[:3], out, lse, lse, keep[3], *arguments, **flags, **size
        )
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row: Tensor,
    grad: Tensor,
    padding: Tensor | None,
    scale: float,
    cap: float,
    causal: bool,
    sigmoid: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and of a sigmoid dshift (B, H, T)."""
    B, H, T, D = q.shape
    K, S, E = v.shape[1:]
    grad = grad.contiguous()
    delta = row if sigmoid else (grad.float() * out.float()).sum(-1)
    dq = torch.empty(B, H, T, D, dtype=q.dtype, device=q.device)
    kind = k.dtype if H == K else torch.float32  # heads that share keys are added below
    dk = torch.empty(B, H, S, D, dtype=kind, device=q.device)
    dv = torch.empty(B, H, S, E, dtype=kind, device=q.device)
    dshift = torch.zeros(B, H, T if sigmoid else 0, dtype=torch.float32, device=q.device)
    arguments, flags, keep = _launch(q, k, v, padding, scale, cap, causal, sigmoid, window)
    if T:
        size = _blocks(q, v, "queries")
        _queries[(blocks_of(T, size["BLOCK_M"]) * B * H,)](
            *keep[:3], grad, row, delta, keep[3], dq, dshift, *arguments, **flags, **size
        )
    size = _blocks(q, v, "keys")
    _keys[(blocks_of(S, size["BLOCK_N"]) * B * H,)](
        *keep[:3], grad, row, delta, keep[3], dk, dv, *arguments, **flags, **size
    )
    if H != K:
        dk, dv = (x.unflatten(1, (K, -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv, dshift


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    scale: float,
    cap: float,
    causal: bool,
    sigmoid: bool,
    window: int | None,
) -> tuple[list[Any], dict[str, Any], list[Tensor | None]]:
    """Strides and numbers, compile-time switches, and tensors as the kernels read them."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    H, T = q.shape[1:3]
    keys = None if padding is None else padding.to(torch.int8).contiguous()
    apart = [0, 0] if keys is None else [0 if keys.shape[axis] == 1 else keys.stride(axis) for axis in (0, 1)]
    numbers = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *apart, H, H // k.shape[1], T, k.shape[2]]
    numbers += [scale, cap, window or 0]
    flags = {
        "D": q.shape[3],
        "E": v.shape[3],
        "CAUSAL": causal,
        "PAD": keys is not None,
        "SIGMOID": sigmoid,
        "CAPPED": cap > 0,
        "WINDOW": window is not None,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }
    return numbers, flags, [q, k, v, keys]


# up to 64 channels, and above: the fastest of seven tiles on an H200
STAGES = {"forward": (3, 3), "queries": (3, 2), "keys": (2, 2)}


def _blocks(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    widths = [tile_width(x.shape[3]) for x in (q, v)]
    tile = (
        (64, 64, STAGES[kernel][max(widths) > 64]) if q.dtype != torch.float32 and max(widths) <= 128 else (32, 32, 2)
    )
    return {
        "BLOCK_M": tile[0],
        "BLOCK_N": tile[1],
        "BLOCK_D": widths[0],
        "BLOCK_E": widths[1],
        "num_warps": 4,
        "num_stages": tile[2],
    }
