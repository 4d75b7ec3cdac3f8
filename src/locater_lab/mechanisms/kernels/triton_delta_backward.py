"""The gradient of the gated delta rule in Triton: of the output (first kernel), of the recurrence (`triton_delta.scan`
backwards), and of all that a chunk was made of (second kernel). Names are those of `triton_delta`.

What M and new receive from the output of their chunk are dM and dnew. With H the gradient of M at the end of a chunk,
that at its start is exp(g_C) H - (keys^T carried)^T H + dM - carried^T dnew; and with down = dnew + keys H:
    d(b v) = A^-T down,   d(b exp(g) k) = -A^-T down M^T,   dA = -(d(b v) own^T + d(b exp(g) k) carried^T),
    dkeys = new H^T,   d(q k^T) = G * (do new^T)
and from these dq, dk, dv, db and the gradient of every g_i, summed up from the end of the chunk to that of its log
decay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from locater_lab.mechanisms.kernels.triton_delta import (
    gaps,
    gates,
    last,
    launch,
    product,
    scaled_rows,
    scan,
    state_and_new,
    warps_for,
)
from locater_lab.mechanisms.kernels.triton_tiles import (
    blocks_of,
    inverse_length,
    program_of,
    rows_of,
    through_length,
)


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
