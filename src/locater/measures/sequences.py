"""Prepare hidden states for a measure: float64, padding at zero, the largest entry at one, the mean removed."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Relative to the largest entry of a channel: a token closer to the mean than this differs from it only by rounding.
NOISE = 1e-14
Sequences = Float[Tensor, "batch tokens width"]
Real = Bool[Tensor, "batch tokens"]
PerSequence = Float[Tensor, "batch"]
Matrices = Float[Tensor, "*n tokens width"]
Mask = Bool[Tensor, "*n tokens"]


def scale_to_one(x: Matrices, axes: tuple[int, ...]) -> Matrices:
    """Divide by the largest |entry| along `axes`, so that no square leaves the range of float64; zeros stay zero.

    >>> scale_to_one(torch.tensor([[0.0, -4.0], [2.0, 1.0]]), (-2, -1)).tolist()
    [[0.0, -1.0], [0.5, 0.25]]
    """
    top = x.abs().amax(axes, keepdim=True)
    return x / torch.where(top == 0, 1, top)


def fill_padding(x: Matrices, real: Mask | None) -> tuple[Matrices, Mask]:
    """x in float64 with padding at zero, and the mask of real tokens (all of them where `real` is None).

    >>> fill_padding(torch.tensor([[1.0], [torch.nan]]), torch.tensor([True, False]))[0].tolist()
    [[1.0], [0.0]]
    """
    keep = torch.ones_like(x[..., 0], dtype=torch.bool) if real is None else real
    return x.masked_fill(~keep.unsqueeze(-1), 0).double(), keep  # fill_padding, not multiplied: padding may be NaN


def fill_and_scale(x: Matrices, real: Mask | None) -> tuple[Matrices, Mask]:
    """`fill_padding`, with the largest entry of each sequence at 1.

    >>> fill_and_scale(torch.tensor([[2.0], [9.0]]), torch.tensor([True, False]))[0].tolist()
    [[1.0], [0.0]]
    """
    x, keep = fill_padding(x, real)
    return scale_to_one(x, (-2, -1)), keep


def centre_on_mean(x: Matrices, keep: Mask) -> Matrices:
    """Real tokens minus their mean. Differences at the level of rounding become zero, so that noise has no direction.

    >>> centre_on_mean(torch.tensor([[1.0], [3.0], [0.0]]), torch.tensor([True, True, False])).tolist()
    [[-1.0], [1.0], [0.0]]
    """
    mean = x.sum(-2, keepdim=True) / keep.sum(-1).clamp_min(1)[..., None, None]
    rest = (x - mean).masked_fill(~keep.unsqueeze(-1), 0)
    return rest.masked_fill(rest.abs() <= NOISE * x.abs().amax(-2, keepdim=True), 0)
