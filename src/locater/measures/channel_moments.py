"""Mean and central moments of every channel, over tokens that come in parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.brief import brief
from locater.measures.sequences import NOISE

PerChannel = Float[Tensor, "width"]
Scalar = Float[Tensor, ""]


@dataclass(frozen=True)
class ChannelMoments:
    """Mean and central moments of every channel, accumulated over parts of the tokens, each part read once.

    Stored as sums of powers of x - mean and merged by the formulas of Pébay (2008). Sums of x^2, x^3, x^4 would be
    simpler, but lose every digit of the kurtosis once a channel's mean is 10,000 times its spread, which happens where
    activations are massive.

    >>> parts = torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0]])
    >>> seen = ChannelMoments.empty(1)
    >>> for part in parts:
    ...     seen = seen.add(part)
    >>> seen.mean.item(), seen.second.item(), round(seen.excess_kurtosis.item(), 6)
    (4.0, 56.0, -1.5)
    """

    count: Scalar
    mean: PerChannel
    second: PerChannel  # sum (x - mean)^2
    third: PerChannel
    fourth: PerChannel

    __repr__ = brief

    @classmethod
    def empty(cls, width: int, device: torch.device | str | None = None) -> ChannelMoments:
        """The moments of no tokens."""
        return cls.of(torch.zeros(0, width, device=device))

    @classmethod
    def of(cls, x: Float[Tensor, "*tokens width"], real: Bool[Tensor, "*tokens"] | None = None) -> ChannelMoments:
        """The moments of the real tokens of x."""
        keep = (torch.ones_like(x[..., 0], dtype=torch.bool) if real is None else real).reshape(-1, 1)
        # masked, not indexed: indexing with a mask would make the GPU wait
        x = x.reshape(-1, x.shape[-1]).masked_fill(~keep, 0).double()
        count = keep.sum().double()
        mean = x.sum(0) / count.clamp_min(1)
        rest = (x - mean).masked_fill(~keep, 0)
        square = rest.square()
        return cls(count, mean, square.sum(0), (square * rest).sum(0), square.square().sum(0))

    def add(self, x: Float[Tensor, "*tokens width"], real: Bool[Tensor, "*tokens"] | None = None) -> ChannelMoments:
        """These moments after adding the real tokens of x."""
        return self.merge(ChannelMoments.of(x, real))

    def merge(self, other: ChannelMoments) -> ChannelMoments:
        """The moments of both sets of tokens together."""
        n = (self.count + other.count).clamp_min(1)
        a, b = self.count / n, other.count / n
        gap = other.mean - self.mean
        between = n * a * b * gap**2  # what the distance between the two means adds to the second sum
        third = between * gap * (a - b) + 3 * gap * (a * other.second - b * self.second)
        fourth = (
            between * gap**2 * (a**2 - a * b + b**2)
            + 6 * gap**2 * (a**2 * other.second + b**2 * self.second)
            + 4 * gap * (a * other.third - b * self.third)
        )
        return ChannelMoments(
            self.count + other.count,
            self.mean + b * gap,
            self.second + other.second + between,
            self.third + other.third + third,
            self.fourth + other.fourth + fourth,
        )

    @property
    def mean_share(self) -> Scalar:
        """|mean|^2 / E|x|^2: the share of the energy that all tokens have in common. NaN without tokens or energy."""
        energy = self.mean.square().sum()
        return torch.where(self.count > 0, energy / (energy + self.second.sum() / self.count), math.nan)

    @property
    def excess_kurtosis(self) -> PerChannel:
        """E(x - mean)^4 / (E(x - mean)^2)^2 - 3 per channel: 0 if normal. NaN for a channel that does not vary."""
        constant = self.second <= self.count * (NOISE * self.mean).square()
        return (self.count * self.fourth / self.second**2 - 3).masked_fill(constant, math.nan)

    @property
    def median_kurtosis(self) -> Scalar:
        """Median excess kurtosis of the channels that vary. A mean shows only the few channels with huge ones."""
        return self.excess_kurtosis.nanquantile(0.5)


def mean_share(x: Float[Tensor, "*tokens width"], real: Bool[Tensor, "*tokens"] | None = None) -> Scalar:
    """|mean|^2 / E|x|^2 over all tokens of all sequences. For tokens in parts use `ChannelMoments`.

    >>> mean_share(torch.tensor([[3.0, 1.0], [3.0, -1.0]])).item()
    0.9
    """
    return ChannelMoments.of(x, real).mean_share


def excess_kurtosis(x: Float[Tensor, "*tokens width"], real: Bool[Tensor, "*tokens"] | None = None) -> PerChannel:
    """Excess kurtosis of every channel over all tokens of all sequences (the biased estimate).

    For tokens in parts use `ChannelMoments`.

    >>> excess_kurtosis(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 4.0]])).tolist()
    [-2.0, -0.6666666666666665]
    """
    return ChannelMoments.of(x, real).excess_kurtosis
