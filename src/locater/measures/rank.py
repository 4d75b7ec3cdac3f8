"""How many directions the tokens of a sequence use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures.sequences import Real, Sequences, centred_on_mean, filled, scaled
from locater.measures.symmetric import eigenvalues
from locater.numerics import upcast


@dataclass(frozen=True)
class Ranks:
    """Three answers to how many directions a matrix with singular values s uses. 0 for a zero matrix."""

    stable: Float[Tensor, "*n"]  # sum s^2 / max s^2
    effective: Float[Tensor, "*n"]  # exp of the entropy of s / sum s
    numerical: Float[Tensor, "*n"]  # how many s > tolerance * max s; a float, so that NaN can be said
    # s, largest first, as they came: those that count as zero above are still in it
    singular_values: Float[Tensor, "*n D"]


def singular_values(gram: Float[Tensor, "*n D D"]) -> Float[Tensor, "*n D"]:
    """Singular values of X from its Gram matrix X X^T or X^T X, largest first.

    A Gram matrix squares the condition number: values below sqrt(D eps) of the largest, eps being the rounding of
    `gram` (1.5e-8 sqrt(D) in float64, 3.5e-4 sqrt(D) in float32), are rounding, whatever precision the decomposition
    has.

    >>> singular_values(torch.diag(torch.tensor([4.0, 9.0]))).tolist()
    [3.0, 2.0]
    """
    return eigenvalues(gram).clamp_min(0).sqrt()


def ranks_of_gram(gram: Float[Tensor, "*n D D"], tolerance: float | None = None) -> Ranks:
    """Stable, effective and numerical rank of X from its Gram matrix.

    Effective rank is that of Roy and Vetterli (2007), on s / sum s. The variant on s^2 / sum s^2, the von Neumann
    entropy of gram / tr(gram), is never larger, and nearer to the stable rank. Singular values under the floor sqrt(D
    eps) of `singular_values` are taken as zero, and the floor is the default tolerance: no smaller one can be kept.

    >>> ranks = ranks_of_gram(torch.diag(torch.tensor([4.0, 1.0, 1.0, 0.0])))          # s = 2, 1, 1, 0
    >>> ranks.stable.item(), round(ranks.effective.item() ** 2, 6), ranks.numerical.item()
    (1.5, 8.0, 3.0)
    """
    eps = torch.finfo(upcast(gram).dtype).eps
    floor = torch.tensor(math.sqrt(gram.shape[-1] * eps), dtype=torch.float64, device=gram.device)
    return _ranks(singular_values(gram), floor, floor if tolerance is None else torch.full_like(floor, tolerance))


def ranks(x: Sequences, real: Real | None = None, centred: bool = False, tolerance: float | None = None) -> Ranks:
    """Ranks of every sequence's (tokens, width) matrix, from the smaller of its two Gram matrices.

    The Gram matrix is float64, so singular values down to 1.5e-8 sqrt(min(tokens, width)) of the largest are seen. The
    default tolerance is the usual max(tokens, width) eps, eps that of x, which is above this floor for float32; for
    float64 the floor stands in. Half precision is judged as float32: its own rounding then counts as rank, so give a
    tolerance. `centred` leaves out the mean over tokens, which otherwise tends to be the first direction.

    >>> x = torch.tensor([[[1.0, 2.0, 0.0], [2.0, 4.0, 0.0]]])
    >>> ranks(x).numerical.item(), round(ranks(x).stable.item(), 6), round(ranks(x).effective.item(), 6)
    (1.0, 1.0, 1.0)
    """
    eps = torch.finfo(upcast(x).dtype).eps
    x, keep = filled(x, real)
    size = x.abs().amax((-2, -1)).unsqueeze(-1)
    x = scaled(x, (-2, -1))
    x = centred_on_mean(x, keep) if centred else x
    tokens, width = x.shape[-2:]
    found = singular_values(x @ x.mT if tokens <= width else x.mT @ x)
    n = keep.sum(-1)
    floor = (n.clamp_max(width) * torch.finfo(torch.float64).eps).sqrt()
    usual = n.clamp_min(width) * eps if tolerance is None else torch.full_like(floor, tolerance)
    found = found.masked_fill((n == 0).unsqueeze(-1), math.nan)
    return replace(_ranks(found, floor, usual), singular_values=found * size)


def _ranks(found: Tensor, floor: Tensor, tolerance: Tensor) -> Ranks:
    top = found[..., 0]
    s = (found / torch.where(top == 0, 1, top).unsqueeze(-1)).where(found > (floor * top).unsqueeze(-1), 0)
    stable = s.square().sum(-1)
    effective = torch.special.entr(s / s.sum(-1, keepdim=True)).sum(-1).exp()
    numerical = (s > tolerance.unsqueeze(-1)).sum(-1).double()
    # 0 stays 0 and NaN stays NaN
    stable, effective, numerical = (x.where(top > 0, top) for x in (stable, effective, numerical))
    return Ranks(stable, effective, numerical, found)
