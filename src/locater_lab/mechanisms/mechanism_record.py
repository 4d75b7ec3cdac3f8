"""What one attention mechanism declares, and how it is called: `mechanism("sigmoid")(q, k, v, causal=True)`. The operands
of every mechanism are queries, keys, values and the terms of the call (masks and a scale), checked once.

Axes: B batch, H query heads, K key heads, T queries, S keys, D size of a query, E size of a value. Query head h uses
key head h // (H / K). Queries are the last T of S positions, so cached keys need nothing special.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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


Kind = Literal["stochastic", "sub-stochastic", "non-negative", "signed"]
Causal = Literal["either", "never", "only"]
Cost = Literal["quadratic", "linear"]
Path = Literal["sdpa", "factorised", "chunked", "kernel"]


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism, and what it declares.

    - `kind`, of its attention map: "stochastic" (weights of at least 0, each row sums to 1), "sub-stochastic" (each row
      sums to at most 1), "non-negative" (any sum), or "signed" (negative weights too, so rows have no entropy).
    - `causal`: "either", "never" (causal calls are refused) or "only".
    - `cost`: how time grows with the number of tokens.
    - `path`: "sdpa" (PyTorch's fused attention), "factorised" (sums of features), "chunked" (a recurrence over blocks
      of tokens), or "kernel" (a Triton kernel of this package on a GPU; elsewhere the map is built block by block).
    - `learned`: the options that a model learns, or computes from its hidden states.

    >>> from locater_lab.mechanisms import mechanism
    >>> m = mechanism("softmax_plus_one")
    >>> m.kind, m.causal, m.cost, m.path
    ('sub-stochastic', 'either', 'quadratic', 'sdpa')
    >>> q = k = v = torch.zeros(1, 2, 3, 4)
    >>> m.map(q, k, causal=True)[0, 0].sum(-1)                   # n / (n + 1) for n equal logits of 0
    tensor([0.5000, 0.6667, 0.7500])
    """

    name: str
    attend: Callable[..., Tensor]  # (Inputs, options) -> (B, H, T, E)
    weights: Callable[..., Tensor]  # (Inputs, options) -> (B, H, T, S), written out: for tests and instruments
    kind: Kind
    formula: str
    causal: Causal = "either"
    cost: Cost = "quadratic"
    path: Path = "sdpa"
    learned: tuple[str, ...] = ()
    reason: str = ""  # why `causal` is "never" or "only"
    options: tuple[str, ...] = field(init=False)  # what it takes besides the common arguments
    needs: tuple[str, ...] = field(init=False)  # the options without a default

    __repr__ = brief

    def __post_init__(self) -> None:
        own = list(inspect.signature(self.attend).parameters.values())[1:]
        object.__setattr__(self, "options", tuple(p.name for p in own))
        object.__setattr__(self, "needs", tuple(p.name for p in own if p.default is inspect.Parameter.empty))

    @property
    def has_parameters(self) -> bool:
        return bool(self.learned)

    @property
    def is_causal_safe(self) -> bool:
        return self.causal != "never"

    @property
    def is_fused(self) -> bool:
        """Whether it runs on PyTorch's fused attention."""
        return self.path == "sdpa"

    def __call__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B K S D"],
        v: Float[Tensor, "B K S E"],
        *,
        causal: bool = False,
        mask: Bool[Tensor, "*any"] | None = None,
        padding: Bool[Tensor, "B S"] | None = None,
        query_padding: Bool[Tensor, "B T"] | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> Float[Tensor, "B H T E"]:
        """The attention output. Query head h uses key head h // (H / K); queries are the last T of S positions.

        `mask` is True where a query may look, and broadcasts to (B, H, T, S). `padding` is True for keys that are
        tokens. `query_padding` is True for queries that are tokens, and matters where the mechanism sums over queries;
        its default is `padding` where T = S. A row that sees no key is zero. `scale` multiplies q.k: 1 / sqrt(D) unless
        the mechanism has its own.
        """
        x = check_inputs(q, k, v, Terms(scale, causal, mask=mask, padding=padding), query_padding)
        self._check(x, options)
        return self.attend(x, **options)

    def map(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B K S D"],
        *,
        causal: bool = False,
        mask: Bool[Tensor, "*any"] | None = None,
        padding: Bool[Tensor, "B S"] | None = None,
        query_padding: Bool[Tensor, "B T"] | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> Float[Tensor, "B H T S"]:
        """The attention map, T x S, written out at whatever cost: `map @ v` is the output."""
        x = check_inputs(q, k, k, Terms(scale, causal, mask=mask, padding=padding), query_padding)
        self._check(x, options)
        return self.weights(x, **options)

    def _check(self, x: Inputs, options: dict[str, Any]) -> None:
        unknown = [name for name in options if name not in self.options]
        missing = [name for name in self.needs if name not in options]
        if unknown:
            known = ", ".join(self.options) or "none"
            raise LocaterError(f"{self.name} has no option {unknown[0]!r}; it takes {known}")
        if missing:
            raise LocaterError(f"{self.name} needs {', '.join(missing)}: {self.formula}")
        if self.causal == "never" and (x.causal or _looks_back_only(x)):
            raise LocaterError(f"{self.name} cannot be causal: {self.reason}")
        if self.causal == "only" and not x.causal:
            raise LocaterError(f"{self.name} is causal only: {self.reason}; causal=True")
        if self.cost == "linear" and x.has_row_mask:
            raise LocaterError(
                f"{self.name}: a mask with a row per query is T x S, which it never builds; "
                "padding (B, S), one row, or causal=True"
            )


def _looks_back_only(x: Inputs) -> bool:
    """Whether a mask hides every later key, as causal=True would."""
    if x.mask is None or not x.has_row_mask or x.T != x.S or torch.compiler.is_dynamo_compiling():
        return False
    return not bool(x.mask.triu(1).any())
