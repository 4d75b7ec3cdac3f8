"""Terms of the logits in which content meets distance: distances have keys that queries meet, or queries that keys
meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
