"""Entropy of every row of an intercepted attention call, with gradients, and which tokens are padding.

The values are those of `kernels.attention_entropy`. As an operator of its own it stays in the graph of a compiled
model, and returns the number of visible keys from the same pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from locater.calls.call_and_masks import Call
from locater.kernels import Terms, reference, row_statistics
from locater.kernels.dispatch import default_backend


def row_entropy(call: Call, own: bool) -> tuple[Tensor, Tensor]:
    """Entropy and number of visible keys, both (B, H, T); rows of padding see none. `own`: queries and keys are the
    same tokens.

    >>> x = torch.zeros(1, 1, 3, 4)
    >>> entropy, visible = row_entropy(Call(x, x, Terms(0.5, causal=True)), own=True)
    >>> entropy.exp().round().flatten().tolist(), visible.flatten().tolist()
    ([1.0, 2.0, 3.0], [1, 2, 3])
    """
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in call.terms.flat()]
    entropy, visible, _, _ = _row_entropy_op(call.query, call.key, own, *arguments)
    return entropy, visible


def terms_of(call: Call) -> Terms:
    """The terms of a call, checked against the shapes of its queries and keys."""
    B, H, T, _ = call.query.shape
    return call.terms.checked(B, H, T, call.key.shape[2])


def real_tokens(call: Call, own: bool) -> tuple[Tensor, Tensor]:
    """Which queries (B, T) and keys (B, S) are tokens. A key that no query may look at is padding, and so is its query
    where queries and keys are the same tokens.
    """
    return _real(call.query, call.key, own, terms_of(call))


def _real(q: Tensor, k: Tensor, own: bool, terms: Terms) -> tuple[Tensor, Tensor]:
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    keys = torch.ones(B, S, dtype=torch.bool, device=q.device)
    if terms.mask is not None:
        keys = keys & terms.mask.any(1).any(1)
    if terms.bias is not None:
        keys = keys & (terms.bias > -torch.inf).any(1).any(1)
    if terms.padding is not None:
        keys = keys & terms.padding
    queries = keys if own and T == S else torch.ones(B, T, dtype=torch.bool, device=q.device)
    return queries, keys


@torch.library.custom_op(
    "locater::row_entropy",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, bool own, {Terms.SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _row_entropy_op(q: Tensor, k: Tensor, own: bool, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy, visible keys, log-sum-exp and mass of every row."""
    with torch.autocast(q.device.type, enabled=False):
        terms = terms_of(Call(q, k, Terms.from_flat(arguments)))
        rows = row_statistics(q, k, terms, extended=False)
        queries = _real(q, k, own, terms)[0][:, None]
    visible = torch.where(queries, rows.visible, 0)
    return rows.entropy.clone(), visible, rows.log_sum_exp.clone(), rows.row_mass.clone()


@_row_entropy_op.register_fake
def _(q: Tensor, k: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return row, torch.empty_like(row, dtype=torch.int64), torch.empty_like(row), torch.empty_like(row)


@torch.library.custom_op(
    "locater::row_entropy_gradient",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor lse, Tensor entropy, Tensor mass, Tensor grad, "
    f"{Terms.SCHEMA}) -> (Tensor, Tensor)",
)
def _entropy_gradient_op(
    q: Tensor, k: Tensor, lse: Tensor, entropy: Tensor, mass: Tensor, grad: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        terms = terms_of(Call(q, k, Terms.from_flat(arguments)))
        if default_backend(q, terms) == "torch":
            dq, dk = reference.entropy_gradient(q, k, terms, lse, entropy, mass, grad)
        else:
            from locater.kernels import triton_launches

            dq, dk = triton_launches.entropy_gradient(q, k, terms, lse, entropy, mass, grad)
    # as the compiler is told below; queries that nothing rotates are a transposed view
    return dq.contiguous(), dk.contiguous()


def _like_operands(q: Tensor, k: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    return dq, dk


_entropy_gradient_op.register_fake(_like_operands)


@torch.library.custom_op(
    "locater::row_weights_gradient",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor lse, Tensor weight, {Terms.SCHEMA}) -> (Tensor, Tensor)",
)
def _weights_gradient_op(q: Tensor, k: Tensor, lse: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Gradients where the slope of a row at a logit is `weight` times that key's weight, by PyTorch on any device."""
    with torch.autocast(q.device.type, enabled=False):
        terms = terms_of(Call(q, k, Terms.from_flat(arguments)))
        dq, dk = reference.weights_gradient(q, k, terms, lse, weight)
    return dq.contiguous(), dk.contiguous()


_weights_gradient_op.register_fake(_like_operands)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, *terms = inputs
    entropy, visible, lse, mass = output
    ctx.mark_non_differentiable(visible)
    ctx.set_materialize_grads(False)  # log-sum-exp and mass are seldom differentiated
    ctx.numbers = terms[: Terms.NUMBERS]
    ctx.save_for_backward(q, k, lse, entropy, mass, *terms[Terms.NUMBERS :])


def _backward(
    ctx: Any, grad: Tensor | None, _: None, of_lse: Tensor | None, of_mass: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, lse, entropy, mass, *tensors = ctx.saved_tensors
    parts = []
    if grad is not None:
        parts.append(_entropy_gradient_op(q, k, lse, entropy, mass, grad, *ctx.numbers, *tensors))
    # d lse / d logit_j = p_j; with a sink, d mass / d logit_j = p_j (1 - mass)
    weights = [x for x in (of_lse, None if of_mass is None else of_mass * (1 - mass)) if x is not None]
    if weights:
        parts.append(_weights_gradient_op(q, k, lse, sum(weights[1:], weights[0]), *ctx.numbers, *tensors))
    dq, dk = (None if not parts else sum(x[1:], x[0]) for x in ([part[i] for part in parts] for i in (0, 1)))
    return dq, dk, *(None,) * (1 + Terms.ARGUMENTS)


_row_entropy_op.register_autograd(_backward, setup_context=_save_for_backward)
