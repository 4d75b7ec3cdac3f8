"""Massive activations: single entries of hidden states that are far larger than all others (Sun et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locater.brief import brief
from locater.measures.sequences import PerSequence, Real, Sequences
from locater.numerics import upcast

MASSIVE, MASSIVE_RATIO = 100.0, 1000.0  # the thresholds of Sun et al. 2024
Index = Int[Tensor, "batch"]
IsMassive = Bool[Tensor, "batch"]


@dataclass(frozen=True)
class Massive:
    """Largest and median |entry| of each sequence. `token` and `channel` are -1 where there are no tokens."""

    top: PerSequence
    median: PerSequence
    ratio: PerSequence
    token: Index
    channel: Index
    is_massive: IsMassive

    __repr__ = brief


def massive_activations(x: Sequences, real: Real | None = None) -> Massive:
    """Largest |x| and median |x| over tokens and channels. The largest is massive if > 100 and >= 1000 medians.

    For an even number of entries the median is the lower of the two middle ones. Between models of different width or
    precision, compare ratios.

    >>> x = torch.ones(1, 3, 4)
    >>> x[0, 2, 1] = -1500
    >>> largest = massive_activations(x)
    >>> largest.ratio.item(), largest.token.item(), largest.channel.item(), largest.is_massive.item()
    (1500.0, 2, 1, True)
    """
    width = x.shape[-1]
    size = upcast(x).abs()
    absent = torch.zeros_like(x[..., 0], dtype=torch.bool) if real is None else ~real
    top, where = size.masked_fill(absent.unsqueeze(-1), -1).flatten(-2).max(-1)  # max, like amax, lets NaN through
    median = size.masked_fill(absent.unsqueeze(-1), math.nan).flatten(-2).nanmedian(-1).values.double()
    empty = absent.all(-1)
    top = top.double().masked_fill(empty, math.nan)
    return Massive(
        top=top,
        median=median,
        ratio=top / median,
        token=(where // width).masked_fill(empty, -1),
        channel=(where % width).masked_fill(empty, -1),
        is_massive=(top > MASSIVE) & (top >= MASSIVE_RATIO * median),
    )
