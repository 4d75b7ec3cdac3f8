"""The regime of a head: uniform, spread, localized or sharp; and the plane of its mean and scale, cut into them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.theory.entropy import variance_at
from locater.theory.propagation import localization

COLLAPSED = 0.1  # expected entropy over log T under which `regime` calls a head sharp
LOCALIZED = 0.1  # |Lambda| from which `regime` calls a head localized
REGIMES = ("uniform", "spread", "localized", "sharp")


def regime(Lambda: Float[Tensor, "*n"], variance: Float[Tensor, "*n"], length: int) -> Int[Tensor, "*n"]:
    """Index into `REGIMES`. Entropy collapse (sharp) takes precedence over localization, localization over uniformity.

    >>> [REGIMES[k] for k in regime(torch.tensor([0.0, 0.5]), torch.tensor([1.0, 1.0]), 256).tolist()]
    ['spread', 'localized']
    """
    out = torch.ones_like(Lambda, dtype=torch.long)
    out[variance < 0.01] = 0
    out[Lambda.abs() >= LOCALIZED] = 2
    out[variance > variance_at(COLLAPSED, length)] = 3
    return out


def phase_diagram(means: Tensor, scales: Tensor, ratio: float = 1.0, length: int = 256) -> dict[str, Tensor]:
    """Lambda and the regime over a grid: M along rows, sqrt F along columns, S = ratio * F (1: symmetric, -1:
    antisymmetric).

    >>> grid = phase_diagram(torch.tensor([0.0, 4.0]), torch.tensor([0.05, 0.5, 12.0]))
    >>> [[REGIMES[k] for k in row] for row in grid["regime"].tolist()]
    [['uniform', 'spread', 'sharp'], ['localized', 'localized', 'sharp']]
    """
    M = means.double()[:, None].expand(len(means), len(scales))
    F = (scales.double() ** 2)[None, :].expand_as(M)
    Lambda = localization(M, ratio * F, F)
    return {"M": M, "F": F, "localization": Lambda, "regime": regime(Lambda, F, length)}
