"""Biases that depend on position alone and are added to the scaled logits: ALiBi slopes and tables over relative
distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.layers.position_tables import PairTable


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
