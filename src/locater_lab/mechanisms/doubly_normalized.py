"""Doubly normalized attention (Ding et al. 2020): over queries first, then over keys; so that no key is explained away.

E_ij = scale q_i.k_j; xi_ij = exp(E_ij) / sum_i' exp(E_i'j); A_ij = xi_ij / sum_j' xi_ij'. Every key receives at least
1/S in all: sum_i A_ij >= 1/S. The hybrid is u A + (1 - u) softmax(E), which gives at least u/S.

log xi_ij = E_ij - L_j with L_j = log sum_i exp(E_ij), so it is softmax attention with -L_j added to the logits of key
j. L is computed without a T x S matrix, and so is its gradient; on a GPU by kernels that do it all, elsewhere as one
more channel of fused attention. The sum runs over later queries too: it cannot be causal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.errors import LocaterError
from locater.kernels import Terms, row_statistics
from locater_lab.mechanisms.kernels.weighted import has_weighted_kernel
from locater_lab.mechanisms.mechanism_record import Inputs, head_values, widen
from locater_lab.mechanisms.softmax import (
    add_logit_term,
    fused_attention,
    logits,
    masked_softmax,
    softmax_attention,
    softmax_map,
)

BLOCK = 128  # keys at a time


def doubly_normalized_attention(x: Inputs) -> Tensor:
    """Two passes: L, then attention with -L added to the logits of each key. Padded queries do not count in L.

    >>> from locater_lab.mechanisms import mechanism
    >>> q, k = 20 * torch.randn(1, 1, 64, 4), torch.randn(1, 1, 64, 4)
    >>> bool(mechanism("doubly_normalized").map(q, k).sum(2).min() >= 1 / 64)
    True
    """
    if _has_kernel(x):
        return _by_kernel(x, None)
    scale = x.usual_scale
    ready = replace(x, k=x.per_query_head(x.k), v=x.per_query_head(x.v))
    shift = -_column_log_sums(ready)  # (B, H, S)
    return fused_attention(add_logit_term(ready, x.q.new_ones(1, 1, 1, 1), shift[..., None] / scale), scale)


def doubly_normalized_map(x: Inputs) -> Tensor:
    scores = logits(x, x.usual_scale)
    return masked_softmax(x, scores - _log_sum_over_queries(scores, _counting_queries(x))[:, :, None])


def hybrid_normalized_attention(x: Inputs, *, mix: float | Tensor) -> Tensor:
    """`mix` is u: a number, or one per query head (H,), from 0 (softmax) to 1 (doubly normalized)."""
    u = _check_mix(x, mix)
    # what the gradient costs is less for both at once; the output alone is more
    if _has_kernel(x) and torch.is_grad_enabled() and any(y.requires_grad for y in (x.q, x.k, x.v)):
        numbers = u.flatten() if isinstance(u, Tensor) else x.q.new_full((1,), u, dtype=torch.float32)
        return _by_kernel(x, numbers.expand(x.heads))
    both = softmax_attention(x), doubly_normalized_attention(x)
    return torch.lerp(*both, u.to(x.v.dtype) if isinstance(u, Tensor) else u)


def hybrid_normalized_map(x: Inputs, *, mix: float | Tensor) -> Tensor:
    u = _check_mix(x, mix)
    return u * doubly_normalized_map(x) + (1 - u) * softmax_map(x)


def _check_mix(x: Inputs, mix: float | Tensor) -> float | Tensor:
    if not isinstance(mix, Tensor) and not 0 <= mix <= 1:
        raise LocaterError(f"mix={mix}: a number from 0 (softmax) to 1 (doubly normalized)")
    u = head_values(mix, x, "mix")
    return widen(u) if isinstance(u, Tensor) else u


def _has_kernel(x: Inputs) -> bool:
    """Whether kernels that know of both sums can do it; they take masks of one row."""
    return not x.has_row_mask and has_weighted_kernel(x.q, x.v)


def _by_kernel(x: Inputs, mix: Tensor | None) -> Tensor:
    keys, real = x.real_keys(), x.real_queries()
    return doubly_attention(
        x.q,
        x.k,
        x.v,
        scale=x.usual_scale,
        mix=mix,
        keys=None if keys is None else keys[:, :, 0],
        rows=None if real is None else real[:, 0, :, 0],
    )


def _counting_queries(x: Inputs) -> Tensor:
    """(b, h, T, S): which queries count for a key."""
    real, seen = x.real_queries(), x.visible()
    return seen if real is None else seen & real


def _log_sum_over_queries(scores: Tensor, counted: Tensor) -> Tensor:
    """log sum_i exp(E_ij) over the queries that count, 0 where none does: (B, H, s)."""
    out = scores.masked_fill(~counted, torch.finfo(scores.dtype).min).logsumexp(2)
    return out.masked_fill(~counted.any(2), 0.0)


def _column_log_sums(x: Inputs) -> Tensor:
    """L (B, H, S). Its gradient is attention too, of keys to queries: with p_ij = exp(E_ij - L_j), dL_j/dk_j = scale
    sum_i p_ij q_i and dL_j/dq_i = scale p_ij k_j, which is what y_j = scale k_j.(sum_i p_ij q_i) has at fixed p."""
    real, scale = x.real_queries(), x.usual_scale
    shared = None if real is None else real.mT  # (B, 1, 1, T)
    seen = _counting_queries(x).mT if x.has_row_mask else shared  # of a key: queries that count
    out = _log_sums_without_gradient(x, seen)
    if not torch.is_grad_enabled():
        return out
    turned = Inputs(x.k.detach(), x.q.detach(), x.q, Terms(scale, mask=seen))
    y = _FirstDerivativeOnly.apply(scale * (widen(x.k) * widen(fused_attention(turned, scale))).sum(-1))
    return out + (y - y.detach())


class _FirstDerivativeOnly(torch.autograd.Function):
    """The identity; a second derivative, which y does not have, is refused. (`once_differentiable` says nothing to
    `autograd.grad`.)
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():  # create_graph=True
            raise LocaterError(
                "doubly_normalized: first derivatives only; that of its map, mechanism(...).map(q, k) @ v, "
                "has all of them"
            )
        return grad


def _log_sums_without_gradient(x: Inputs, seen: Tensor | None) -> Tensor:
    """L without its gradient: by the kernel that reads rows of attention on a GPU, for some keys at a time
    elsewhere.
    """
    q, k, scale = x.q.detach(), x.k.detach(), x.usual_scale
    if has_weighted_kernel(q, k):
        out: Tensor = _log_sum_exp(k, q, seen, scale)
        return out.masked_fill(out == -torch.inf, 0.0)
    parts = []
    for at in range(0, x.S, BLOCK):
        scores = logits(Inputs(k[:, :, at : at + BLOCK], q, q, Terms()), scale)
        counted = seen if seen is None or seen.shape[2] == 1 else seen[:, :, at : at + BLOCK]
        parts.append(scores.logsumexp(3) if counted is None else _log_sum_over_queries(scores.mT, counted.mT))
    return torch.cat(parts, 2)


@torch.library.custom_op("locater::log_sum_exp", mutates_args=())
def _log_sum_exp(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return row_statistics(q, k, Terms(scale, mask=mask), extended=False).log_sum_exp.clone()


@_log_sum_exp.register_fake
def _(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def doubly_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    scale: float,
    mix: Float[Tensor, " H"] | None = None,
    keys: Bool[Tensor, "b h S"] | None = None,
    rows: Bool[Tensor, "b T"] | None = None,
) -> Float[Tensor, "B H T E"]:
    """u A v + (1 - u) softmax(scale q k^T) v with A doubly normalized and u = `mix`, which is 1 where it is None.

    `keys` is False for those that nobody sees, `rows` for queries that do not count in sums over queries. Gradients go
    to q, k, v and mix. Operands are those that `locater_lab.mechanisms.kernels.weighted.has_weighted_kernel` takes.
    """
    out: Tensor = _doubly(q, k, v, None if mix is None else mix.float().contiguous(), keys, rows, scale)[0]
    return out


@torch.library.custom_op("locater::doubly_attention", mutates_args=())
def _doubly(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor | None, keys: Tensor | None, rows: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_doubly

    out, first, difference, column, r, lse = triton_doubly.forward(q, k, v, keys, rows, mix, scale)
    return out, first, difference, column, r, lse


@_doubly.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor | None, keys: Tensor | None, rows: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, H, T, _ = q.shape
    out = q.new_empty(B, H, T, v.shape[3])
    first, difference = (torch.empty_like(out) if mix is not None else out.new_empty(0) for _ in range(2))
    numbers = [q.new_empty(B, H, n, dtype=torch.float32) for n in (k.shape[2], T, T if mix is not None else 0)]
    return out, first, difference, numbers[0], numbers[1], numbers[2]


@torch.library.custom_op("locater::doubly_attention_gradient", mutates_args=())
def _gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor | None,
    keys: Tensor | None,
    rows: Tensor | None,
    saved: list[Tensor],
    grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_doubly

    return triton_doubly.backward(q, k, v, tuple(saved), grad, keys, rows, mix, scale)


@_gradient.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mix: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0 if mix is None else q.shape[1], dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of what is kept for the gradient nobody needs one
    ctx.scale = scale
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, mix, keys, rows, *saved = ctx.saved_tensors
    *grads, dmix = _gradient(q, k, v, mix, keys, rows, saved, grad, ctx.scale)
    return *grads, None if mix is None else dmix, None, None, None


_doubly.register_autograd(_backward, setup_context=_save_for_backward)
