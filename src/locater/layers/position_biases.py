"""What position adds to logits: biases of distance alone (ALiBi, tables over relative distance), rows of tables by pair
of positions (places in a window of an image), and terms in which content meets distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.errors import LocaterError


@dataclass(frozen=True)
class RelativeTerms:
    """(q + shift) . key(p) + k . query(p), where p stands for the distance from query to key. Added before the scale.

    XLNet (Dai et al. 2019) has the first term, DeBERTa (He et al. 2021) both. `shift` is read at each call, as
    weights are, so that it follows a model in training.
    """

    code: Callable[[Int[Tensor, " n"]], Float[Tensor, "n d"]]  # p for each distance: query position minus key position
    key: Callable[[Tensor], Tensor] | None = None  # (n, d) to (n, H * h)
    query: Callable[[Tensor], Tensor] | None = None
    shift: Callable[[], Float[Tensor, "H h"]] | None = None

    def __call__(
        self,
        q: Float[Tensor, "B H T h"],
        k: Float[Tensor, "B H S h"],
        queries: Int[Tensor, " T"],
        keys: Int[Tensor, " S"],
    ) -> Float[Tensor, "B H T S"]:
        distances, place = (queries[:, None] - keys).to(q.device).unique(return_inverse=True)  # (n,), (T, S)
        p = self.code(distances).to(q)
        terms = q.new_zeros(*q.shape[:-1], k.shape[-2])
        if self.key is not None:
            start = q if self.shift is None else q + self.shift().to(q)[:, None]
            met = start @ _heads(self.key(p), q.shape[1]).mT  # (B, H, T, n)
            terms = terms + by_pair(met, place)
        if self.query is not None:
            met = k @ _heads(self.query(p), q.shape[1]).mT  # (B, H, S, n)
            terms = terms + by_pair(met, place.mT).mT
        return terms


def by_pair(met: Float[Tensor, "B H T n"], rows: Int[Tensor, "T S"]) -> Float[Tensor, "B H T S"]:
    """Of what each token meets in n rows of a table, the row of each pair."""
    return met.gather(-1, rows.expand(*met.shape[:2], *rows.shape))


def _heads(x: Float[Tensor, "n Hh"], heads: int) -> Float[Tensor, "H n h"]:
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def sinusoid(width: int, farthest: int) -> Callable[[Tensor], Tensor]:
    """Sines then cosines of a distance, in float32 as in XLNet; distances beyond `farthest` count as it, where it is
    positive.
    """
    frequencies = 1 / 10_000 ** (torch.arange(0, width, 2).float() / width)

    def code(distances: Tensor) -> Tensor:
        if farthest > 0:
            distances = distances.clamp(-farthest, farthest)
        angle = distances.float()[:, None] * frequencies.to(distances.device)
        return torch.cat([angle.sin(), angle.cos()], -1)

    return code


def bucket(distances: Tensor, buckets: int, farthest: int) -> Tensor:
    """Near distances exactly, those beyond half the buckets by logarithm up to `farthest`; in float32, to round as
    DeBERTa does.
    """
    half = buckets // 2
    reach = torch.log(torch.tensor((farthest - 1) / half, device=distances.device))
    far = (torch.log(distances.abs().clamp_min(1) / half) / reach * (half - 1)).ceil() + half
    return torch.where(distances.abs() <= half, distances, (far * distances.sign()).long())


class PositionsError(LocaterError):
    """Positions that a table does not have, without the name of the layer."""


@dataclass(frozen=True)
class PairTable:
    """Rows of a learned table by pair of positions. Pairs outside of what was read are refused."""

    table: Float[Tensor, "n c"]
    rows: Int[Tensor, "T S"]  # -1 where it is not known

    def index(self, queries: Int[Tensor, " T"], keys: Int[Tensor, " S"]) -> Int[Tensor, "T S"]:
        """The row of each pair; -1 where it is not known. Where rows follow distance alone, so do those of any
        positions at these distances.
        """
        queries, keys = queries.cpu(), keys.cpu()
        length, width = self.rows.shape
        by_distance = self._by_distance()
        if by_distance is None:
            refuse_other_length(queries, length)
            refuse_other_length(keys, width)
        if int(queries.max()) < length and int(keys.max()) < width:
            return self.rows[queries][:, keys]
        ahead = keys - queries[:, None]
        if by_distance is None or int(ahead.min()) <= -length or int(ahead.max()) >= width:
            raise PositionsError(
                f"its position terms are known for {length} x {width} positions, and not for position "
                f"{max(int(queries.max()), int(keys.max()))}: discover the model with inputs of that size"
            )
        return by_distance[ahead + length - 1]

    def _by_distance(self) -> Tensor | None:
        """Row of each distance, key minus query position plus T - 1; None where rows depend on more than that."""
        length, width = self.rows.shape
        ahead = torch.arange(width) - torch.arange(length)[:, None] + length - 1
        rows = torch.full((length + width - 1,), -1).scatter_reduce(0, ahead.flatten(), self.rows.flatten(), "amax")
        known = self.rows >= 0
        return rows if torch.equal(rows[ahead][known], self.rows[known]) else None


def refuse_other_length(positions: Tensor, length: int) -> None:
    """Raise for the first positions of a sequence of another length than a table was read for: places of a picture of
    another size are other places.
    """
    if len(positions) != length and torch.equal(positions.cpu(), torch.arange(len(positions))):
        raise PositionsError(
            f"its position terms are known for a sequence of {length} tokens, and not for one of {len(positions)}: "
            "discover the model with inputs of that size"
        )


@dataclass(frozen=True)
class PairTerms:
    """factor * q . (rows of the tables, added up): content meets position. Added before the scale."""

    tables: tuple[PairTable, ...]
    factor: float = 1.0

    def __call__(
        self,
        q: Float[Tensor, "B H T h"],
        k: Float[Tensor, "B H S h"],
        queries: Int[Tensor, " T"],
        keys: Int[Tensor, " S"],
    ) -> Float[Tensor, "B H T S"]:
        terms = q.new_zeros(*q.shape[:-1], k.shape[-2])
        for part in self.tables:
            index = part.index(queries, keys).to(q.device)
            met = q @ part.table.to(q).mT  # (B, H, T, n)
            terms = terms + by_pair(met, index.clamp_min(0))
            terms = terms.masked_fill(index < 0, torch.nan)
        return self.factor * terms


@dataclass(frozen=True)
class Alibi:
    """-slope * |distance|, one slope per head (Press et al. 2022)."""

    slopes: Float[Tensor, " H"]

    def __call__(self, queries: Int[Tensor, " T"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H T S"]:
        distance = (queries[:, None] - keys).abs()
        return -self.slopes.to(distance.device)[:, None, None] * distance


@dataclass(frozen=True)
class RoundedAlibi(Alibi):
    """scale * (slope * key position, rounded to bfloat16, less slope * query position): a staircase of -slope *
    distance (Falcon).

    The steps depend on the key's own position, counted from the first real token.
    """

    scale: float = 1.0

    def __call__(self, queries: Int[Tensor, " T"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H T S"]:
        slopes = self.slopes.to(keys.device, torch.bfloat16)
        there = (slopes[:, None] * keys).double()  # (H, S); the product is rounded too
        return self.scale * (there[:, None] - slopes.double()[:, None, None] * queries[:, None])


def published_slopes(heads: int) -> tuple[float, ...]:
    """The published slopes: a geometric sequence from 2^(-8/n), interleaved with the next one's when heads is no power
    of 2.

    >>> published_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return tuple(slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)])


@dataclass(frozen=True)
class RelativeBias:
    """A learned table over buckets of key minus query position (T5, MPNet): near distances exactly, far ones by
    logarithm.
    """

    table: Float[Tensor, "buckets H"]
    both_ways: bool
    farthest: int = 128

    def __call__(self, queries: Int[Tensor, " T"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H T S"]:
        ahead = keys - queries[:, None]
        return self.table[self.bucket(ahead)].permute(2, 0, 1)

    def bucket(self, ahead: Int[Tensor, "T S"]) -> Int[Tensor, "T S"]:
        buckets = self.table.shape[0]
        start = torch.zeros_like(ahead)
        if self.both_ways:
            buckets //= 2
            start = (ahead > 0) * buckets
            distance = ahead.abs()
        else:
            distance = (-ahead).clamp_min(0)
        exact = buckets // 2
        far = torch.log(distance.clamp_min(1).float() / exact) / math.log(self.farthest / exact) * (buckets - exact)
        return start + torch.where(distance < exact, distance, (exact + far.long()).clamp_max(buckets - 1))


@dataclass(frozen=True)
class PairBias:
    """A learned table with a row for each pair of positions, as that of Swin; NaN where the row is not known."""

    pairs: PairTable  # rows (n, H)

    def __call__(self, queries: Int[Tensor, " T"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H T S"]:
        index = self.pairs.index(queries, keys).to(self.pairs.table.device)
        return self.pairs.table[index.clamp_min(0)].masked_fill(index[..., None] < 0, torch.nan).permute(2, 0, 1)


PositionBias = Alibi | RelativeBias | PairBias
