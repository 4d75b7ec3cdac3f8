"""A softmax head as an interpolator: the truncated linear function that it can be given, and how far off it is.

Keys and values stand for anchors L_k = a + k D, k = 0 ... p - 1, with D = (b - a) / (p - 1). The head's logit of a
query with the linear form s = w^T x + t on anchor k is

    beta k D (2 s - L_k - L_0)   =   -beta (s - L_k)^2 + a part that does not depend on k

and its value is L_k, so that softmax selects the anchors near s. The output approximates clip(s, a, b), of which ReLU
on a bounded domain is one (a = 0). The error depends on x = beta D^2 alone, in units of D: docs/theory.md section 11.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import LocaterError

TERMS = 60  # of sums over anchors that fall off as exp(-x j^2)


@dataclass(frozen=True)
class Anchors:
    """p anchors from `low` to `high`, and the inverse temperature `beta` of the head that reads them."""

    low: float
    high: float
    count: int
    beta: float

    def __post_init__(self) -> None:
        if self.count < 2 or not self.low < self.high or not self.beta > 0:
            raise LocaterError(
                f"anchors from {self.low} to {self.high}, {self.count} of them, beta {self.beta}: needs low < high, "
                "two or more anchors and beta > 0"
            )

    @classmethod
    def sharp(cls, low: float, high: float, count: int, sharpness: float) -> Anchors:
        """With beta such that x = beta D^2 is `sharpness`."""
        gap = (high - low) / max(count - 1, 1)
        return cls(low, high, count, sharpness / gap**2)

    @property
    def gap(self) -> float:
        """D."""
        return (self.high - self.low) / (self.count - 1)

    @property
    def sharpness(self) -> float:
        """x = beta D^2."""
        return self.beta * self.gap**2

    @property
    def values(self) -> Float[Tensor, " p"]:
        """L_k."""
        return torch.linspace(self.low, self.high, self.count, dtype=torch.float64)


def anchor_logits(s: Float[Tensor, "*n"], anchors: Anchors) -> Float[Tensor, "*n p"]:
    """beta k D (2 s - L_k - L_0).

    >>> anchor_logits(torch.tensor(0.5), Anchors(0.0, 1.0, 3, beta=4.0)).tolist()
    [0.0, 1.0, 0.0]
    """
    L = anchors.values.to(s)
    return anchors.beta * (L - anchors.low) * (2 * s[..., None] - L - anchors.low)


def head_maps(
    weight: Float[Tensor, " d"], shift: float, anchors: Anchors
) -> tuple[Float[Tensor, "k two"], Float[Tensor, "p two"]]:
    """The head's query-key map W (d + 1, 2) and its anchors' features (p, 2): logits are (x, 1) W features^T.

    W = beta [[2 w, 0], [2 t, -1]] and features (k D, k D (L_k + L_0)), so that the map has rank two whatever d is: one
    direction reads the linear form, the other is the same for all queries.

    >>> W, features = head_maps(torch.tensor([1.0]), 0.0, Anchors(0.0, 1.0, 3, beta=4.0))
    >>> (torch.tensor([0.5, 1.0]).double() @ W @ features.T).tolist()
    [0.0, 1.0, 0.0]
    """
    w = weight.double()
    W = torch.zeros(len(w) + 1, 2, dtype=torch.float64)
    W[:-1, 0], W[-1, 0], W[-1, 1] = 2 * w, 2 * shift, -1.0
    L = anchors.values
    steps = L - anchors.low
    return anchors.beta * W, torch.stack([steps, steps * (L + anchors.low)], 1)


def interpolate(s: Float[Tensor, "*n"], anchors: Anchors) -> Float[Tensor, "*n"]:
    """The head's output for a linear form s: sum_k softmax(logits)_k L_k, close to clip(s, a, b).

    >>> s = torch.tensor([-9.0, 0.0, 0.31, 9.0]).double()
    >>> interpolate(s, Anchors.sharp(0.0, 1.0, 101, 2.0)).round(decimals=2).tolist()
    [0.0, 0.0, 0.31, 1.0]
    """
    return anchor_logits(s, anchors).softmax(-1) @ anchors.values.to(s)


def segments(low: float, high: float, count: int, heads: int, sharpness: float) -> list[Anchors]:
    """The range cut into as many parts as there are heads, each with anchors of its own.

    >>> [(part.low, part.high) for part in segments(0.0, 1.0, 5, 2, 1.0)]
    [(0.0, 0.5), (0.5, 1.0)]
    """
    ends = torch.linspace(low, high, heads + 1, dtype=torch.float64).tolist()
    return [Anchors.sharp(a, b, count, sharpness) for a, b in pairwise(ends)]


def interpolate_by_heads(s: Float[Tensor, "*n"], parts: list[Anchors]) -> Float[Tensor, "*n"]:
    """Heads that add up: a + sum_h (head_h(s) - a_h). Every head clips s to its part of the range, and the sum
    telescopes to clip(s, a, b) with the gap (b - a) / (H (p - 1)).

    >>> parts = segments(0.0, 1.0, 51, 2, 2.0)
    >>> interpolate_by_heads(torch.tensor([-9.0, 0.5, 0.31, 9.0]).double(), parts).round(decimals=2).tolist()
    [0.0, 0.5, 0.31, 1.0]
    """
    return parts[0].low + sum((interpolate(s, part) - part.low for part in parts), torch.zeros_like(s))


# --- how far off ------------------------------------------------------------------------------------------------------


def interpolation_bound(sharpness: float) -> float:
    """An upper bound of |head(s) - clip(s, a, b)| / D for every s and every number of anchors, x = beta D^2:

        1/2 + sum_{j >= 1} (j + 1) (exp(-x j^2) + exp(-x j (j + 1)))

    Between two anchors, the two of them alone give a value that is off by D/2 at most: it lies on the side of the
    nearer one, as s does. The others, j steps further out, have at most these weights and are at most j + 1 steps away.
    Outside of the range the sum without 1/2 is enough.

    >>> round(interpolation_bound(100.0), 6), round(interpolation_bound(2.0), 3)
    (0.5, 0.808)
    """
    terms = ((j + 1) * (math.exp(-sharpness * j * j) + math.exp(-sharpness * j * (j + 1))) for j in range(1, TERMS))
    return 0.5 + sum(terms)


def heads_bound(sharpness: float, count: int, heads: int) -> float:
    """The same for heads that add up, over the gap of one head's part: the bound of the head whose part s is in, and
    what leaks at the ends of the others. The i-th neighbour's end, i = 0, 1, ..., is (p - 1) i steps away or more and
    leaks sum_k k exp(-x (k^2 + 2 k (p - 1) i)) at most.

    >>> heads_bound(100.0, 8, 1) == interpolation_bound(100.0)
    True
    """
    leaks = [
        sum(k * math.exp(-sharpness * (k * k + 2 * k * (count - 1) * i)) for k in range(1, TERMS))
        for i in range(heads - 1)
    ]
    return interpolation_bound(sharpness) + 2 * sum(leaks)


def ripple(sharpness: float) -> float:
    """The largest |head(s) - s| / D far from both ends, for x up to about 3: (2 pi / x) exp(-pi^2 / x), from Poisson's
    summation formula.

    >>> f"{ripple(0.5):.0e}", round(ripple(2.0), 4)
    ('3e-08', 0.0226)
    """
    return 2 * math.pi / sharpness * math.exp(-(math.pi**2) / sharpness)


def edge_error(sharpness: float) -> float:
    """|head(a) - a| / D at an end of a long range: sum k exp(-x k^2) / sum exp(-x k^2), k >= 0. Softmax can only pull
    inwards there.

    >>> round(edge_error(2.0), 4)
    0.1198
    """
    weights = [math.exp(-sharpness * k * k) for k in range(TERMS)]
    return sum(k * w for k, w in enumerate(weights)) / sum(weights)


def largest_error(anchors: Anchors, points: int = 20_001) -> float:
    """The largest |head(s) - clip(s, a, b)| on a grid of s that reaches one gap beyond both ends.

    >>> round(largest_error(Anchors.sharp(-1.0, 1.0, 8, 100.0)), 3)
    0.134
    """
    s = torch.linspace(anchors.low - anchors.gap, anchors.high + anchors.gap, points, dtype=torch.float64)
    return float((interpolate(s, anchors) - s.clamp(anchors.low, anchors.high)).abs().max())


def best_sharpness(count: int, low: float = 0.5, high: float = 8.0) -> float:
    """The x = beta D^2 with the least largest error, for p anchors: the error at the ends falls with x and that between
    anchors grows, so it lies where they meet. Found by golden sections.

    >>> 2.6 < best_sharpness(8) < 2.8
    True
    """
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(30):
        inner = high - ratio * (high - low), low + ratio * (high - low)
        errors = [largest_error(Anchors.sharp(0.0, 1.0, count, x), 4001) for x in inner]
        low, high = (low, inner[1]) if errors[0] < errors[1] else (inner[0], high)
    return (low + high) / 2
