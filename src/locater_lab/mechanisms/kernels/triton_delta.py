"""The gated delta rule in Triton: what every chunk of C tokens needs, the recurrence over chunks, the output; gradients.

As in `locater_lab.mechanisms.delta`, with g_i the sum of log decays up to token i and G_ij = exp(g_i - g_j) for j <= i:
    A = I + L, L_ij = b_i G_ij k_i.k_j for j < i;   own = A^-1 (b v),   carried = A^-1 (b exp(g) k),   keys = G_Cj k_j
    new = own - carried M,   out = exp(g) q M + (G * q k^T) new,   M of the next chunk = exp(g_C) M + keys^T new
q and k are of length 1 where UNIT says so, and q is scaled. Chunks wait for each other in the last equation alone, so
it is written as exp(g_C) M - (keys^T carried) M + keys^T own: one small product a step, and all else for all chunks at
once.
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
def gates(Beta, Decay, Pad, pb, ph, b, h, head, j, S, DECAY: tl.constexpr, PAD: tl.constexpr):
    """Shares b_j and sums g_j of log decays over a chunk, and which keys count; padded keys have 0."""
    seen = j < S
    if PAD:
        seen = seen & (tl.load(Pad + b * pb + h * ph + j, mask=seen, other=0) != 0)
    beta = tl.load(Beta + head * S + j, mask=seen, other=0.0).to(tl.float32)
    total = tl.zeros_like(beta)
    if DECAY:
        total = tl.cumsum(tl.load(Decay + head * S + j, mask=seen, other=0.0).to(tl.float32), 0)
    return beta, total, seen


@triton.jit
def last(x, C: tl.constexpr):
    """The last of C numbers."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0), 0)


@triton.jit
def gaps(total, C: tl.constexpr, DECAY: tl.constexpr):
    """G: exp(g_i - g_j) for j <= i, 0 above the diagonal."""
    c = tl.arange(0, C)
    causal = c[None, :] <= c[:, None]
    gap = causal.to(tl.float32)
    if DECAY:  # masked before: above the diagonal it may overflow
        gap = tl.where(causal, tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0)), 0.0)
    return gap


@triton.jit
def scaled_rows(rows, scale, UNIT: tl.constexpr):
    """scale x, or scale x / |x|."""
    x = rows.to(tl.float32) * scale
    if UNIT:
        x = x * inverse_length(rows, True)[:, None]
    return x


@triton.jit
def product(a, b, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """a b of operands in KIND, summed in float32."""
    return tl.dot(a.to(KIND), b.to(KIND), input_precision=PRECISION)


@triton.jit
def _inverse(lower, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular matrix (C, C), C = 2^LEVELS.

    With X the inverses of blocks of b rows along the diagonal, those of 2 b rows are X - X B X, B what is below the
    blocks of b. No power of `lower` is taken: these may grow by far before they vanish.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    inverse = (i == j).to(tl.float32) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        apart = (i >> level != j >> level) & (i >> (level + 1) == j >> (level + 1))
        below = tl.where(apart, lower, 0.0)
        step = tl.dot(below, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, step, input_precision=PRECISION)
    return inverse


@triton.jit
def _prepare(K, V, Beta, Decay, Pad, Own, Carried, Step, Added, Kept, Inverse, kb, kh, kt, vb, vh, vt, pb, ph, HEADS, S,
             chunks, D: tl.constexpr, E: tl.constexpr, UNIT: tl.constexpr, DECAY: tl.constexpr, PAD: tl.constexpr,
             PRECISION: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, n = program_of(HEADS, chunks)
    c = tl.arange(0, C)
    j = n * C + c
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    beta, total, _ = gates(Beta, Decay, Pad, pb, ph, b, h, head, j, S, DECAY, PAD)
    k = scaled_rows(rows_of(K + b * kb + h * kh, j, kt, d, D, j < S), 1.0, UNIT)
    v = rows_of(V + b * vb + h * vh, j, vt, e, E, j < S).to(tl.float32)
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    lower = beta[:, None] * gaps(total, C, DECAY) * products
    inverse = _inverse(tl.where(c[None, :] < c[:, None], lower, 0.0), C, LEVELS, PRECISION)
    at = (head * chunks + n) * C + c[:, None]
    tl.store(Inverse + at * C + c[None, :], inverse.to(KIND))
    end = last(total, C)
    tl.store(Kept + head * chunks + n, tl.exp(end))
    keys = tl.trans(tl.exp(end - total)[:, None] * k)
    rows = (head * chunks + n) * D + d[:, None]
    own = product(inverse, beta[:, None] * v, KIND, PRECISION).to(KIND)
    tl.store(Own + at * E + e[None, :], own, mask=(e < E)[None, :])
    added = product(keys, own, KIND, PRECISION)
    tl.store(Added + rows * E + e[None, :], added.to(KIND), mask=(d < D)[:, None] & (e < E)[None, :])
    carried = product(inverse, (beta * tl.exp(total))[:, None] * k, KIND, PRECISION).to(KIND)
    tl.store(Carried + at * D + d[None, :], carried, mask=(d < D)[None, :])
    step = product(keys, carried, KIND, PRECISION)
    tl.store(Step + rows * D + d[None, :], step.to(KIND), mask=(d < D)[:, None] & (d < D)[None, :])


@triton.jit
def _scan(Step, Added, Kept, States, chunks, D: tl.constexpr, E: tl.constexpr, REVERSE: tl.constexpr,
          KIND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """M at the start of every chunk, some columns of it: M <- kept M - step M + added. With REVERSE from the last chunk
    to the first, as its gradient is.
    """
    columns = tl.cdiv(E, BLOCK_E)
    head = (tl.program_id(0) // columns).to(tl.int64) * chunks
    d = tl.arange(0, BLOCK_D)
    e = (tl.program_id(0) % columns) * BLOCK_E + tl.arange(0, BLOCK_E)
    tile = (d < D)[:, None] & (e < E)[None, :]
    square = (d < D)[:, None] & (d < D)[None, :]
    state = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    for turn in range(chunks):
        at = head + (chunks - 1 - turn if REVERSE else turn)
        where = (at * D + d[:, None]) * E + e[None, :]
        step = tl.load(Step + (at * D + d[:, None]) * D + d[None, :], mask=square, other=0.0)
        added = tl.load(Added + where, mask=tile, other=0.0)
        tl.store(States + where, state.to(KIND), mask=tile)
        state = tl.load(Kept + at) * state + added - product(step, state, KIND, PRECISION)


@triton.jit
def state_and_new(States, Own, Carried, at, d, e, D: tl.constexpr, E: tl.constexpr, KIND: tl.constexpr,
                   PRECISION: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """M that a chunk starts from, and new."""
    c = tl.arange(0, C)[:, None]
    tile = (d < D)[:, None] & (e < E)[None, :]
    state = tl.load(States + (at * D + d[:, None]) * E + e[None, :], mask=tile, other=0.0)
    own = tl.load(Own + (at * C + c) * E + e[None, :], mask=(e < E)[None, :], other=0.0)
    carried = tl.load(Carried + (at * C + c) * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    return state, own - product(carried, state, KIND, PRECISION)


@triton.jit
def _output(Q, K, Beta, Decay, Pad, States, Own, Carried, Out, qb, qh, qt, kb, kh, kt, pb, ph, H, GROUP, T, S, chunks,
            first, scale, D: tl.constexpr, E: tl.constexpr, UNIT: tl.constexpr, DECAY: tl.constexpr, PAD: tl.constexpr,
            PRECISION: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BLOCK_D: tl.constexpr,
            BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, block = program_of(H, chunks - first)
    n = first + block
    c = tl.arange(0, C)
    j = n * C + c
    i = j - (S - T)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    real = (i >= 0) & (i < T)
    of_keys = b * (H // GROUP) + h // GROUP
    _, total, _ = gates(Beta, Decay, Pad, pb, ph, b, h // GROUP, of_keys, j, S, DECAY, PAD)
    q = scaled_rows(rows_of(Q + b * qb + h * qh, i, qt, d, D, real), scale, UNIT)
    k = scaled_rows(rows_of(K + b * kb + (h // GROUP) * kh, j, kt, d, D, j < S), 1.0, UNIT)
    at = of_keys * chunks + n
    state, new = state_and_new(States, Own, Carried, at, d, e, D, E, KIND, PRECISION, C)
    near = gaps(total, C, DECAY) * product(q, tl.trans(k), KIND, PRECISION)
    out = product(tl.exp(total)[:, None] * q, state, KIND, PRECISION) + product(near, new, KIND, PRECISION)
    where = Out + (head * T + i[:, None]) * E + e[None, :]
    tl.store(where, out.to(Out.dtype.element_ty), mask=real[:, None] & (e < E)[None, :])


CHUNK = 64
# operands of products, and what is kept of a chunk; all others are float32. float16 has too small a range for gradients
KINDS = {torch.bfloat16: tl.bfloat16}
WARPS = {"prepare": 4, "output": 4, "outside": 4, "inside": 8}
NARROWEST = 64  # columns of a tile: with fewer, Triton 3.6 compiles kernels that read and write at wrong addresses
COLUMNS = 16  # of M for a program of the recurrence: few, so that there are many programs
# of the recurrence, up to 64 channels and above
STEPS = [{"num_warps": 2, "num_stages": 3}, {"num_warps": 4, "num_stages": 2}]


def chunk_for(q: Tensor, v: Tensor) -> int:
    """Tokens of a chunk: half as many where M takes more room."""
    return CHUNK if q.dtype in KINDS or max(q.shape[3], v.shape[3]) <= 64 else CHUNK // 2


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    padding: Tensor | None,
    scale: float,
    unit: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The output (B, H, T, E); and states, own, carried, steps, kept and the inverse of every chunk of keys."""
    B, H, T, D = q.shape
    K, S, E = v.shape[1:]
    (q, k, v, beta, decay, padding), apart, flags, size = launch(q, k, v, beta, decay, padding, unit)
    C, kind = size["C"], k.dtype if flags["KIND"] != tl.float32 else torch.float32
    chunks = blocks_of(S, C)
    own, carried, inverse = (torch.empty(B * K, chunks, C, n, dtype=kind, device=q.device) for n in (E, D, C))
    step, added = (torch.empty(B * K, chunks, D, n, dtype=kind, device=q.device) for n in (D, E))
    kept = torch.empty(B * K, chunks, dtype=torch.float32, device=q.device)
    _prepare[(chunks * B * K,)](
        k, v, beta, decay, padding, own, carried, step, added, kept, inverse, *k.stride()[:3], *v.stride()[:3], *apart,
        K, S, chunks, **flags, **size, num_warps=warps_for("prepare", size),
    )  # fmt: skip
    states = scan(step, added, kept, False, flags)
    out = torch.empty(B, H, T, E, dtype=v.dtype, device=q.device)
    first = (S - T) // C
    if T:
        _output[((chunks - first) * B * H,)](
            q, k, beta, decay, padding, states, own, carried, out, *q.stride()[:3], *k.stride()[:3], *apart, H, H // K,
            T, S, chunks, first, scale, **flags, **size, num_warps=warps_for("output", size),
        )  # fmt: skip
    return out, [states, own, carried, step, kept, inverse]


def warps_for(kernel: str, size: dict[str, int]) -> int:
    """More for wide tiles, which one thread would have too much of."""
    return WARPS[kernel] if max(size["BLOCK_D"], size["BLOCK_E"]) <= 64 else 8


def scan(step: Tensor, added: Tensor, kept: Tensor, reverse: bool, flags: dict[str, Any]) -> Tensor:
    """M of all chunks (B K, N, D, E), or backwards its gradients."""
    heads, chunks, D, E = added.shape
    states = torch.empty_like(added)
    _scan[(blocks_of(E, COLUMNS) * heads,)](
        step, added, kept, states, chunks, D=D, E=E, REVERSE=reverse, KIND=flags["KIND"], PRECISION=flags["PRECISION"],
        BLOCK_D=max(tile_width(D), NARROWEST), BLOCK_E=COLUMNS, **STEPS[D > 64],
    )  # fmt: skip
    return states


def launch(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, padding: Tensor | None, unit: bool
) -> tuple[tuple[Any, ...], list[int], dict[str, Any], dict[str, int]]:
    """Tensors as the kernels read them, strides of the padding, compile-time switches, and sizes of tiles."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    beta, decay = beta.contiguous(), None if decay is None else decay.contiguous()
    padding = None if padding is None else padding.to(torch.int8).contiguous()
    apart = [0, 0] if padding is None else [0 if padding.shape[axis] == 1 else padding.stride(axis) for axis in (0, 1)]
    flags = {
        "D": q.shape[3],
        "E": v.shape[3],
        "UNIT": unit,
        "DECAY": decay is not None,
        "PAD": padding is not None,
        "PRECISION": "tf32" if q.dtype == torch.bfloat16 else "tf32x3",
        "KIND": KINDS.get(q.dtype, tl.float32),
    }
    widths = [max(tile_width(x.shape[3]), NARROWEST) for x in (q, v)]
    C = chunk_for(q, v)
    size = {"C": C, "LEVELS": C.bit_length() - 1, "BLOCK_D": widths[0], "BLOCK_E": widths[1], "num_stages": 1}
    return (q, k, v, beta, decay, padding), apart, flags, size


# ---- The gradient ----
# Of the output (first kernel), of the recurrence (`scan` backwards), and of all that a chunk was made of (second kernel).
#
# What M and new receive from the output of their chunk are dM and dnew. With H the gradient of M at the end of a chunk,
# that at its start is exp(g_C) H - (keys^T carried)^T H + dM - carried^T dnew; and with down = dnew + keys H:
#     d(b v) = A^-T down,   d(b exp(g) k) = -A^-T down M^T,   dA = -(d(b v) own^T + d(b exp(g) k) carried^T),
#     dkeys = new H^T,   d(q k^T) = G * (do new^T)
# and from these dq, dk, dv, db and the gradient of every g_i, summed up from the end of the chunk to that of its log
# decay.


@triton.jit
def _outside(Q, K, Beta, Decay, Pad, Do, Carried, Step, Added, Dnew, Turned, qb, qh, qt, kb, kh, kt, pb, ph, HEADS,
             GROUP, T, S, chunks, scale, D: tl.constexpr, E: tl.constexpr, UNIT: tl.constexpr, DECAY: tl.constexpr,
             PAD: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
             BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """dM - carried^T dnew, and dnew, over the query heads that share a chunk of keys; and its step transposed."""
    b, h, head, n = program_of(HEADS, chunks)
    c = tl.arange(0, C)
    j = n * C + c
    i = j - (S - T)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    real = (i >= 0) & (i < T)
    _, total, _ = gates(Beta, Decay, Pad, pb, ph, b, h, head, j, S, DECAY, PAD)
    gap = gaps(total, C, DECAY)
    k = scaled_rows(rows_of(K + b * kb + h * kh, j, kt, d, D, j < S), 1.0, UNIT)
    dstate = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    dnew = tl.zeros([C, BLOCK_E], tl.float32)
    for member in range(GROUP):
        own = h * GROUP + member
        q = scaled_rows(rows_of(Q + b * qb + own * qh, i, qt, d, D, real), scale, UNIT)
        do = rows_of(Do + (head * GROUP + member) * T * E, i, E, e, E, real).to(tl.float32)
        near = gap * product(q, tl.trans(k), KIND, PRECISION)
        dnew += product(tl.trans(near), do, KIND, PRECISION)
        dstate += product(tl.trans(tl.exp(total)[:, None] * q), do, KIND, PRECISION)
    at = head * chunks + n
    tl.store(Dnew + (at * C + c[:, None]) * E + e[None, :], dnew.to(KIND), mask=(e < E)[None, :])
    carried = tl.load(Carried + (at * C + c[:, None]) * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    dstate -= product(tl.trans(carried), dnew, KIND, PRECISION)
    square = (d < D)[:, None] & (d < D)[None, :]
    where = (at * D + d[:, None]) * D + d[None, :]
    tl.store(Turned + where, tl.trans(tl.load(Step + where, mask=square, other=0.0)), mask=square)
    where = Added + (at * D + d[:, None]) * E + e[None, :]
    tl.store(where, dstate.to(KIND), mask=(d < D)[:, None] & (e < E)[None, :])


@triton.jit
def _inside(Q, K, V, Beta, Decay, Pad, Do, States, Own, Carried, Inverse, Grads, Dnew, Dq, Dk, Dv, Dbeta, Ddecay,
            qb, qh, qt, kb, kh, kt, vb, vh, vt, pb, ph, HEADS, GROUP, T, S, chunks, scale, D: tl.constexpr,
            E: tl.constexpr, UNIT: tl.constexpr, DECAY: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
            KIND: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BLOCK_D: tl.constexpr,
            BLOCK_E: tl.constexpr):  # fmt: skip
    b, h, head, n = program_of(HEADS, chunks)
    c = tl.arange(0, C)
    j = n * C + c
    i = j - (S - T)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    real = (i >= 0) & (i < T)
    square = (d < D)[:, None] & (e < E)[None, :]
    beta, total, seen = gates(Beta, Decay, Pad, pb, ph, b, h, head, j, S, DECAY, PAD)
    since = tl.exp(total)
    until = tl.exp(last(total, C) - total)
    gap = gaps(total, C, DECAY)
    raw = rows_of(K + b * kb + h * kh, j, kt, d, D, j < S)
    k = scaled_rows(raw, 1.0, UNIT)
    v = rows_of(V + b * vb + h * vh, j, vt, e, E, j < S).to(tl.float32)
    at = head * chunks + n
    of_e = (at * C + c[:, None]) * E + e[None, :]
    of_d = (at * C + c[:, None]) * D + d[None, :]
    of_state = (at * D + d[:, None]) * E + e[None, :]
    state, new = state_and_new(States, Own, Carried, at, d, e, D, E, KIND, PRECISION, C)
    # the recurrence: keys and the decay of a whole chunk
    grad = tl.load(Grads + of_state, mask=square, other=0.0)
    dkeys = product(new, tl.trans(grad), KIND, PRECISION)
    dk = until[:, None] * dkeys
    duntil = tl.sum(dkeys * k, 1) * until
    dend = tl.sum(grad.to(tl.float32) * state.to(tl.float32), 1) * tl.exp(last(total, C))  # to be added up
    dtotal = -duntil
    # the triangular solve
    inverse = tl.trans(tl.load(Inverse + (at * C + c[:, None]) * C + c[None, :]))
    down = tl.load(Dnew + of_e, mask=(e < E)[None, :], other=0.0)
    down += product(until[:, None] * k, grad, KIND, PRECISION)
    right = product(inverse, down, KIND, PRECISION)  # the gradient of b v
    own = tl.load(Own + of_e, mask=(e < E)[None, :], other=0.0)
    dlower = product(right, tl.trans(own), KIND, PRECISION)
    dbeta = tl.sum(right * v, 1)
    tl.store(Dv + (head * S + j[:, None]) * E + e[None, :], (beta[:, None] * right).to(Dv.dtype.element_ty),
             mask=(j < S)[:, None] & (e < E)[None, :])  # fmt: skip
    dcarried = -product(down, tl.trans(state), KIND, PRECISION)
    right = product(inverse, dcarried, KIND, PRECISION)  # the gradient of b exp(g) k
    carried = tl.load(Carried + of_d, mask=(d < D)[None, :], other=0.0)
    dlower += product(right, tl.trans(carried), KIND, PRECISION)
    dlower = tl.where(c[None, :] < c[:, None], -dlower, 0.0) * gap
    along = tl.sum(right * k, 1) * since
    dbeta += along
    dtotal += along * beta
    dk += (beta * since)[:, None] * right
    products = product(k, tl.trans(k), KIND, PRECISION)
    slopes = dlower * products
    dbeta += tl.sum(slopes, 1)
    dgap = beta[:, None] * slopes  # times G already
    dlower = beta[:, None] * dlower
    dk += product(dlower + tl.trans(dlower), k, KIND, PRECISION)
    # outputs of the query heads that share these keys
    for member in range(GROUP):
        first = (head * GROUP + member) * T
        raw_q = rows_of(Q + b * qb + (h * GROUP + member) * qh, i, qt, d, D, real)
        q = scaled_rows(raw_q, scale, UNIT)
        do = rows_of(Do + first * E, i, E, e, E, real).to(tl.float32)
        dnear = gap * product(do, tl.trans(new), KIND, PRECISION)
        dgap += dnear * product(q, tl.trans(k), KIND, PRECISION)
        far = since[:, None] * product(do, tl.trans(state), KIND, PRECISION)
        dtotal += tl.sum(far * q, 1)
        dk += product(tl.trans(dnear), q, KIND, PRECISION)
        dq = (far + product(dnear, k, KIND, PRECISION)) * scale
        if UNIT:
            dq = through_length(dq, raw_q, inverse_length(raw_q, True), True)
        where = Dq + (first + i[:, None]) * D + d[None, :]
        tl.store(where, dq.to(Dq.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])
    if UNIT:
        dk = through_length(dk, raw, inverse_length(raw, True), True)
    tl.store(Dk + (head * S + j[:, None]) * D + d[None, :], dk.to(Dk.dtype.element_ty),
             mask=(j < S)[:, None] & (d < D)[None, :])  # fmt: skip
    tl.store(Dbeta + head * S + j, tl.where(seen, dbeta, 0.0).to(Dbeta.dtype.element_ty), mask=j < S)
    if DECAY:
        dtotal += tl.sum(dgap, 1) - tl.sum(dgap, 0)
        # from each token on. Not by sums of vectors, which Triton 3.7.1 cannot lay out for sm_100
        later = tl.where(c[None, :] >= c[:, None], dtotal[None, :], 0.0)
        ddecay = tl.sum(later + duntil[None, :], 1) + tl.sum(tl.broadcast_to(dend[None, :], [C, BLOCK_D]), 1)
        tl.store(Ddecay + head * S + j, tl.where(seen, ddecay, 0.0).to(Ddecay.dtype.element_ty), mask=j < S)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    padding: Tensor | None,
    saved: list[Tensor],
    grad: Tensor,
    scale: float,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbeta, and ddecay (of no size without decay); `saved` is what `triton_delta.forward` returned."""
    states, own, carried, step, kept, inverse = saved
    B, H, T, _ = q.shape
    K, S, _ = v.shape[1:]
    grad = grad.contiguous()
    dq, dk, dv, dbeta = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, beta))
    ddecay = beta.new_empty(0) if decay is None else torch.empty_like(decay, memory_format=torch.contiguous_format)
    (q, k, v, beta, decay, padding), apart, flags, size = launch(q, k, v, beta, decay, padding, unit)
    chunks = blocks_of(S, size["C"])
    added, dnew, turned = torch.empty_like(states), torch.empty_like(own), torch.empty_like(step)
    grid, numbers = (chunks * B * K,), [K, H // K, T, S, chunks, scale]
    _outside[grid](
        q, k, beta, decay, padding, grad, carried, step, added, dnew, turned, *q.stride()[:3], *k.stride()[:3], *apart,
        *numbers, **flags, **size, num_warps=warps_for("outside", size),
    )  # fmt: skip
    grads = scan(turned, added, kept, True, flags)
    _inside[grid](
        q, k, v, beta, decay, padding, grad, states, own, carried, inverse, grads, dnew, dq, dk, dv, dbeta, ddecay,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *apart, *numbers, **flags, **size,
        num_warps=warps_for("inside", size),
    )  # fmt: skip
    return dq, dk, dv, dbeta, ddecay
