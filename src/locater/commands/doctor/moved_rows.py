"""Which rows of a layer's maps stand where others stood in the base: rotary orders, heads in another order, copies,
queries in the place of keys. Rows are known by their sketches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from locater.commands.doctor.heads import LayerHeads

ALIKE = 0.99  # cosine of two rows that are the same but for scale, rounding and little training
TRAINED = 0.8  # of a row with itself after training, where no other row is alike
SCALED = 0.02  # a factor nearer to 1 than this is none
Order = Literal["interleaved", "halves"]


@dataclass
class MovedRows:
    """One map of one layer. Rows are (head, row) in the base; -1 where no row of the base is alike."""

    part: str
    heads: int
    rotary: Order | None = None  # the order that its rows are in now
    source: list[int] = field(default_factory=list)  # head of the base that each head is; -1: none
    factors: list[float] = field(default_factory=list)  # of each head, 1 where it is not scaled
    foreign: float = 0.0  # share of rows that are another map's
    lost: float = 0.0  # share of rows that are no row of the base
    inside: bool = False  # rows are in another order inside their heads, not a rotary one

    @property
    def permuted(self) -> bool:
        """Whether heads changed places, each still there once."""
        return sorted(self.source) == list(range(self.heads)) and self.source != list(range(self.heads))

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(head, the head that it is a copy of) where some head of the base is there twice."""
        if self.permuted:
            return []
        return [(head, source) for head, source in enumerate(self.source) if source not in (-1, head)]

    @property
    def told(self) -> bool:
        """Whether what is known of the rows accounts for nearly all of them."""
        return self.lost < 0.1

    def scaled(self) -> list[tuple[int, float]]:
        return [(head, c) for head, c in enumerate(self.factors) if abs(c - 1) > SCALED]


def rotary_orders(size: int, channels: int) -> dict[Order, Tensor]:
    """For each order: the row of the other order that stands at each place.

    >>> rotary_orders(4, 4)["interleaved"].tolist()
    [0, 2, 1, 3]
    """
    rest = torch.arange(channels, size)
    turning = torch.arange(channels)
    return {
        "interleaved": torch.cat([turning.view(2, -1).mT.flatten(), rest]),
        "halves": torch.cat([turning.view(-1, 2).mT.flatten(), rest]),
    }


def moved_rows(own: LayerHeads, base: LayerHeads, part: str) -> MovedRows:
    """How the rows of one map are those of the base."""
    x, b = own.maps()[part], base.maps()[part]
    heads, size = x.shape[:2]
    result = MovedRows(part, heads)
    near = _alike(x.flatten(0, 1), b.flatten(0, 1))
    rows = torch.arange(heads * size)
    place = torch.where(near[0] >= ALIKE, near[1], torch.full_like(rows, -1))
    zero = x.flatten(0, 1).norm(dim=1) == 0
    place[zero] = rows[zero]
    source = torch.div(place, size, rounding_mode="floor").masked_fill(place < 0, -1).view(heads, size)
    inside = (place % size).masked_fill(place < 0, -1).view(heads, size)
    result.source = [
        int(head.mode().values) if float((head == head.mode().values).float().mean()) > 0.8 else -1 for head in source
    ]
    straight = (inside == torch.arange(size)) | (inside < 0)
    if float(straight.float().mean()) < 0.9:
        result.inside = True
        if own.channels and part in ("query", "key"):
            for name, order in rotary_orders(size, own.channels).items():
                moving = (order != torch.arange(size)) & (inside >= 0)
                if float((inside == order)[moving].float().mean()) > 0.95:
                    result.rotary, result.inside = name, False
    lost = place < 0
    if bool(lost.any()):
        others = [
            y.flatten(0, 1)
            for name, y in base.maps().items()
            if name not in (part, "out") and y.shape[-1] == x.shape[-1]
        ]
        if part != "out" and others:
            foreign = _alike(x.flatten(0, 1)[lost], torch.cat(others), of_own=False)[0] >= ALIKE
            result.foreign = float(foreign.sum()) / len(lost)
            result.lost = float((~foreign).sum()) / len(lost)
        else:
            result.lost = float(lost.float().mean())
    result.factors = _factors(x, b, result)
    return result


def _alike(x: Tensor, b: Tensor, of_own: bool = True) -> tuple[Tensor, Tensor]:
    """Cosine with the row of `b` that is most alike, and which it is; a row's own place comes first."""
    a, c = (t / t.norm(dim=1, keepdim=True).clamp_min(1e-30) for t in (x, b))
    cosine, place = torch.empty(len(a)), torch.empty(len(a), dtype=torch.long)
    for start in range(0, len(a), 2048):
        near = a[start : start + 2048] @ c.mT
        cosine[start : start + 2048], place[start : start + 2048] = near.max(1)
    if of_own and len(a) == len(c):
        own = (a * c).sum(1)
        stays = (own >= ALIKE) | ((own >= TRAINED) & (cosine < ALIKE))
        cosine[stays], place[stays] = own[stays].clamp_min(ALIKE), torch.arange(len(a))[stays]
    return cosine, place


def _factors(x: Tensor, b: Tensor, moved: MovedRows) -> list[float]:
    """The factor of each head on the head of the base that it is."""
    factors = []
    for head, source in enumerate(moved.source):
        if source < 0:
            factors.append(1.0)
            continue
        ours, theirs = x[head], b[source]
        if moved.rotary or moved.inside:  # rows moved: sizes tell
            factors.append(float(ours.norm() / theirs.norm().clamp_min(1e-30)))
            continue
        factor = float((ours * theirs).sum() / theirs.square().sum().clamp_min(1e-30))
        beside = float((ours - factor * theirs).norm() / ours.norm().clamp_min(1e-30))
        factors.append(factor if beside < abs(factor - 1) / 3 or not float(ours.norm()) else 1.0)
    return factors
