"""Multiformer (Sant et al. 2022): heads of one layer that attend in different ways, and how much each of them counts.

A letter per head: f (full) is softmax attention; l (local) looks at keys at most window // 2 away; c (convolutional)
at keys and values shortened by a convolution over tokens, one channel at a time:
    k'_m = sum_t kernel_t * k_{stride m + t - stride // 2} + bias
for n = ceil((S + 2 (stride // 2) - taps) / stride) + 1 of them, and likewise for values: o = softmax(scale q k'^T) v'.
Tokens that padding or a mask hides are left out before the convolution, as if the sequence were shorter; the end is
filled up with zeros until the kernel has met every token.

For encoders: a convolution joins a token with later ones. Windows are centred on each token, not aligned to blocks as
published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from locater.errors import LocaterError
from locater.kernels.terms import Terms
from locater_lab.mechanisms.kernels.weighted import has_weighted_kernel, weighted_attention
from locater_lab.mechanisms.mechanism_record import Inputs, widen
from locater_lab.mechanisms.softmax import ROWS, fused_attention, softmax_attention, softmax_map

KINDS = {"f": "full", "l": "local", "c": "convolutional"}


def multiformer_attention(
    x: Inputs,
    *,
    kinds: str = "flc",
    window: int = 64,
    stride: int = 2,
    key_kernel: Tensor | None = None,
    value_kernel: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> Tensor:
    """`kinds`: letters f, l, c, repeated over the heads. Kernels are (1, heads, taps, size), biases (1, heads, 1,
    size), axes of 1 shared.

    >>> from locater_lab.mechanisms import mechanism
    >>> q = k = torch.zeros(1, 3, 6, 4)
    >>> v = torch.arange(6.0)[None, None, :, None].expand(1, 3, 6, 1)
    >>> pair = torch.full((1, 1, 2, 1), 0.5)                   # means of two tokens; the first has a zero in front
    >>> mechanism("multiformer")(q, k, v, window=2, key_kernel=pair, value_kernel=pair)[0, :, 0, 0]
    tensor([2.5000, 0.5000, 1.8750])
    """

    def short(some: Inputs, heads: list[int]) -> Tensor:
        kernels = _parameters_of_heads(x, heads, key_kernel, value_kernel, key_bias, value_bias)
        keep, order, count = _compaction(some, stride, kernels[0])
        k, v = (
            _convolve(_compact(y, keep, order), kernels[i], kernels[i + 2], stride)
            for i, y in enumerate((some.k, some.v))
        )
        seen = None if count is None else torch.arange(k.shape[2], device=k.device) < count
        return softmax_attention(replace(some.with_terms(mask=seen, padding=None), k=k, v=v))

    return _attend_by_kind(
        x,
        kinds,
        {"f": lambda some, _: softmax_attention(some), "l": lambda some, _: _local_attention(some, window), "c": short},
    )


def multiformer_map(
    x: Inputs,
    *,
    kinds: str = "flc",
    window: int = 64,
    stride: int = 2,
    key_kernel: Tensor | None = None,
    value_kernel: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> Tensor:
    """Of convolutional heads it is softmax(scale q k'^T) C with v' = C v: it takes one kernel for all channels of a
    value, without bias.
    """

    def short(some: Inputs, heads: list[int]) -> Tensor:
        kernels = _parameters_of_heads(x, heads, key_kernel, value_kernel, key_bias, value_bias)
        if value_bias is not None or (kernels[1] is not None and kernels[1].shape[3] > 1):
            raise LocaterError(
                "multiformer: a value kernel per channel, or a bias, has no map of tokens; "
                "(1, heads, taps, 1) and no bias"
            )
        keep, order, count = _compaction(some, stride, kernels[0])
        k = _convolve(_compact(some.k, keep, order), kernels[0], kernels[2], stride)
        unit = torch.eye(x.S, dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        shortened = _convolve(_compact(unit, keep, order), kernels[1], None, stride)
        seen = None if count is None else torch.arange(k.shape[2], device=k.device) < count
        return softmax_map(replace(some.with_terms(mask=seen, padding=None), k=k, v=k)) @ widen(shortened)

    def local(some: Inputs, _: list[int]) -> Tensor:
        near = _within_window(some, torch.arange(some.S, device=some.q.device)[None], window)[None, None]
        return softmax_map(some.with_terms(mask=near if some.mask is None else near & some.mask))

    return _attend_by_kind(x, kinds, {"f": lambda some, _: softmax_map(some), "l": local, "c": short})


def head_relevance(
    heads: Float[Tensor, "B H T E"],
    output_weight: Float[Tensor, "width HE"],
    padding: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, " H"]:
    """r_h = median over samples of c_h / sum_h' c_h', c_h = sum_t |W_O^h o_ht|_1: what a head adds to the stream, as a
    share.

    `heads` is what attention gives, `output_weight` the matrix of the output projection; `padding` is True for tokens.
    The even layer has 1 / H everywhere. A median of shares need not sum to 1.

    >>> head_relevance(torch.ones(2, 2, 3, 1), torch.tensor([[1.0, 3.0]]))
    tensor([0.2500, 0.7500])
    """
    H, E = heads.shape[1], heads.shape[3]
    if output_weight.ndim != 2 or output_weight.shape[1] != H * E:
        raise LocaterError(
            f"output_weight has shape {list(output_weight.shape)}; it maps {H} heads of {E}: [width, {H * E}]"
        )
    parts = torch.einsum("bhte,whe->bhtw", widen(heads), widen(output_weight).unflatten(1, (H, E))).abs().sum(-1)
    if padding is not None:
        parts = parts.masked_fill(~padding[:, None], 0.0)
    sizes = parts.sum(-1)
    return (sizes / sizes.sum(1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)).quantile(0.5, dim=0)


def _attend_by_kind(x: Inputs, kinds: str, run: dict[str, Callable[[Inputs, list[int]], Tensor]]) -> Tensor:
    """Each kind over its heads, and heads back in their order."""
    if not kinds or set(kinds) - set(KINDS):
        raise LocaterError(
            f"kinds={kinds!r}: letters of " + ", ".join(f"{letter} ({name})" for letter, name in KINDS.items())
        )
    letters = (kinds * x.heads)[: x.heads]
    if set(letters) == {"f"}:
        return run["f"](x, list(range(x.heads)))
    present = [letter for letter in run if letter in letters]
    groups = [[h for h in range(x.heads) if letters[h] == letter] for letter in present]
    parts = [_SplitHeads.apply(y, *groups) for y in (x.q, x.per_query_head(x.k), x.per_query_head(x.v))]
    done = []
    for letter, heads, q, k, v in zip(present, groups, *parts, strict=True):
        mask = x.mask if x.mask is None or x.mask.shape[1] == 1 else _select_heads(x.mask, heads)
        done.append(run[letter](replace(x.with_terms(mask=mask), q=q, k=k, v=v), heads))
    return _JoinHeads.apply(groups, *done)


def _select_heads(y: Tensor, heads: list[int]) -> Tensor:
    """These heads of (b, heads, ...): a view where they are evenly spaced. Not by a list as an index, which would be
    copied to the device on every call.
    """
    even = _as_slice(heads)
    return y[:, even] if even else torch.stack([y[:, h] for h in heads], 1)


def _as_slice(heads: list[int]) -> slice | None:
    """Heads that are evenly spaced, as a slice."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    return slice(heads[0], heads[-1] + 1, step) if all(b - a == step for a, b in pairwise(heads)) else None


def _merge_heads(parts: Sequence[Tensor], groups: Sequence[list[int]]) -> Tensor:
    """(b, heads, ...) from the heads of each group: every head is written once."""
    B, _, *rest = parts[0].shape
    out = parts[0].new_empty(B, sum(map(len, groups)), *rest)
    for part, heads in zip(parts, groups, strict=True):
        even = _as_slice(heads)
        if even:
            out[:, even] = part
        else:
            for n, h in enumerate(heads):
                out[:, h] = part[:, n]
    return out


class _SplitHeads(torch.autograd.Function):
    """Heads by groups. A gradient for each group of the whole size, most of it zeros, as indexing has it, would be more
    work than attention is.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, *groups: list[int]) -> tuple[Tensor, ...]:
        ctx.groups = groups
        return tuple(_select_heads(y, heads) for heads in groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _merge_heads(grads, ctx.groups), *[None] * len(ctx.groups)


class _JoinHeads(torch.autograd.Function):
    """What `_SplitHeads` took apart."""

    @staticmethod
    def forward(ctx: Any, groups: list[list[int]], *parts: Tensor) -> Tensor:
        ctx.groups = groups
        return _merge_heads(parts, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_select_heads(grad, heads) for heads in ctx.groups)


def _within_window(x: Inputs, positions: Tensor, window: int) -> Bool[Tensor, "T n"]:
    """Which of the keys at `positions` (T or 1, n) there are, and at most window // 2 from each query."""
    if window < 1:
        raise LocaterError(f"window={window}: at least 1 token, the query's own")
    at = torch.arange(x.S - x.T, x.S, device=x.q.device)[:, None]
    return ((at - positions).abs() <= window // 2) & (positions >= 0) & (positions < x.S)


def _local_attention(x: Inputs, window: int) -> Tensor:
    """By a kernel on a GPU. Elsewhere fused: blocks of queries, each with the keys around it, as samples of one batch
    (B N, h, R, D).
    """
    if window < 1:
        raise LocaterError(f"window={window}: at least 1 token, the query's own")
    half, ahead = min(window // 2, x.S - 1), x.S - x.T
    if not x.has_row_mask and has_weighted_kernel(x.q, x.v):
        keys = x.real_keys()
        seen = None if keys is None else keys[:, :, 0]
        return weighted_attention(x.q, x.k, x.v, scale=x.usual_scale, keys=seen, window=half)
    # at least as many queries as keys at their sides, or these would be copied many times
    block = min(max(ROWS, 2 * half), x.T)
    N = -(-x.T // block)
    short = N * block - x.T
    q = functional.pad(x.q, (0, 0, 0, short)).unflatten(2, (N, block))  # (B, h, N, R, D)
    around = block + 2 * half  # keys of a block, the first of them at ahead + n block - half
    k, v = (functional.pad(y, (0, 0, half, half + short))[:, :, ahead:].unfold(2, around, block).mT for y in (x.k, x.v))
    first = torch.arange(N, device=q.device).repeat_interleave(block)[: x.T] * block + ahead - half
    positions = first[:, None] + torch.arange(around, device=q.device)
    seen = _within_window(x, positions, window)[None, None]  # (1, 1, T, n)
    inside = positions.clamp(0, x.S - 1)
    for shown in (None if x.padding is None else x.padding[:, None, None], x.mask):
        if shown is not None:
            rows = shown.expand(*shown.shape[:2], x.T, x.S)
            seen = seen & rows.gather(3, inside.expand(*shown.shape[:2], -1, -1))
    seen = functional.pad(seen, (0, 0, 0, short)).unflatten(2, (N, block)).expand(x.q.shape[0], -1, -1, -1, -1)
    q, k, v, seen = (y.transpose(1, 2).flatten(0, 1) for y in (q, k, v, seen))
    out = fused_attention(Inputs(q, k, v, Terms(mask=seen)), x.usual_scale)
    return out.unflatten(0, (-1, N)).transpose(1, 2).flatten(2, 3)[:, :, : x.T]


def _parameters_of_heads(x: Inputs, heads: list[int], *parameters: Tensor | None) -> list[Tensor | None]:
    """Kernels and biases of these heads."""
    out: list[Tensor | None] = []
    for name, y in zip(("key_kernel", "value_kernel", "key_bias", "value_bias"), parameters, strict=True):
        if y is None and name.endswith("kernel"):
            raise LocaterError(f"multiformer: convolutional heads need {name} (1, heads, taps, size)")
        if y is not None and (y.ndim != 4 or y.shape[0] != 1 or y.shape[1] not in (1, x.heads)):
            raise LocaterError(f"{name} has shape {list(y.shape)}: four axes, [1, {x.heads} or 1, taps, size or 1]")
        out.append(y if y is None or y.shape[1] == 1 else _select_heads(y, heads))
    return out


def _compaction(x: Inputs, stride: int, kernel: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Keys that count (b, h, S, 1), an order with these in front (b, h, S), and how many shortened keys they make (b,
    h, 1, 1).
    """
    if x.has_row_mask:
        raise LocaterError(
            "multiformer: convolutional heads shorten keys before queries see them; padding, or a mask of one row"
        )
    taps = 0 if kernel is None else kernel.shape[2]
    if not 1 <= stride <= taps:
        raise LocaterError(f"stride={stride} with {taps} taps: at least 1, and no token passed over")
    keep = x.real_keys()
    if keep is None:
        return None, None, None
    length = keep.sum(-1, keepdim=True)
    count = (length + 2 * (stride // 2) - taps).clamp_min(0).add(stride - 1).div(stride, rounding_mode="floor") + 1
    return keep.mT, (~keep[:, :, 0]).to(torch.uint8).argsort(stable=True), torch.where(length > 0, count, 0)


def _compact(y: Tensor, keep: Tensor | None, order: Tensor | None) -> Tensor:
    """Tokens that count in front, zeros behind them."""
    if keep is None or order is None:
        return y
    y = y.masked_fill(~keep, 0.0)
    return y.gather(2, order[..., None].expand(y.shape))


def _convolve(y: Tensor, kernel: Tensor | None, bias: Tensor | None, stride: int) -> Tensor:
    """Over tokens, one channel at a time: (B, h, S, D) to (B, h, n, D)."""
    assert kernel is not None
    S, taps, front = y.shape[2], kernel.shape[2], stride // 2
    n = -(-max(0, S + 2 * front - taps) // stride) + 1
    padded = functional.pad(widen(y), (0, 0, front, max(0, (n - 1) * stride + taps - S - front)))
    wide = widen(kernel)
    out = torch.stack(
        [padded[:, :, t : t + (n - 1) * stride + 1 : stride] * wide[:, :, t : t + 1] for t in range(taps)]
    ).sum(0)
    return (out if bias is None else out + widen(bias)).to(y.dtype)
