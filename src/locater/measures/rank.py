"""How many directions the tokens of a sequence use, and how much of their energy the largest ones carry."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.measures.sequences import Real, Sequences, centre_on_mean, fill_padding, scale_to_one
from locater.numerics import one_thread, upcast


@dataclass(frozen=True)
class Ranks:
    """Three ways to count the directions of a matrix with singular values s. All are 0 for a zero matrix."""

    stable: Float[Tensor, "*n"]  # sum s^2 / max s^2
    effective: Float[Tensor, "*n"]  # exp of the entropy of s / sum s
    numerical: Float[Tensor, "*n"]  # count of s > tolerance * max s; a float, so that it can be NaN
    # s, largest first, including those that the ranks above count as zero
    singular_values: Float[Tensor, "*n D"]

    __repr__ = brief


def singular_values(gram: Float[Tensor, "*n D D"]) -> Float[Tensor, "*n D"]:
    """Singular values of X from its Gram matrix X X^T or X^T X, largest first.

    A Gram matrix squares the condition number. Singular values below sqrt(D eps) of the largest, with eps the rounding
    error of `gram`, are therefore noise, however precise the decomposition is: 1.5e-8 sqrt(D) in float64 and
    3.5e-4 sqrt(D) in float32.

    >>> singular_values(torch.diag(torch.tensor([4.0, 9.0]))).tolist()
    [3.0, 2.0]
    """
    return eigenvalues(gram).clamp_min(0).sqrt()


def ranks_of_gram(gram: Float[Tensor, "*n D D"], tolerance: float | None = None) -> Ranks:
    """Stable, effective and numerical rank of X from its Gram matrix.

    Effective rank follows Roy and Vetterli (2007): exp of the entropy of s / sum s. The variant with s^2 / sum s^2, the
    von Neumann entropy of gram / tr(gram), is never larger and lies closer to the stable rank. Singular values below
    sqrt(D eps) of the largest count as zero (see `singular_values`). This limit is also the default tolerance, because
    a smaller one could not be resolved.

    >>> ranks = ranks_of_gram(torch.diag(torch.tensor([4.0, 1.0, 1.0, 0.0])))          # s = 2, 1, 1, 0
    >>> ranks.stable.item(), round(ranks.effective.item() ** 2, 6), ranks.numerical.item()
    (1.5, 8.0, 3.0)
    """
    eps = torch.finfo(upcast(gram).dtype).eps
    floor = torch.tensor(math.sqrt(gram.shape[-1] * eps), dtype=torch.float64, device=gram.device)
    return _ranks(singular_values(gram), floor, floor if tolerance is None else torch.full_like(floor, tolerance))


def ranks(x: Sequences, real: Real | None = None, centred: bool = False, tolerance: float | None = None) -> Ranks:
    """Ranks of the (tokens, width) matrix of each sequence, from the smaller of its two Gram matrices.

    The Gram matrix is float64, so singular values down to 1.5e-8 sqrt(min(tokens, width)) of the largest are resolved.
    The default tolerance is the usual max(tokens, width) eps, with eps that of x. For float32 it lies above this limit;
    for float64 the limit replaces it. Half precision is treated as float32, so its own rounding counts as rank: pass a
    `tolerance`. `centred` removes the mean over tokens first, which otherwise tends to be the first direction.

    >>> x = torch.tensor([[[1.0, 2.0, 0.0], [2.0, 4.0, 0.0]]])
    >>> ranks(x).numerical.item(), round(ranks(x).stable.item(), 6), round(ranks(x).effective.item(), 6)
    (1.0, 1.0, 1.0)
    """
    eps = torch.finfo(upcast(x).dtype).eps
    x, keep = fill_padding(x, real)
    size = x.abs().amax((-2, -1)).unsqueeze(-1)
    x = scale_to_one(x, (-2, -1))
    x = centre_on_mean(x, keep) if centred else x
    tokens, width = x.shape[-2:]
    s = singular_values(x @ x.mT if tokens <= width else x.mT @ x)
    n = keep.sum(-1)
    floor = (n.clamp_max(width) * torch.finfo(torch.float64).eps).sqrt()
    relative = n.clamp_min(width) * eps if tolerance is None else torch.full_like(floor, tolerance)
    s = s.masked_fill((n == 0).unsqueeze(-1), math.nan)
    return replace(_ranks(s, floor, relative), singular_values=s * size)


def _ranks(values: Float[Tensor, "*n D"], floor: Tensor, tolerance: Tensor) -> Ranks:
    """From singular values, largest first; those below `floor` of the largest count as zero."""
    top = values[..., 0]
    s = (values / torch.where(top == 0, 1, top).unsqueeze(-1)).where(values > (floor * top).unsqueeze(-1), 0)
    stable = s.square().sum(-1)
    effective = torch.special.entr(s / s.sum(-1, keepdim=True)).sum(-1).exp()
    numerical = (s > tolerance.unsqueeze(-1)).sum(-1).double()
    # 0 stays 0 and NaN stays NaN
    stable, effective, numerical = (x.where(top > 0, top) for x in (stable, effective, numerical))
    return Ranks(stable, effective, numerical, values)


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


def eigenvalues(symmetric: Float[Tensor, "*n D D"]) -> Float[Tensor, "*n D"]:
    """Eigenvalues in float64, largest first; NaN for a matrix that is not finite.

    Without that check the solver would raise, and the other matrices of the batch would be lost with it. Runs in one
    thread: on the CPU two threads took 1.1 to 6 times as long at every size from 32 to 1,024.

    >>> eigenvalues(torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[math.inf, 0.0], [0.0, 1.0]]])).tolist()
    [[2.0, -2.0], [nan, nan]]
    """
    finite = symmetric.isfinite().all(-1).all(-1).unsqueeze(-1)
    with one_thread():
        values = torch.linalg.eigvalsh(symmetric.double().masked_fill(~finite.unsqueeze(-1), 0)).flip(-1)
    return values.masked_fill(~finite, math.nan)
