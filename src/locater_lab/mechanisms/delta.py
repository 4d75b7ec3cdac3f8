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

import torch
from torch import Tensor
from torch.nn import functional

from locater.errors import LocaterError
from locater_lab.mechanisms.inputs import Inputs, unit_length
from locater_lab.mechanisms.kernels.delta import chunk_scan, delta_rule, has_delta_kernel

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
