"""Linear attention in Triton: sums of features of keys and values over chunks of C tokens, no T x S matrix.

With phi the features of scale q and of k, and c = 1 where a constant is among them, else 0:
    f_ij = phi(q_i).phi(k_j) + c,   out_i = sum_j f_ij v_j / sum_j f_ij
Three launches: a matrix of sums for each chunk, (phi(k), c) times (v, 1), hence (D + c, E + 1); their running sums; and
the output of each chunk from the sums before it and the f of its own keys. Backward the same with (phi(q), c) times the
gradients of numerator and denominator, added up from the end. Positions count from the first key: query i is at
i + offset, with offset = S - T for causal attention and 0 where all keys are seen.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater_lab.mechanisms.kernels.triton_tiles import (
    blocks_of,
    inverse_length,
    program_of,
    rows_of,
    through_length,
    tile_width,
)


@triton.jit
def _features(rows, scale, UNIT: tl.constexpr):
    """scale x / |x|, or elu(scale x) + 1."""
    x = rows.to(tl.float32) * scale
    if UNIT:
        x = x * inverse_length(rows, True)[:, None]
    else:
        x = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    return x


@triton.jit
def _through_features(grad, rows, scale, UNIT: tl.constexpr):
    """The gradient of x from that of its features."""
    if UNIT:
        grad = through_length(grad * scale, rows, inverse_length(rows, True), True)
    else:
        x = rows.to(tl.float32) * scale
        grad = grad * tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0))) * scale
    return grad


@triton.jit
def _seen(Pad, pb, ph, b, h, j, inside, PAD: tl.constexpr):
    """Which of the keys j there are, and are seen."""
    if PAD:
        inside = inside & (tl.load(Pad + b * pb + h * ph + j, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _grads(Do, Out, Total, row, i, e, E: tl.constexpr, inside):
    """Gradients of numerator and denominator, of rows i of the head whose first row is `row`."""
    do = rows_of(Do + row * E, i, E, e, E, inside).to(tl.float32)
    out = rows_of(Out + row * E, i, E, e, E, inside).to(tl.float32)
    total = tl.load(Total + row + i, mask=inside, other=0.0)
    return do * total[:, None], -tl.sum(do * out, 1) * total


@triton.jit
def _sums(X, Y, Out, Total, Pad, Sums, xb, xh, xt, yb, yh, yt, pb, ph, H, length, offset, chunks, scale,
          D: tl.constexpr, E: tl.constexpr, CONSTANT: tl.constexpr, UNIT: tl.constexpr, PAD: tl.constexpr,
          GRADIENT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
          BLOCK_E: tl.constexpr):  # fmt: skip
    """(phi(k), c)^T (v, 1) of a chunk; for the gradient (phi(q), c)^T times the gradients of both sums."""
    b, h, head, n = program_of(H, chunks)
    at = n * C + tl.arange(0, C) - offset
    inside = (at >= 0) & (at < length)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    x = rows_of(X + b * xb + h * xh, at, xt, d, D, inside)
    if GRADIENT:
        y, last = _grads(Y, Out, Total, head * length, at, e, E, inside)
    else:
        inside = _seen(Pad, pb, ph, b, h, at, inside, PAD)
        y = rows_of(Y + b * yb + h * yh, at, yt, e, E, inside).to(tl.float32)
        last = inside.to(tl.float32)
    phi = tl.where(inside[:, None] & (d < D)[None, :], _features(x, scale, UNIT), 0.0)
    base = Sums + (head * chunks + n) * ((D + CONSTANT) * (E + 1))
    sums = tl.dot(tl.trans(phi), y, input_precision=PRECISION)
    tl.store(base + d[:, None] * (E + 1) + e[None, :], sums, mask=(d < D)[:, None] & (e < E)[None, :])
    tl.store(base + d * (E + 1) + E, tl.sum(phi * last[:, None], 0), mask=d < D)
    if CONSTANT:
        tl.store(base + D * (E + 1) + e, tl.sum(y, 0), mask=e < E)
        tl.store(base + D * (E + 1) + E, tl.sum(last, 0))


@triton.jit
def _running(Sums, Running, chunks, number, REVERSE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Of chunks + 1 matrices the nth is the sum of those before chunk n, or with REVERSE of those from n on."""
    blocks = tl.cdiv(number, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < number
    source = Sums + head * chunks * number + column
    target = Running + head * (chunks + 1) * number + column
    total = tl.zeros([BLOCK], tl.float32)
    tl.store(target + (chunks * number if REVERSE else 0), total, mask=inside)
    for start in range(0, chunks, GROUP):
        n = start + tl.arange(0, GROUP)
        at = (chunks - 1 - n if REVERSE else n)[:, None] * number
        mask = (n < chunks)[:, None] & inside[None, :]
        x = tl.load(source[None, :] + at, mask=mask, other=0.0)
        tl.store(target[None, :] + (at if REVERSE else at + number), tl.cumsum(x, 0) + total[None, :], mask=mask)
        total += tl.sum(x, 0)


@triton.jit
def _output(Q, K, V, Pad, Running, Out, Total, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, H, GROUP, T, S, offset,
            first, chunks, scale, D: tl.constexpr, E: tl.constexpr, CONSTANT: tl.constexpr, UNIT: tl.constexpr,
            CAUSAL: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
            BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, block = program_of(H, tl.cdiv(T + offset, C) - first)
    n = first + block
    j = n * C + tl.arange(0, C)
    i = j - offset
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    real = (i >= 0) & (i < T)
    of_keys = b * (H // GROUP) + h // GROUP
    base = Running + (of_keys * (chunks + 1) + (n if CAUSAL else chunks)) * ((D + CONSTANT) * (E + 1))
    q = _features(rows_of(Q + b * qb + h * qh, i, qt, d, D, real), scale, UNIT)
    sums = tl.load(base + d[:, None] * (E + 1) + e[None, :], mask=(d < D)[:, None] & (e < E)[None, :], other=0.0)
    weights = tl.load(base + d * (E + 1) + E, mask=d < D, other=0.0)
    out = tl.dot(q, sums, input_precision=PRECISION)
    total = tl.sum(q * weights[None, :], 1)
    if CONSTANT:
        out += tl.load(base + D * (E + 1) + e, mask=e < E, other=0.0)[None, :]
        total += tl.load(base + D * (E + 1) + E)
    if CAUSAL:
        seen = _seen(Pad, pb, ph, b, h, j, j < S, PAD)
        k = _features(rows_of(K + b * kb + (h // GROUP) * kh, j, kt, d, D, seen), 1.0, UNIT)
        k = tl.where((d < D)[None, :], k, 0.0)
        v = rows_of(V + b * vb + (h // GROUP) * vh, j, vt, e, E, seen).to(tl.float32)
        f = tl.dot(q, tl.trans(k), input_precision=PRECISION) + CONSTANT
        f = tl.where((j[None, :] <= j[:, None]) & seen[None, :], f, 0.0)
        out = tl.dot(f, v, out, input_precision=PRECISION)
        total += tl.sum(f, 1)
    shown = total > 0
    inverse = tl.where(shown, 1 / tl.where(shown, total, 1.0), 0.0)
    row = head * T
    tl.store(Total + row + i, inverse, mask=real)
    where = Out + (row + i[:, None]) * E + e[None, :]
    tl.store(where, (out * inverse[:, None]).to(Out.dtype.element_ty), mask=real[:, None] & (e < E)[None, :])


@triton.jit
def _gradients(Q, K, V, Pad, Do, Out, Total, Running, Back, Dq, Dk, Dv, qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, H,
               GROUP, T, S, offset, chunks, later, steps, scale, D: tl.constexpr, E: tl.constexpr,
               CONSTANT: tl.constexpr, UNIT: tl.constexpr, CAUSAL: tl.constexpr, PAD: tl.constexpr,
               PRECISION: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """dq of the queries and one query head's part of dk and dv of the keys at the positions of a chunk."""
    b, h, head, n = program_of(H, steps)
    j = n * C + tl.arange(0, C)
    i = j - offset
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    real = (i >= 0) & (i < T)
    seen = _seen(Pad, pb, ph, b, h, j, j < S, PAD)
    of_keys = b * (H // GROUP) + h // GROUP
    size = (D + CONSTANT) * (E + 1)
    past = Running + (of_keys * (chunks + 1) + (n if CAUSAL else chunks)) * size
    ahead = Back + (head * (later + 1) + (n + 1 if CAUSAL else 0)) * size
    tile = (d < D)[:, None] & (e < E)[None, :]
    raw_q = rows_of(Q + b * qb + h * qh, i, qt, d, D, real)
    raw_k = rows_of(K + b * kb + (h // GROUP) * kh, j, kt, d, D, seen)
    q = tl.where(real[:, None] & (d < D)[None, :], _features(raw_q, scale, UNIT), 0.0)
    k = tl.where(seen[:, None] & (d < D)[None, :], _features(raw_k, 1.0, UNIT), 0.0)
    v = rows_of(V + b * vb + (h // GROUP) * vh, j, vt, e, E, seen).to(tl.float32)
    g, last = _grads(Do, Out, Total, head * T, i, e, E, real)
    sums = tl.load(past + d[:, None] * (E + 1) + e[None, :], mask=tile, other=0.0)
    weights = tl.load(past + d * (E + 1) + E, mask=d < D, other=0.0)
    dq = tl.dot(g, tl.trans(sums), input_precision=PRECISION) + last[:, None] * weights[None, :]
    sums = tl.load(ahead + d[:, None] * (E + 1) + e[None, :], mask=tile, other=0.0)
    weights = tl.load(ahead + d * (E + 1) + E, mask=d < D, other=0.0)
    dk = tl.dot(v, tl.trans(sums), input_precision=PRECISION) + weights[None, :]
    dv = tl.dot(k, sums, input_precision=PRECISION)
    if CONSTANT:
        dv += tl.load(ahead + D * (E + 1) + e, mask=e < E, other=0.0)[None, :]
    if CAUSAL:
        both = (j[None, :] <= j[:, None]) & real[:, None] & seen[None, :]
        a = tl.where(both, tl.dot(g, tl.trans(v), input_precision=PRECISION) + last[:, None], 0.0)
        dq = tl.dot(a, k, dq, input_precision=PRECISION)
        dk = tl.dot(tl.trans(a), q, dk, input_precision=PRECISION)
        f = tl.where(both, tl.dot(q, tl.trans(k), input_precision=PRECISION) + CONSTANT, 0.0)
        dv = tl.dot(tl.trans(f), g, dv, input_precision=PRECISION)
    dq = _through_features(dq, raw_q, scale, UNIT)
    dk = tl.where(seen[:, None], _through_features(dk, raw_k, 1.0, UNIT), 0.0)
    dv = tl.where(seen[:, None], dv, 0.0)
    there = (j < S)[:, None]
    where = Dq + (head * T + i[:, None]) * D + d[None, :]
    tl.store(where, dq.to(Dq.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])
    where = Dk + (head * S + j[:, None]) * D + d[None, :]
    tl.store(where, dk.to(Dk.dtype.element_ty), mask=there & (d < D)[None, :])
    where = Dv + (head * S + j[:, None]) * E + e[None, :]
    tl.store(where, dv.to(Dv.dtype.element_ty), mask=there & (e < E)[None, :])


CHUNK, WARPS = 64, 4


def chunk_for(q: Tensor, v: Tensor) -> int:
    """Tokens of a chunk: half as many where the sums of a chunk take more room."""
    return CHUNK if max(q.shape[3], v.shape[3]) <= 64 else 32


def forward(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, scale: float, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, 1 / sum f of every row (B, H, T), and running sums (B K, N + 1, D + c, E + 1)."""
    B, H, T, _ = q.shape
    K, S, E = v.shape[1:]
    out = torch.empty(B, H, T, E, dtype=v.dtype, device=q.device)
    total = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    (q, k, v, keys), apart, flags, size = _launch(q, k, v, padding, unit)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *apart]
    chunks = blocks_of(S, size["C"])
    # a padding with heads of its own comes with keys and values per query head
    running = _added_up(k, v, None, None, keys, strides[3:], S, 0, chunks, 1.0, False, flags, size)
    offset = S - T if causal else 0
    first = offset // size["C"]
    steps = blocks_of(T + offset, size["C"]) - first
    if T:
        _output[(steps * B * H,)](
            q, k, v, keys, running, out, total, *strides, H, H // K, T, S, offset, first, chunks, scale,
            CAUSAL=causal, PAD=keys is not None, **flags, **size,
        )  # fmt: skip
    return out, total, running


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    running: Tensor,
    grad: Tensor,
    padding: Tensor | None,
    scale: float,
    unit: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    B, H, T, D = q.shape
    K, S, E = v.shape[1:]
    grad = grad.contiguous()
    dq = torch.empty(B, H, T, D, dtype=q.dtype, device=q.device)
    kind = k.dtype if H == K else torch.float32  # heads that share keys are added below
    dk = torch.empty(B, H, S, D, dtype=kind, device=q.device)
    dv = torch.empty(B, H, S, E, dtype=kind, device=q.device)
    (q, k, v, keys), apart, flags, size = _launch(q, k, v, padding, unit)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *apart]
    offset = S - T if causal else 0
    chunks, later = blocks_of(S, size["C"]), blocks_of(T + offset, size["C"])
    back = _added_up(q, grad, out, total, None, [*strides[:3], 0, 0, 0, 0, 0], T, offset, later, scale, True, flags,
                     size)  # fmt: skip
    steps = max(chunks, later)
    _gradients[(steps * B * H,)](
        q, k, v, keys, grad, out, total, running, back, dq, dk, dv, *strides, H, H // K, T, S, offset, chunks, later,
        steps, scale, CAUSAL=causal, PAD=keys is not None, **flags, **size,
    )  # fmt: skip
    if H != K:
        dk, dv = (x.unflatten(1, (K, -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


def _added_up(
    x: Tensor,
    y: Tensor,
    out: Tensor | None,
    total: Tensor | None,
    padding: Tensor | None,
    strides: list[int],
    length: int,
    offset: int,
    chunks: int,
    scale: float,
    gradient: bool,
    flags: dict[str, Any],
    size: dict[str, int],
) -> Tensor:
    """Running sums over chunks (B heads, N + 1, D + c, E + 1); backwards for the gradient."""
    heads, rows, columns = x.shape[0] * x.shape[1], flags["D"] + flags["CONSTANT"], flags["E"] + 1
    sums = torch.empty(heads, chunks, rows, columns, dtype=torch.float32, device=x.device)
    running = torch.empty(heads, chunks + 1, rows, columns, dtype=torch.float32, device=x.device)
    if chunks:
        _sums[(heads * chunks,)](
            x, y, out, total, padding, sums, *strides, x.shape[1], length, offset, chunks, scale,
            PAD=padding is not None, GRADIENT=gradient, **flags, **size,
        )  # fmt: skip
    number = rows * columns
    _running[(heads * blocks_of(number, 128),)](
        sums, running, chunks, number, REVERSE=gradient, GROUP=16, BLOCK=128, num_warps=4
    )
    return running


def _launch(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, unit: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], list[int], dict[str, Any], dict[str, int]]:
    """Tensors as the kernels read them, strides of the padding, compile-time switches, and sizes of tiles."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    keys = None if padding is None else padding.to(torch.int8).contiguous()
    apart = [0, 0] if keys is None else [0 if keys.shape[axis] == 1 else keys.stride(axis) for axis in (0, 1)]
    flags = {
        "D": q.shape[3],
        "E": v.shape[3],
        "CONSTANT": int(unit),
        "UNIT": unit,
        "PRECISION": "tf32" if q.dtype == torch.bfloat16 else "tf32x3",
    }
    widths = [tile_width(x.shape[3]) for x in (q, v)]
    size = {"C": chunk_for(q, v), "BLOCK_D": widths[0], "BLOCK_E": widths[1]}
    return (q, k, v, keys), apart, flags, size | {"num_warps": WARPS if max(widths) <= 64 else 8, "num_stages": 1}
