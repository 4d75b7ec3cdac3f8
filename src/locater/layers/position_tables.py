"""Tables of which each pair of positions reads a row: biases by place in a window of an image, vectors that queries
meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.errors import LocaterError
from locater.layers.relative import by_pair


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
