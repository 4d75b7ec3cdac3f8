"""`attention_with_statistics`: the output of attention and the statistics of its rows from one pass over the keys.

On a GPU, in half precision, with the terms that `is_fused` names, one Triton kernel computes both. Everywhere else it
is attention by PyTorch, then `row_statistics`: the same numbers in two passes.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from locater.errors import LocaterError
from locater.kernels.dispatch import Backend, checked_terms, default_backend, row_statistics
from locater.kernels.reference import row_chunks
from locater.kernels.terms import AttentionStatistics, Terms

WIDEST = 128  # channels of a head; wider ones have not been timed


def attention_with_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    padding: Bool[Tensor, "B S"] | None = None,
    documents: Int[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "*any"] | None = None,
    bias: Float[Tensor, "*any"] | None = None,
    alibi: Float[Tensor, " H"] | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    first: int = 1,
    extended: bool = True,
    backend: Backend | None = None,
) -> tuple[Float[Tensor, "B H T E"], AttentionStatistics]:
    """softmax(scale q k^T) v and the statistics of its rows. Arguments are those of `attention_statistics`.

    The output has gradients to q, k and v, by attention in PyTorch; statistics have none.

    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> out, stats = attention_with_statistics(q, k, torch.arange(4.0).view(1, 1, 4, 1), causal=True)
    >>> out.flatten().tolist(), stats.entropy.exp().flatten().round().tolist()             # the mean of what is seen
    ([0.0, 0.5, 1.0, 1.5], [1.0, 2.0, 3.0, 4.0])
    """
    terms = Terms(scale, causal, window, softcap, first, padding, documents, mask, bias, alibi, sinks)
    return attend_with_statistics(q, k, v, terms, extended=extended, backend=backend)


def attend_with_statistics(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, extended: bool = True, backend: Backend | None = None
) -> tuple[Tensor, AttentionStatistics]:
    """`attention_with_statistics` of a call whose masks and additions are one record."""
    terms = checked_terms(q, k, terms)
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise LocaterError(f"v has shape {list(v.shape)}, not {list(k.shape[:3])} as k has, and any size")
    if backend == "triton" and (terms.has_masks or terms.positions is not None or _needs_gradient(q, k, v)):
        raise LocaterError("backend='triton' takes no masks and has no gradients here: leave the backend out")
    if backend == "triton" or (backend is None and is_fused(q, k, v, terms)):
        return _fused_statistics(q, k, v, terms, extended)
    return attention(q, k, v, terms), row_statistics(q, k, terms, extended=extended, backend=backend)


def attend_with_numbers(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """For calls that `is_fused` takes: the output, and the extended statistics as one tensor (8, B, H, T), which
    `statistics_of` reads.
    """
    out, numbers = _operator(q, k, v, *terms.flat(), True)
    return out, numbers


def is_fused(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> bool:
    """Whether one kernel computes both: on an H100 or H200, in half precision, up to 128 channels, without gradients,
    where a row sees all keys, those before it or a window of them; with soft-cap, ALiBi slopes and sinks. Padding,
    documents, masks and biases are not among them.
    """
    if default_backend(q, terms) != "triton" or _needs_gradient(q, k, v):
        return False
    from locater.kernels.triton_parts import is_hopper

    return (
        is_hopper(q)
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and max(q.shape[3], v.shape[3]) <= WIDEST
        and 0 < q.shape[2] <= k.shape[2]
        and not terms.has_masks
        and terms.scale_for(q.shape[3]) > 0
    )


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """Attention by PyTorch with any terms; differentiable."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    T, S = q.shape[2], k.shape[2]
    if terms.softcap is not None or terms.sinks is not None:
        parts = [_rows(q, k, v, terms, rows) for rows in row_chunks(q.shape[0], q.shape[1], T, S, q.device)]
        return torch.cat(parts, 2).to(v.dtype)
    scale = terms.scale_for(q.shape[3])
    plain = not terms.has_masks and terms.window is None and terms.alibi is None and terms.positions is None
    if plain and (not terms.causal or T == S):
        return scaled_dot_product_attention(q, k, v, is_causal=terms.causal, scale=scale)
    hidden = ~terms.visible(slice(0, T), T, S, q.device)
    added = torch.zeros(1, 1, 1, S, device=q.device, dtype=q.dtype) if terms.bias is None else terms.bias.to(q.dtype)
    if terms.alibi is not None:
        distance = terms.distance(slice(0, T), T, S, q.device).abs()
        added = added - (terms.alibi.view(-1, 1, 1) * distance).to(q.dtype)
    hidden = hidden | (added == -torch.inf)
    closed = hidden.all(-1, keepdim=True)  # a row that sees nothing is zero
    added = torch.where(closed, 0, torch.where(hidden, -torch.inf, added))
    return scaled_dot_product_attention(q, k, v, added, scale=scale).masked_fill(closed, 0)


def _rows(q: Tensor, k: Tensor, v: Tensor, terms: Terms, rows: slice) -> Tensor:
    """The output of some rows, by their map."""
    T, S = q.shape[2], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = terms.logits(q[:, :, rows].to(wide), k.to(wide), rows, T)
    seen = terms.visible(rows, T, S, q.device)
    if terms.bias is not None:
        seen = seen & ((terms.bias if terms.bias.shape[-2] == 1 else terms.bias[..., rows, :]) > -torch.inf)
    logits = logits.masked_fill(~seen, -1e30)
    if terms.sinks is not None:
        logits = torch.cat([logits, terms.sinks.to(logits).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    return (logits.softmax(-1)[..., :S] * seen) @ v.to(wide)


def _fused_statistics(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, extended: bool
) -> tuple[Tensor, AttentionStatistics]:
    out, numbers = _operator(q, k, v, *terms.flat(), extended)
    return out, statistics_of(numbers, terms, k.shape[2])


def statistics_of(numbers: Float[Tensor, "columns B H T"], terms: Terms, keys: int) -> AttentionStatistics:
    """The record of numbers per row as kernels return them, of a call without masks but causal and window."""
    from locater.kernels.triton_launches import visible_counts

    lse, entropy, top, mass, *more = numbers.unbind()
    visible = visible_counts(terms, lse.shape[2], keys, lse.device).expand(lse.shape)
    return AttentionStatistics(lse, entropy, top, visible, mass, *more)


# an operator, so that a compiled model keeps one graph
_library = torch.library.Library("locater", "FRAGMENT")
_library.define(
    f"attention_with_statistics(Tensor q, Tensor k, Tensor v, {Terms.SCHEMA}, bool extended) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _run(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    from locater.kernels import triton_forward

    return triton_forward.forward(q, k, v, Terms.from_flat(arguments[: Terms.ARGUMENTS]), arguments[-1])


_library.impl("attention_with_statistics", _run, "CompositeExplicitAutograd")
_operator = torch.ops.locater.attention_with_statistics.default


def _fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    out = q.new_empty(B, T, H, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(8 if arguments[-1] else 4, B, H, T, dtype=torch.float32)


torch.library.register_fake("locater::attention_with_statistics", _fake, lib=_library)
