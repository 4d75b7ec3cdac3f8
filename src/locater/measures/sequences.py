"""Hidden states made ready for a measure: float64, padding at zero, the largest entry at one, the mean taken out."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

NOISE = 1e-14  # of a channel: a token closer to the mean than this differs from it by the rounding of the mean alone
Sequences = Float[Tensor, "batch tokens width"]
Real = Bool[Tensor, "batch tokens"]
PerSequence = Float[Tensor, "batch"]


def scaled(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The largest entry along the axes becomes 1, so that no square leaves the range of float64; zeros stay."""
    top = x.abs().amax(axes, keepdim=True)
    return x / torch.where(top == 0, 1, top)


def clean(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """x in float64 with padding at zero and the largest entry of each sequence at 1; and which tokens are real."""
    x, keep = filled(x, real)
    return scaled(x, (-2, -1)), keep


def filled(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """x in float64 with padding at zero; and which tokens are real."""
    keep = torch.ones_like(x[..., 0], dtype=torch.bool) if real is None else real
    return x.masked_fill(~keep.unsqueeze(-1), 0).double(), keep  # filled, not multiplied: padding may be NaN


def centred_on_mean(x: Tensor, keep: Tensor) -> Tensor:
    """Real tokens less their mean; what is left of equal entries by rounding is zero, or noise would be given
    directions.
    """
    mean = x.sum(-2, keepdim=True) / keep.sum(-1).clamp_min(1)[..., None, None]
    rest = (x - mean).masked_fill(~keep.unsqueeze(-1), 0)
    return rest.masked_fill(rest.abs() <= NOISE * x.abs().amax(-2, keepdim=True), 0)
