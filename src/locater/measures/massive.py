"""Massive activations: single entries of hidden states that are far larger than the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locater.measures.sequences import PerSequence, Real, Sequences
from locater.numerics import upcast

MASSIVE, MASSIVE_RATIO = 100.0, 1000.0  # Sun et al. 2024
Place = Int[Tensor, "batch"]
Verdict = Bool[Tensor, "batch"]


@dataclass(frozen=True)
class Massive:
    """The largest entry of each sequence beside its median. token and channel are -1 where there is no token."""

    top: PerSequence
    median: PerSequence
    ratio: PerSequence
    token: Place
    channel: Place
    is_massive: Verdict


def massive_activations(x: Sequences, real: Real | None = None) -> Massive:
    """Largest |x| and median |x| over tokens and channels, and whether the first is massive: > 100 and >= 1000 medians
    (Sun et al. 2024).

    Of an even number of entries the median is the lower middle one. Widths and precisions differ: compare ratios.

    >>> x = torch.ones(1, 3, 4)
    >>> x[0, 2, 1] = -1500
    >>> found = massive_activations(x)
    >>> found.ratio.item(), found.token.item(), found.channel.item(), found.is_massive.item()
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
