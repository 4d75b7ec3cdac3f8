"""One function for attention statistics: Triton on CUDA, PyTorch elsewhere, the same numbers from both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locater.errors import LocaterError
from locater.kernels import reference
from locater.kernels.terms import LARGEST_CAP, AttentionStatistics, Terms

Backend = Literal["torch", "triton"]


def attention_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
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
    positions: Int[Tensor, " T"] | None = None,
    extended: bool = True,
    per_key: bool = False,
    backend: Backend | None = None,
) -> AttentionStatistics:
    """Entropy, log-sum-exp, maximum and more of every row of softmax(scale * q k^T), without the T x S matrix.

    Query head h uses key head h // (H / K). Queries are the last T of S positions, so with cached keys T < S, unless
    `positions` places them (some rows only, or a cache with room left). `padding` is True for real tokens, `documents`
    numbers packed sequences, `mask` is any other boolean mask and `bias` any addition (axes of size 1 are shared).
    `extended` adds participation, distance, and the weight on the first keys and on itself; `per_key` the weight each
    key receives. `backend` is chosen by device where it is None.

    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> stats = attention_statistics(q, k, causal=True)        # uniform over 1, 2, 3, 4 keys
    >>> stats.entropy.exp().squeeze().round().tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    terms = Terms(scale, causal, window, softcap, first, padding, documents, mask, bias, alibi, sinks, positions)
    return row_statistics(q, k, terms, extended=extended, per_key=per_key, backend=backend)


def row_statistics(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    terms: Terms,
    *,
    extended: bool = True,
    per_key: bool = False,
    backend: Backend | None = None,
    rows: Int[Tensor, " R"] | None = None,
) -> AttentionStatistics:
    """`attention_statistics` of a call whose masks and additions are one record.

    With `rows`, of these rows of q alone, which rise; terms are those of all rows.

    >>> q = k = torch.zeros(1, 1, 8, 4)
    >>> some = row_statistics(q, k, Terms(causal=True), rows=torch.tensor([2, 7]))
    >>> some.entropy.exp().squeeze().round().tolist(), some.visible.squeeze().tolist()
    ([3.0, 8.0], [3, 8])
    """
    terms = checked_terms(q, k, terms)
    if rows is not None and per_key:
        raise LocaterError("per_key: the weight that a key receives is over all rows, not over some of them")
    q, k = (x.detach() if x.requires_grad else x for x in (q, k))
    if (backend or default_backend(q, terms)) == "torch":
        if rows is not None:
            terms, q = terms.placed(q.shape[2], k.shape[2], q.device).for_queries(rows), q[:, :, rows]
        return reference.statistics(q, k, terms, extended, per_key)
    from locater.kernels import triton_launches

    return triton_launches.statistics(q, k, terms, extended, per_key, rows)


def add_head_sums(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    terms: Terms,
    rows: Int[Tensor, " R"] | None,
    output: Float[Tensor, "B T H V"] | None,
    sums: Float[Tensor, "H columns"],
    maxima: Float[Tensor, "H 1"],
    counted: Bool[Tensor, "B T"] | None = None,
    first: Int[Tensor, "B T"] | None = None,
    statistics: Float[Tensor, "8 B H T"] | None = None,
    spans: Callable[[], tuple[Tensor, Tensor] | None] | None = None,
) -> bool:
    """Add the statistics of rows to sums per head in two or three launches, where kernels do that; returns whether they
    did.

    The first columns of `sums` are those of `SUMMED`; a head whose output is not finite in one of the rows gets NaN in
    columns 4 to 15. For a call with masks there are the rows that count, and the first key of each row's sequence,
    negative where there is none. `statistics` of all rows of a call without masks, where given, are not computed again;
    `spans` returns those of its mask (`mask_spans`).
    """
    fits = output is None or (output.stride(-1) == 1 and output.shape[:3] == (q.shape[0], q.shape[2], q.shape[1]))
    if not fits or sums.dtype != torch.float64 or sums.stride(1) != 1 or default_backend(q, terms) == "torch":
        return False
    from locater.kernels import triton_sums

    triton_sums.add_sums(
        q, k, checked_terms(q, k, terms), rows, output, sums, maxima, counted, first, statistics, spans and spans()
    )
    return True


def mask_spans(terms: Terms, B: int, T: int) -> tuple[Int[Tensor, "2 B T"], Int[Tensor, ""]] | None:
    """The keys that each row sees by a mask alone, from the first to the end, and whether the mask hides none between
    them: causal masks, windows, padding at either end, packed documents. None where the terms are not of that kind.

    >>> spans, whole = mask_spans(Terms(mask=torch.ones(3, 3, dtype=torch.bool).tril().view(1, 1, 3, 3)), 1, 3)
    >>> spans[:, 0].tolist(), int(whole)
    ([[0, 0, 0], [1, 2, 3]], 1)
    """
    if terms.mask is None or not has_spans(terms):
        return None
    seen, S = terms.mask[:, 0].view(torch.int8), terms.mask.shape[-1]  # (b, t, S)
    some = seen.amax(-1)
    begin, end = seen.argmax(-1) * some, (S - seen.flip(-1).argmax(-1)) * some
    whole = (seen.sum(-1) == end - begin).all().to(torch.int32)
    return torch.stack([begin, end]).to(torch.int32).expand(2, B, T).contiguous(), whole


def has_spans(terms: Terms) -> bool:
    """Whether the terms are a mask alone, the same for all heads."""
    others = (terms.padding, terms.documents, terms.bias, terms.positions, terms.window)
    one = terms.mask is not None and (terms.mask.ndim < 3 or terms.mask.shape[-3] == 1)
    return one and not terms.causal and all(x is None for x in others)


SUMMED = (
    *("calls", "rows", "wide_rows", "first_rows"),
    *("entropy", "row_mass", "max_probability", "participation", "distance", "self_mass", "entropy_ratio", "sink"),
)


def attention_entropy(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B K S D"], *, backend: Backend | None = None, **terms: Any
) -> Tensor:
    """Entropy of every row (B, H, T), with gradients to q and k at O(T) memory: logits are computed again backwards.

    Takes the masks and additions of `attention_statistics`; gradients go to q and k alone.

    >>> q = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    >>> attention_entropy(q, q.detach(), causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 5, 8])
    """
    checked = checked_terms(q, k, Terms(**terms))
    return _Entropy.apply(q, k, checked, backend or default_backend(q, checked))


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, terms: Terms, backend: Backend) -> Tensor:
        if backend == "torch":
            stats = reference.statistics(q, k, terms, extended=False, per_key=False)
        else:
            from locater.kernels import triton_launches

            stats = triton_launches.statistics(q, k, terms, extended=False, per_key=False)
        ctx.save_for_backward(q, k, stats.log_sum_exp, stats.entropy, stats.row_mass)
        ctx.terms, ctx.backend = terms, backend
        return stats.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, k, lse, entropy, mass = ctx.saved_tensors
        if ctx.backend == "torch":
            dq, dk = reference.entropy_gradient(q, k, ctx.terms, lse, entropy, mass, grads[0])
        else:
            from locater.kernels import triton_launches

            dq, dk = triton_launches.entropy_gradient(q, k, ctx.terms, lse, entropy, mass, grads[0])
        return dq, dk, None, None


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def runs_on_kernel(q: Tensor, v: Tensor, widest: int) -> bool:
    """Whether Triton takes heads of these: on CUDA, not in float64, at most `widest` channels."""
    return (
        q.device.type == "cuda" and q.dtype != torch.float64 and max(q.shape[3], v.shape[3]) <= widest and has_triton()
    )


def default_backend(q: Tensor, terms: Terms) -> Backend:
    """Triton for CUDA tensors where it is installed.

    float64 stays with PyTorch, since Triton's products are float32, and so do rows with positions of their own, which
    are few, and caps that hardly cap.
    """
    if (
        q.device.type != "cuda"
        or q.dtype == torch.float64
        or terms.positions is not None
        or (terms.softcap or 0.0) > LARGEST_CAP
    ):
        return "torch"
    return "triton" if has_triton() else "torch"


def checked_terms(q: Tensor, k: Tensor, terms: Terms) -> Terms:
    """The terms with masks of four axes; raises where shapes do not fit."""
    if q.ndim != 4 or k.ndim != 4:
        raise LocaterError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; both have four axes: batch, heads, tokens, size"
        )
    B, H, T, D = q.shape
    if k.shape[0] != B or k.shape[3] != D or H % k.shape[1]:
        raise LocaterError(
            f"k has shape {list(k.shape)}, which does not fit q {list(q.shape)}: same batch and size, heads that divide"
        )
    if T > k.shape[2] and terms.causal and terms.positions is None:
        raise LocaterError(
            f"{T} queries and {k.shape[2]} keys cannot be causal: queries are the last of the keys' positions"
        )
    return terms.checked(B, H, T, k.shape[2])
