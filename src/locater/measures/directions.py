"""Which directions carry the energy of tokens: the mean, and the principal directions of the covariance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.measures.symmetric import eigenvalues


@dataclass(frozen=True)
class Directions:
    """Shares of E|x|^2 = |mean|^2 + tr C. `mean` and all of `principal` sum to 1.

    `along_mean` is the share of the variance of tokens along the axis of the mean.
    """

    mean: Float[Tensor, "*n"]
    along_mean: Float[Tensor, "*n"]
    principal: Float[Tensor, "*n k"]

    __repr__ = brief


def top_directions(mean: Float[Tensor, "*n d"], covariance: Float[Tensor, "*n d d"], k: int) -> Directions:
    """Shares of the energy E of tokens with this mean m and covariance C: of the mean, and of the top k principal
    directions of C.

        mean = |m|^2 / E,   along_mean = m^T C m / (|m|^2 E),   principal_i = lambda_i(C) / E,   E = |m|^2 + tr C

    The energy on the axis of the mean is mean + along_mean, whether or not that axis is principal.

    >>> shares = top_directions(torch.tensor([2.0, 0.0, 0.0]), torch.diag(torch.tensor([1.0, 4.0, 1.0])), k=1)
    >>> shares.mean.item(), shares.along_mean.item(), shares.principal.tolist()
    (0.4, 0.1, [0.4])
    """
    if not 1 <= k <= mean.shape[-1]:
        raise LocaterError(
            f"k={k}: a width of {mean.shape[-1]} has between 1 and {mean.shape[-1]} principal directions"
        )
    m, C = mean.double(), covariance.double()
    square = m.square().sum(-1)
    energy = square + C.diagonal(dim1=-2, dim2=-1).sum(-1)
    stretch = ((C @ m.unsqueeze(-1)).squeeze(-1) * m).sum(-1)
    along = torch.where(square > 0, stretch / square, torch.zeros_like(square))
    values = eigenvalues(C)[..., :k].clamp_min(0)
    return Directions(square / energy, along / energy, values / energy.unsqueeze(-1))
