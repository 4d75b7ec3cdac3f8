"""`Terms`: what an attention call is asked to do besides q, k and v. `AttentionStatistics`: the numbers of its rows.

Axes: B batch, H heads, T queries, S keys, D size of a query.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError

LARGEST_CAP = 1000.0  # of the Triton kernels: cap tanh(x / cap) by one exponential is off by 6e-8 of the cap

SHAPES = {
    "padding": ("batch", "keys"),
    "documents": ("batch", "keys"),
    "positions": ("queries",),
    "alibi": ("heads",),
    "sinks": ("heads",),
}


@dataclass(frozen=True)
class Terms:
    """Scale, masks and additions of one attention call.

    Queries are the last T of S positions unless `positions` places them, so cached keys need nothing special.

    >>> Terms(causal=True).visible(slice(0, 2), 2, 3, torch.device("cpu"))[0, 0].tolist()
    [[True, True, False], [True, True, True]]
    """

    scale: float | None = None  # multiplies q.k; None: 1 / sqrt(D), or the scale of the mechanism
    causal: bool = False
    window: int | None = None  # distance < window
    softcap: float | None = None
    first: int = 1  # keys counted as the first ones
    padding: Bool[Tensor, "B S"] | None = None  # True = a real token
    documents: Int[Tensor, "B S"] | None = None  # a query sees keys with its own number
    mask: Bool[Tensor, "b h t S"] | None = None  # True = may look; axes of size 1 are shared
    bias: Float[Tensor, "b h t S"] | None = None  # added to scaled logits
    alibi: Float[Tensor, " H"] | None = None  # slopes: -slope * distance is added
    sinks: Float[Tensor, " H"] | None = None  # a logit per head that takes weight and gives no value
    positions: Int[Tensor, " T"] | None = None  # of the queries among the keys, where they are not the last T

    # Operators of torch.library take no records: their schema has these arguments instead, packed by `flat` and
    # unpacked by `from_flat`. The first NUMBERS of them are numbers, the others tensors.
    SCHEMA: ClassVar[str] = (
        "float? scale, bool causal, SymInt? window, float? softcap, SymInt first, Tensor? padding, Tensor? documents, "
        "Tensor? mask, Tensor? bias, Tensor? alibi, Tensor? sinks, Tensor? positions"
    )
    ARGUMENTS: ClassVar[int] = 12
    NUMBERS: ClassVar[int] = 5

    __repr__ = brief

    def flat(self) -> tuple[Any, ...]:
        """The fields as arguments of an operator, in the order of SCHEMA."""
        return (
            self.scale,
            self.causal,
            self.window,
            self.softcap,
            self.first,
            self.padding,
            self.documents,
            self.mask,
            self.bias,
            self.alibi,
            self.sinks,
            self.positions,
        )

    @classmethod
    def from_flat(cls, arguments: Iterable[Any]) -> Terms:
        """The inverse of `flat`. It runs at every observed call and sets all fields at once, which takes a third of the
        time of a frozen dataclass's constructor.
        """
        terms = cls.__new__(cls)
        vars(terms).update(zip(_FIELDS, arguments, strict=True))
        return terms

    @property
    def has_masks(self) -> bool:
        """Whether a tensor decides which keys are seen."""
        return not (self.padding is None and self.documents is None and self.mask is None and self.bias is None)

    def scale_for(self, size: int) -> float:
        """What multiplies q.k for queries of this size: the scale, or 1 / sqrt(size)."""
        return size**-0.5 if self.scale is None else self.scale

    def at(self, queries: int, keys: int, device: torch.device) -> Int[Tensor, " T"]:
        """Position of every query among the keys."""
        return torch.arange(keys - queries, keys, device=device) if self.positions is None else self.positions

    def distance(self, rows: slice, queries: int, keys: int, device: torch.device) -> Int[Tensor, "t S"]:
        """Query position minus key position."""
        return self.at(queries, keys, device)[rows, None] - torch.arange(keys, device=device)

    def placed(self, queries: int, keys: int, device: torch.device) -> Terms:
        """The same with positions written out, so that keys can be left off at the end."""
        return replace(self, positions=self.at(queries, keys, device))

    def up_to(self, end: int) -> Terms:
        """The same for the first `end` keys."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[..., :end]

        return replace(
            self, padding=cut(self.padding), documents=cut(self.documents), mask=cut(self.mask), bias=cut(self.bias)
        )

    def for_queries(self, rows: slice | Tensor) -> Terms:
        """The same for some of the queries; masks have four axes."""

        def some(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[-2] == 1 else x[..., rows, :]

        positions = None if self.positions is None else self.positions[rows]
        return replace(self, mask=some(self.mask), bias=some(self.bias), positions=positions)

    def for_heads(self, heads: Int[Tensor, " h"]) -> Terms:
        """The same for some of the query heads."""

        def some(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.ndim < 4 or x.shape[1] == 1 else x[:, heads]

        alibi, sinks = (None if x is None else x[heads] for x in (self.alibi, self.sinks))
        return replace(self, mask=some(self.mask), bias=some(self.bias), alibi=alibi, sinks=sinks)

    def for_sequence(self, b: int) -> Terms:
        """The same for one sequence of the batch; masks have four axes."""

        def one(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[0] == 1 else x[b : b + 1]

        return replace(
            self, padding=one(self.padding), documents=one(self.documents), mask=one(self.mask), bias=one(self.bias)
        )

    def visible(self, rows: slice, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "b h t S"]:
        """True where a query of `rows` may look."""
        distance = self.distance(rows, queries, keys, device)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= distance.abs() < self.window
        out = seen[None, None]
        if self.padding is not None:
            out = out & self.padding[:, None, None, :]
        if self.documents is not None:
            of_query = self.documents[:, self.at(queries, keys, device)[rows]]
            out = out & (of_query[:, None, :, None] == self.documents[:, None, None, :])
        if self.mask is not None:
            out = out & (self.mask if self.mask.shape[-2] == 1 else self.mask[..., rows, :])
        return out

    def logits(
        self, q: Float[Tensor, "B H t D"], k: Float[Tensor, "B K S D"], rows: slice, queries: int
    ) -> Float[Tensor, "B H t S"]:
        """Logits of some rows, float32 at least, after scale, bias and soft-cap and before the mask. Query heads that
        share keys are multiplied together: repeated keys are most of the time of one query over a long cache.
        """
        (B, H, t, _), K = q.shape, k.shape[1]
        product = q @ k.mT if H == K else (q.reshape(B, K, H // K * t, -1) @ k.mT).reshape(B, H, t, -1)
        out = product * self.scale_for(q.shape[-1])
        if self.alibi is not None:
            distance = self.distance(rows, queries, k.shape[-2], q.device).abs()
            out = out - self.alibi.to(out)[:, None, None] * distance
        if self.bias is not None:
            out = out + (self.bias if self.bias.shape[-2] == 1 else self.bias[..., rows, :]).to(out)
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)

    def checked(self, B: int, H: int, T: int, S: int) -> Terms:
        """The same with masks and biases of four axes; raises where a shape does not fit."""
        shape = (B, H, T, S)
        mask = None if self.mask is None else _four_axes("mask", self.mask, shape)
        bias = None if self.bias is None else _four_axes("bias", self.bias, shape)
        for name, axes in SHAPES.items():
            x = getattr(self, name)
            if x is not None:
                expected = [{"batch": B, "heads": H, "queries": T, "keys": S}[axis] for axis in axes]
                if list(x.shape) != expected:
                    raise LocaterError(f"{name} has shape {list(x.shape)}, not {expected} ({', '.join(axes)})")
        return self if mask is self.mask and bias is self.bias else replace(self, mask=mask, bias=bias)


_FIELDS = tuple(f.name for f in fields(Terms))


def _four_axes(name: str, x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    while x.ndim < 4:
        x = x.unsqueeze(0)
    for size, expected, axis in zip(x.shape, shape, "BHTS", strict=True):
        if size not in (1, expected) or (axis == "S" and size != expected):
            raise LocaterError(
                f"{name} has shape {list(x.shape)}; its axis {axis} must be {expected}"
                + ("" if axis == "S" else " or 1")
            )
    return x


@dataclass(frozen=True)
class AttentionStatistics:
    """Statistics of attention: numbers per row (B, H, T), or per head (H,) after `reduced()`; never a T x S matrix.

    With sinks the weights of a row sum to `row_mass` < 1, and entropy is -sum p log p of these weights, without scaling
    them up to 1. A row that sees no key has entropy, probability and mass 0, and minus infinity for its logits.
    """

    log_sum_exp: Tensor
    entropy: Tensor
    max_logit: Tensor
    visible: Tensor  # keys in view
    row_mass: Tensor
    sum_of_squares: Tensor | None = None
    distance: Tensor | None = None  # mean |query position - key position|
    first_mass: Tensor | None = None
    self_mass: Tensor | None = None
    received: Float[Tensor, "B H S"] | None = None  # per key: weight received per query that may look at it

    __repr__ = brief

    @property
    def max_probability(self) -> Tensor:
        """Weight of the strongest key."""
        return torch.where(
            self.visible > 0, torch.exp(self.max_logit - self.log_sum_exp), torch.zeros_like(self.entropy)
        )

    @property
    def participation(self) -> Tensor:
        """1 / sum of squares: how many keys share the weight."""
        if self.sum_of_squares is None:
            raise LocaterError("participation was not computed: call attention_statistics(..., extended=True)")
        return 1 / self.sum_of_squares.clamp_min(torch.finfo(self.sum_of_squares.dtype).tiny)

    @property
    def entropy_ratio(self) -> Tensor:
        """Entropy over the log of the visible keys, per row; NaN where fewer than two are."""
        many = self.visible >= 2
        ratio = self.entropy / torch.log(self.visible.clamp_min(2).to(self.entropy))
        return torch.where(many, ratio, torch.full_like(ratio, torch.nan))

    def reduced(self) -> dict[str, Tensor]:
        """Per head (H,): means over rows that see a key (two for the ratio), maxima for logits. O(H) numbers."""
        seen = self.visible > 0
        count = seen.sum((0, 2)).clamp_min(1)
        out = {"max_logit": torch.where(seen, self.max_logit, torch.full_like(self.max_logit, -torch.inf)).amax((0, 2))}
        for f in fields(self):
            values = getattr(self, f.name)
            if values is None or f.name in ("max_logit", "log_sum_exp", "received", "visible"):
                continue
            out[f.name] = torch.where(seen, values, torch.zeros_like(values)).sum((0, 2)) / count
        out["max_probability"] = (self.max_probability * seen).sum((0, 2)) / count
        out["entropy_ratio"] = self.entropy_ratio.nanmean((0, 2))
        return out
