"""What decides a row of attention besides q and k, and what is kept of it. Axes: B batch, H heads, T queries, S keys, D
size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locater.errors import LocaterError

LARGEST_CAP = 1000.0  # of the Triton kernels: cap tanh(x / cap) by one exponential is off by 6e-8 of the cap


@dataclass(frozen=True)
class Terms:
    """Masks and additions. Queries are the last T of S positions, so cached keys need nothing special."""

    scale: float
    causal: bool = False
    window: int | None = None  # distance < window
    softcap: float | None = None
    padding: Bool[Tensor, "B S"] | None = None  # True = a real token
    documents: Int[Tensor, "B S"] | None = None  # a query sees keys with its own number
    mask: Bool[Tensor, "b h t S"] | None = None  # any other; axes of size 1 are shared
    bias: Float[Tensor, "b h t S"] | None = None  # added to scaled logits
    alibi: Float[Tensor, " H"] | None = None  # slopes: -slope * distance is added
    sinks: Float[Tensor, " H"] | None = None  # a logit per head that takes weight and gives no value
    first: int = 1  # keys counted as the first ones
    positions: Int[Tensor, " T"] | None = None  # of the queries among the keys, where they are not the last T

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
        self, q: Float[Tensor, "B H t D"], k: Float[Tensor, "B H S D"], rows: slice, queries: int
    ) -> Float[Tensor, "B H t S"]:
        """Logits of some rows, float32 at least, after scale, bias and soft-cap and before the mask."""
        out = (q @ k.mT) * self.scale
        if self.alibi is not None:
            distance = self.distance(rows, queries, k.shape[-2], q.device).abs()
            out = out - self.alibi.to(out)[:, None, None] * distance
        if self.bias is not None:
            out = out + (self.bias if self.bias.shape[-2] == 1 else self.bias[..., rows, :]).to(out)
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)


@dataclass(frozen=True)
class AttentionStatistics:
    """What is kept of attention: numbers per row (B, H, T), or per head (H,) after `reduced()`; never a T x S matrix.

    With sinks a row's weights sum to `row_mass` < 1, and entropy is -sum p log p of those weights as they act. A row
    that sees no key has entropy, probability and mass 0, and minus infinity for its logits.
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
            raise LocaterError("participation was not asked for: attention_statistics(..., extended=True)")
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
            held = getattr(self, f.name)
            if held is None or f.name in ("max_logit", "log_sum_exp", "received", "visible"):
                continue
            out[f.name] = torch.where(seen, held, torch.zeros_like(held)).sum((0, 2)) / count
        out["max_probability"] = (self.max_probability * seen).sum((0, 2)) / count
        out["entropy_ratio"] = self.entropy_ratio.nanmean((0, 2))
        return out


def full_terms(terms: Terms, B: int, H: int, T: int, S: int) -> Terms:
    """Checked shapes; masks and biases brought to four axes."""
    for name in ("mask", "bias"):
        held = getattr(terms, name)
        if held is None:
            continue
        while held.ndim < 4:
            held = held.unsqueeze(0)
        for got, want, axis in zip(held.shape, (B, H, T, S), "BHTS", strict=True):
            if got not in (1, want) or (axis == "S" and got != want):
                raise LocaterError(
                    f"{name} has shape {list(held.shape)}; its axis {axis} must be {want}"
                    + ("" if axis == "S" else " or 1")
                )
        terms = replace(terms, **{name: held})
    for name in ("padding", "documents"):
        held = getattr(terms, name)
        if held is not None and tuple(held.shape) != (B, S):
            raise LocaterError(f"{name} has shape {list(held.shape)}, not [{B}, {S}] (batch, keys)")
    if terms.positions is not None and tuple(terms.positions.shape) != (T,):
        raise LocaterError(f"positions has shape {list(terms.positions.shape)}, not [{T}] (queries)")
    for name in ("alibi", "sinks"):
        held = getattr(terms, name)
        if held is not None and tuple(held.shape) != (H,):
            raise LocaterError(f"{name} has shape {list(held.shape)}, not [{H}] (heads)")
    return terms
