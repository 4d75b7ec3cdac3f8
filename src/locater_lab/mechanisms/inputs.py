"""Operands of every mechanism: queries, keys, values, and the terms of the call (masks and a scale); checked once.

Axes: B batch, H query heads, K key heads, T queries, S keys, D size of a query, E size of a value. Query head h uses
key head h // (H / K). Queries are the last T of S positions, so cached keys need nothing special.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from locater.brief import brief
from locater.errors import LocaterError
from locater.kernels.terms import Terms


@dataclass(frozen=True)
class Inputs:
    """Operands of one call. A mechanism reads `causal`, `mask`, `padding` and `scale` of the terms."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B K S D"]
    v: Float[Tensor, "B K S E"]
    terms: Terms
    query_padding: Bool[Tensor, "B T"] | None = None  # True = a real token

    __repr__ = brief

    def with_terms(self, **changes: Any) -> Inputs:
        """The same with some fields of the terms replaced."""
        return replace(self, terms=replace(self.terms, **changes))

    @property
    def causal(self) -> bool:
        return self.terms.causal

    @property
    def mask(self) -> Bool[Tensor, "b h t S"] | None:
        return self.terms.mask

    @property
    def padding(self) -> Bool[Tensor, "B S"] | None:
        return self.terms.padding

    @property
    def scale(self) -> float | None:
        return self.terms.scale

    @property
    def T(self) -> int:
        return self.q.shape[2]

    @property
    def S(self) -> int:
        return self.k.shape[2]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def has_row_mask(self) -> bool:
        """Whether the mask has a row per query."""
        return self.mask is not None and self.mask.shape[2] > 1

    def scale_or(self, default: float) -> float:
        return default if self.terms.scale is None else self.terms.scale

    @property
    def usual_scale(self) -> float:
        """The scale of the call, or 1 / sqrt(D)."""
        return self.terms.scale_for(self.q.shape[3])

    def visible(self) -> Bool[Tensor, "b h T S"]:
        """Who sees whom, written out."""
        return self.terms.visible(slice(0, self.T), self.T, self.S, self.q.device)

    def real_keys(self) -> Bool[Tensor, "b h 1 S"] | None:
        """Keys that padding, and a mask of one row for all queries, leave in view; None where that is all of them."""
        shared = None if self.has_row_mask else self.mask
        if self.padding is None:
            return shared
        padding = self.padding[:, None, None]
        return padding if shared is None else padding & shared

    def real_queries(self) -> Bool[Tensor, "B 1 T 1"] | None:
        """Queries that are tokens, for what is summed over queries; those of the keys where there are as many of
        both.
        """
        real = self.query_padding
        if real is None and self.padding is not None:
            if self.T != self.S:
                raise LocaterError(
                    f"padding is of {self.S} keys, "
                    f"and sums over {self.T} queries need query_padding (batch, queries) too"
                )
            real = self.padding
        return None if real is None else real[:, None, :, None]

    def per_query_head(self, x: Tensor) -> Tensor:
        """(B, K, ...) to (B, H, ...)."""
        return x if x.shape[1] == self.heads else x.repeat_interleave(self.heads // x.shape[1], 1)

    def grouped_by_key_head(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q (B, K, G, T, D), k (B, K, 1, S, D), v (B, K, 1, S, E), real keys (b, K or 1, G or 1, S, 1); float32 at
        least.
        """
        K, keep = self.k.shape[1], self.real_keys()
        if keep is not None:  # a mask per query head tells the heads of a group apart
            keep = keep.mT.unflatten(1, (K, -1) if keep.shape[1] > 1 else (1, 1))
        return widen(self.q).unflatten(1, (K, -1)), widen(self.k)[:, :, None], widen(self.v)[:, :, None], keep

    def mean_in_view(self, values: Float[Tensor, "B K S n"]) -> Float[Tensor, "B h t n"]:
        """The mean of `values` over the keys that each query sees, zero where it sees none; float32 at least.

        One row where all queries see the same keys, a prefix sum where they are causal; heads are those of keys unless
        masks differ.
        """
        values = widen(values)
        if self.has_row_mask:
            seen = self.visible().to(values)
            total, count = seen @ self.per_query_head(values), seen.sum(-1, keepdim=True)
        else:
            keep = self.real_keys()
            weight = values.new_ones(1, 1, self.S, 1) if keep is None else keep.mT.to(values)
            total = self._sum_over_keys((values if weight.shape[1] == 1 else self.per_query_head(values)) * weight)
            count = self._sum_over_keys(weight)
        return total / count.clamp_min(1)

    def keys_in_view(self) -> Float[Tensor, "b h t 1"]:
        """How many keys each query sees, float32 at least; axes of size 1 are shared."""
        kind = torch.promote_types(self.q.dtype, torch.float32)
        if self.has_row_mask:
            return self.visible().sum(-1, keepdim=True).to(kind)
        keep = self.real_keys()
        return self._sum_over_keys(self.q.new_ones(1, 1, self.S, 1, dtype=kind) if keep is None else keep.mT.to(kind))

    def _sum_over_keys(self, x: Float[Tensor, "b h S n"]) -> Float[Tensor, "b h t n"]:
        """Sums over the keys up to each query where it is causal, over all keys where not."""
        return prefix_sums(x)[:, :, self.S - self.T :] if self.causal else x.sum(2, keepdim=True)


def widen(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def prefix_sums(x: Float[Tensor, "b h S n"], chunk: int = 128) -> Float[Tensor, "b h S n"]:
    """Sums over tokens up to each, chunks side by side: a GPU adds up one column after the other no faster than a
    thread does.

    >>> prefix_sums(torch.ones(1, 1, 5, 1), chunk=2).flatten()
    tensor([1., 2., 3., 4., 5.])
    """
    S = x.shape[2]
    inside = functional.pad(x, (0, 0, 0, -S % chunk)).unflatten(2, (-1, chunk)).cumsum(3)
    before = functional.pad(inside[:, :, :-1, -1:].cumsum(2), (0, 0, 0, 0, 1, 0))
    return (inside + before).flatten(2, 3)[:, :, :S]


def unit_length(x: Tensor) -> Tensor:
    """x / |x| per token; zero stays zero."""
    return functional.normalize(x, dim=-1)


def head_values(values: float | Tensor, x: Inputs, name: str) -> float | Tensor:
    """A number, or one per query head (H,) brought to (H, 1, 1)."""
    if not isinstance(values, Tensor) or values.ndim == 0:
        return values
    if tuple(values.shape) != (x.heads,):
        raise LocaterError(f"{name} has shape {list(values.shape)}: a number, or one per query head [{x.heads}]")
    return values[:, None, None]


def check_inputs(q: Tensor, k: Tensor, v: Tensor, terms: Terms, query_padding: Tensor | None) -> Inputs:
    """Inputs whose shapes and kinds fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise LocaterError(f"{name} has shape {list(x.shape)}; it has four axes: batch, heads, tokens, size")
        if not x.is_floating_point() or x.dtype != q.dtype:
            raise LocaterError(f"{name} is {_dtype_name(x)} and q {_dtype_name(q)}: one floating type for q, k and v")
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    if k.shape[0] != B or k.shape[3] != D or not K or H % K:
        raise LocaterError(
            f"k has shape {list(k.shape)}, which does not fit q {list(q.shape)}: same batch and size, heads that divide"
        )
    if v.shape[:3] != k.shape[:3]:
        raise LocaterError(
            f"v has shape {list(v.shape)}, which does not fit k {list(k.shape)}: same batch, heads and tokens"
        )
    if not S:
        raise LocaterError("k has no tokens: there is nothing to look at")
    if terms.causal and T > S:
        raise LocaterError(f"{T} queries and {S} keys cannot be causal: queries are the last of the keys' positions")
    if terms.scale is not None and not (math.isfinite(terms.scale) and terms.scale != 0):
        raise LocaterError(f"scale={terms.scale}: a finite number other than 0, or None for the mechanism's own")
    for name, tensor in (("mask", terms.mask), ("padding", terms.padding), ("query_padding", query_padding)):
        if tensor is not None and tensor.dtype != torch.bool:
            raise LocaterError(
                f"{name} is {_dtype_name(tensor)}: a boolean tensor, True for what is seen; of an additive mask, mask == 0"
            )
    terms = terms.checked(B, H, T, S)
    if query_padding is not None and tuple(query_padding.shape) != (B, T):
        raise LocaterError(f"query_padding has shape {list(query_padding.shape)}, not [{B}, {T}] (batch, queries)")
    return Inputs(q, k, v, terms, query_padding)


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
