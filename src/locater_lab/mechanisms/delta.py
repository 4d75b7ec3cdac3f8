"""The delta rule (DeltaNet), and with decay (Gated DeltaNet): a memory that is corrected, not only added to.

M_t = a_t M_{t-1} + k_t u_t^T, u_t = beta_t (v_t - a_t M_{t-1}^T k_t), o_t = scale M_t^T q_t, with M (D, E), |q| = |k| =
1 and a_t = exp(log_decay_t), which is 1 for the plain rule. What is stored under a key is replaced when beta = 1.

In a chunk of C tokens that starts from M_0, with g_i the sum of log decays up to i, and G_ij = exp(g_i - g_j), j <= i:
    (I + L) u = beta (v - exp(g) k M_0),  L_ij = beta_i G_ij k_i.k_j for j < i
    o = scale (exp(g) q M_0 + (G * q k^T) u),  M_C = exp(g_C) M_0 + sum_j exp(g_C - g_j) k_j u_j^T
so a chunk is one triangular solve. Only M and u follow from chunk to chunk, by one kernel on a GPU and a loop of T / C
steps elsewhere; the rest is done for all chunks at once. Time and memory grow as T.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from locater.errors import LocaterError
from locater.kernels.dispatch import has_triton, runs_on_kernel
from locater_lab.mechanisms.mechanism_record import Inputs, unit_length

CHUNK = 64  # tokens


def delta_attention(x: Inputs, *, beta: Tensor, normalise: bool = True) -> Tensor:
    """`beta` (B, K, S): the share of a key's value that is replaced, 0 to 1. Without `normalise` q and k are taken as
    they are.

    >>> from locater_lab.mechanisms import mechanism
    >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, None]  # the first key comes again
    >>> beta = torch.ones(1, 1, 3)                                          # and replaces its first value
    >>> mechanism("delta").map(k, k, causal=True, beta=beta)[0, 0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    _check_gates(x, beta=beta)
    if has_delta_kernel(x.q, x.v):
        return _by_kernel(x, beta, None, normalise)
    return gated_delta_attention(x, beta=beta, log_decay=torch.zeros_like(beta), normalise=normalise)


def delta_map(x: Inputs, *, beta: Tensor, normalise: bool = True) -> Tensor:
    return gated_delta_map(x, beta=beta, log_decay=torch.zeros_like(beta), normalise=normalise)


def gated_delta_attention(x: Inputs, *, beta: Tensor, log_decay: Tensor, normalise: bool = True) -> Tensor:
    """`log_decay` (B, K, S), at most 0: the log of the factor by which the memory decays at each token. A padded key
    leaves the memory alone.
    """
    _check_gates(x, beta=beta, log_decay=log_decay)
    if has_delta_kernel(x.q, x.v):
        return _by_kernel(x, beta, log_decay, normalise)
    q, k, v, beta, decay = _prepare_operands(x, beta, log_decay, normalise)
    chunk = min(CHUNK, x.S)
    short = -x.S % chunk
    # (B, K, G or 1, N, C, D or E)
    q, k, v = (functional.pad(y, (0, 0, 0, short)).unflatten(-2, (-1, chunk)) for y in (q, k, v))
    # (..., N, C, 1)
    beta, decay = (functional.pad(y, (0, short)).unflatten(-1, (-1, chunk))[..., None] for y in (beta, decay))
    gap, lower = _chunk_matrices(k, beta, decay)
    since = decay.cumsum(-2).exp()  # of what the chunk started from
    right = torch.cat([beta * v, beta * since * k], -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    own, carried = solved.split([v.shape[-1], k.shape[-1]], -1)
    near, far = gap * (q @ k.mT), since * q
    keys = gap[..., -1, :, None] * k  # decayed to the end of the chunk
    lead = torch.broadcast_shapes(own.shape[:4], keys.shape[:4], since.shape[:4])
    parts = (y.expand(*lead, *y.shape[4:]) for y in (own, carried, keys, since[..., -1, 0]))
    memory, new = chunk_scan(*parts)  # what each chunk starts from, and u
    out = far @ memory + near @ new
    return out.flatten(-3, -2).flatten(1, 2)[:, :, x.S - x.T : x.S].to(x.v.dtype)


def gated_delta_map(x: Inputs, *, beta: Tensor, log_decay: Tensor, normalise: bool = True) -> Tensor:
    """scale (G * q k^T) (I + L)^-1 diag(beta): what each value counts for in each output, overwriting included."""
    _check_gates(x, beta=beta, log_decay=log_decay)
    q, k, _, beta, decay = _prepare_operands(x, beta, log_decay, normalise)
    gap, lower = _chunk_matrices(k, beta[..., None], decay[..., None])
    inverse = torch.linalg.solve_triangular(lower, torch.diag_embed(beta), upper=False, unitriangular=True)
    out = (gap * (q @ k.mT)) @ inverse
    return out.flatten(1, 2)[:, :, x.S - x.T :]


def _check_gates(x: Inputs, **gates: Tensor) -> None:
    shape = tuple(x.k.shape[:3])
    for name, gate in gates.items():
        if tuple(gate.shape) != shape:
            raise LocaterError(f"{name} has shape {list(gate.shape)}, not {list(shape)} (batch, key heads, keys)")


def _by_kernel(x: Inputs, beta: Tensor, log_decay: Tensor | None, normalise: bool) -> Tensor:
    keys = x.real_keys()
    return delta_rule(
        x.q,
        x.k,
        x.v,
        beta=beta,
        log_decay=log_decay,
        scale=x.scale_or(1.0),
        unit=normalise,
        keys=None if keys is None else keys[:, :, 0],
    )


def _chunk_matrices(k: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """G and L of k (..., C, D) with beta and decay (..., C, 1)."""
    total = decay.cumsum(-2)
    causal = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device).tril()
    gap = (total - total.mT).masked_fill(~causal, -torch.inf).exp()  # masked before: above the diagonal it may overflow
    return gap, (beta * gap * (k @ k.mT)).tril(-1)


def _prepare_operands(
    x: Inputs, beta: Tensor, log_decay: Tensor, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q (B, K, G, S, D) with zeros where keys came before; k, v (B, K, 1, S, ...); beta and decay (B, K, G or 1, S), 0
    for padding.
    """
    q, k, v, keep = x.grouped_by_key_head()
    if normalise:
        q, k = unit_length(q), unit_length(k)
    q = functional.pad(q * x.scale_or(1.0), (0, 0, x.S - x.T, 0))
    gates = [y.to(k)[:, :, None] for y in (beta, log_decay)]
    if keep is not None:
        gates = [y.masked_fill(~keep[..., 0], 0.0) for y in gates]
    return q, k, v, gates[0], gates[1]


WIDEST = 128  # channels of queries and of values: a program keeps a dozen tiles of a chunk


def has_delta_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether `delta_rule` can take them: on CUDA, up to 128 channels, not float64."""
    return runs_on_kernel(q, v, WIDEST)


def delta_rule(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    beta: Float[Tensor, "B K S"],
    log_decay: Float[Tensor, "B K S"] | None,
    scale: float,
    unit: bool,
    keys: Bool[Tensor, "b h S"] | None = None,
) -> Float[Tensor, "B H T E"]:
    """scale M_t^T q_t with M_t = a M_{t-1} + k_t u_t^T, u_t = beta_t (v_t - a M_{t-1}^T k_t), a = exp(log_decay_t).

    With `unit` q and k are divided by their lengths. `keys` is False for tokens that leave M alone. M is carried on in
    float32. Of bfloat16 operands, products are of bfloat16 and summed in float32, and those of the triangular solve in
    TF32; of others all products are in float32 (three TF32 products).
    """
    if keys is not None and keys.shape[1] > 1 and q.shape[1] != k.shape[1]:  # heads of a group see different keys
        group = q.shape[1] // k.shape[1]
        k, v, beta = (x.repeat_interleave(group, 1) for x in (k, v, beta))
        log_decay = None if log_decay is None else log_decay.repeat_interleave(group, 1)
    out: Tensor = _rule(q, k, v, beta, log_decay, keys, scale, unit)[0]
    return out


@torch.library.custom_op("locater::delta_rule", mutates_args=())
def _rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, keys: Tensor | None, scale: float, unit: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_delta

    out, (states, own, carried, step, kept, inverse) = triton_delta.forward(q, k, v, beta, decay, keys, scale, unit)
    return out, states, own, carried, step, kept, inverse


@_rule.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, keys: Tensor | None, scale: float, unit: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels.triton_delta import chunk_for

    B, K, S, D = k.shape
    E, C = v.shape[3], chunk_for(q, v)
    chunks = -(-S // C)
    shapes = [(D, E), (C, E), (C, D), (D, D), (), (C, C)]
    kind = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    states, own, carried, step, kept, inverse = (
        q.new_empty((B * K, chunks, *shape), dtype=kind if shape else torch.float32) for shape in shapes
    )
    return q.new_empty((*q.shape[:3], E)), states, own, carried, step, kept, inverse


@torch.library.custom_op("locater::delta_rule_gradient", mutates_args=())
def _rule_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    keys: Tensor | None,
    saved: list[Tensor],
    grad: Tensor,
    scale: float,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_delta

    return triton_delta.backward(q, k, v, beta, decay, keys, saved, grad, scale, unit)


@_rule_gradient.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (q, k, v, beta, beta.new_empty(0) if decay is None else decay)
    dq, dk, dv, dbeta, ddecay = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
    return dq, dk, dv, dbeta, ddecay


def _save_rule(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale, unit = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of what is kept for the gradient nobody needs one
    ctx.numbers = scale, unit
    ctx.save_for_backward(*tensors, *output[1:])


def _rule_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, beta, decay, keys, *saved = ctx.saved_tensors
    *grads, ddecay = _rule_gradient(q, k, v, beta, decay, keys, saved, grad, *ctx.numbers)
    return *grads, None if decay is None else ddecay, None, None, None


_rule.register_autograd(_rule_backward, setup_context=_save_rule)


# ---- The recurrence over chunks ----
# Triton on CUDA, a loop in PyTorch elsewhere.


WIDEST_MEMORY = 128  # channels of a memory's side that a program keeps


def chunk_scan(
    own: Float[Tensor, "*heads N C E"],
    carried: Float[Tensor, "*heads N C D"],
    keys: Float[Tensor, "*heads N C D"],
    decay: Float[Tensor, "*heads N"],
) -> tuple[Float[Tensor, "*heads N D E"], Float[Tensor, "*heads N C E"]]:
    """M_n, which every chunk begins with, and new_n = own_n - carried_n M_n, where M_{n+1} = decay_n M_n + keys_n^T
    new_n and M_0 = 0.

    >>> ones = torch.ones(1, 3, 1, 1)
    >>> chunk_scan(ones, 0.5 * ones, ones, torch.ones(1, 3))[0].flatten()          # M + (1 - M / 2)
    tensor([0.0000, 1.0000, 1.5000])
    """
    if own.device.type == "cuda" and own.dtype == torch.float32 and keys.shape[-1] <= WIDEST_MEMORY and has_triton():
        lead = own.shape[:-3]
        flat = (x.reshape(-1, *x.shape[len(lead) :]).contiguous() for x in (own, carried, keys, decay))
        begin, new_values = _scan(*flat)
        return begin.unflatten(0, lead), new_values.unflatten(0, lead)
    memory = own.new_zeros(*own.shape[:-3], keys.shape[-1], own.shape[-1])
    states, new = [], []
    for n in range(own.shape[-3]):
        states.append(memory)
        new.append(own[..., n, :, :] - carried[..., n, :, :] @ memory)
        memory = decay[..., n, None, None] * memory + keys[..., n, :, :].mT @ new[-1]
    return torch.stack(states, -3), torch.stack(new, -3)


@torch.library.custom_op("locater::chunk_scan", mutates_args=())
def _scan(own: Tensor, carried: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_recurrence

    return triton_recurrence.forward(own, carried, keys, decay)


@_scan.register_fake
def _(own: Tensor, carried: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    return own.new_empty(*own.shape[:2], keys.shape[3], own.shape[3]), torch.empty_like(own)


@torch.library.custom_op("locater::chunk_scan_gradient", mutates_args=())
def _scan_gradient(
    carried: Tensor, keys: Tensor, decay: Tensor, dstates: Tensor, dnew: Tensor
) -> tuple[Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_recurrence

    return triton_recurrence.backward(carried, keys, decay, dstates.contiguous(), dnew.contiguous())


@_scan_gradient.register_fake
def _(carried: Tensor, keys: Tensor, decay: Tensor, dstates: Tensor, dnew: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dstates, memory_format=torch.contiguous_format), torch.empty_like(
        dnew, memory_format=torch.contiguous_format
    )


def _save_scan(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[1:], *output)


def _scan_backward(ctx: Any, dstates: Tensor, dnew: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    carried, keys, decay, states, new = ctx.saved_tensors
    grads, down = _scan_gradient(carried, keys, decay, dstates, dnew)
    return down, -down @ states.mT, new @ grads.mT, (grads * states).sum((-2, -1))


_scan.register_autograd(_scan_backward, setup_context=_save_scan)
