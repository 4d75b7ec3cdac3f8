"""How alike the tokens of a sequence are."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import LocaterError
from locater.measures.sequences import (
    Mask,
    Matrices,
    PerSequence,
    Real,
    Sequences,
    centre_on_mean,
    fill_and_scale,
    fill_padding,
    scale_to_one,
)
from locater.numerics import one_thread

CENTRES = ("mean", "midrange", "svd")


def composite_norm(x: Matrices) -> Float[Tensor, "*n"]:
    """sqrt(||X||_1 ||X||_inf), the root of the largest column abs-sum times the largest row abs-sum (Dong, Cordonnier,
    Loukas 2021).

    Homogeneous and sub-multiplicative, but not a norm: it violates the triangle inequality, which each of its two
    factors satisfies.

    >>> row, column = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> [round(composite_norm(x).item() ** 2, 6) for x in (row, column, row + column)]          # sqrt 2 + sqrt 2 < 3
    [2.0, 2.0, 9.0]
    """
    top = x.double().abs().amax((-2, -1))
    return _composite(scale_to_one(x.double(), (-2, -1))) * top


def token_residual(x: Matrices, real: Mask | None = None, centre: str = "mean") -> Matrices:
    """X minus the part that all tokens share; padding is 0. `centre` chooses the shared part:

    - "mean": 1 v^T, with v the mean over tokens. In `composite_norm` its residual is at most 2 (1 - 1/n) times that of
      the best v.
    - "midrange": 1 v^T, with v halfway between the smallest and the largest value of each channel. This v minimises the
      largest entry of the residual.
    - "svd": the closest matrix of rank one, in which tokens share a direction but not a length.

    >>> x = torch.tensor([[0.0, 1.0], [0.0, 1.0], [3.0, 1.0]])
    >>> [token_residual(x, centre=name)[:, 0].tolist() for name in ("mean", "midrange")]
    [[-1.0, -1.0, 2.0], [-1.5, -1.5, 1.5]]
    >>> bool(token_residual(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), centre="svd").abs().max() < 1e-14)
    True
    """
    if centre not in CENTRES:
        raise LocaterError(f"centre={centre!r} is not known: use one of {', '.join(CENTRES)}")
    x, keep = fill_padding(x, real)
    without = {"mean": centre_on_mean, "midrange": _without_midrange, "svd": _without_rank_one}[centre]
    return without(x, keep)


def rank_residual(x: Sequences, real: Real | None = None, norm: str = "composite", centre: str = "mean") -> PerSequence:
    """||X - 1 mean^T|| / ||X||: how far the tokens are from being equal. 0 is rank collapse (Dong, Cordonnier, Loukas
    2021).

    `norm` is "composite", sqrt(max column abs-sum * max row abs-sum) with tokens as rows, or "frobenius", whose square
    is one minus the share of the mean in the energy. The paper's figures show "composite". The paper's text subtracts
    the closest 1 v^T; the code of its figures subtracts the mean over tokens, as here, which is closest only in the
    Frobenius norm. For other centres see `token_residual`.

    >>> x = torch.tensor([[[3.0, 1.0], [1.0, 1.0]]])          # mean (2, 1), residual [[1, 0], [-1, 0]]
    >>> round(rank_residual(x).item() ** 2, 6), round(rank_residual(x, norm="frobenius").item() ** 2, 6)
    (0.125, 0.166667)
    """
    if norm not in ("composite", "frobenius"):
        raise LocaterError(f"norm={norm!r} is not known: use 'composite' or 'frobenius'")
    size = _composite if norm == "composite" else _frobenius
    x, keep = fill_and_scale(x, real)
    return size(token_residual(x, keep, centre)) / size(x)


def token_cosine(x: Sequences, real: Real | None = None, centred: bool = False) -> PerSequence:
    """Mean cosine over pairs of distinct tokens (Shi et al. 2022): (|sum u|^2 - n) / (n (n - 1)), u the n unit vectors.

    1 when all tokens point the same way, 0 when pairs are orthogonal on average, never below -1 / (n - 1). A large
    common mean alone brings it near 1; with `centred` the mean over tokens is subtracted first. Tokens without a
    direction (zero, or equal to the mean when centred) do not count. NaN where fewer than two tokens are left.

    >>> token_cosine(torch.tensor([[[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]])).item()          # cosines 1, 0, 0
    0.3333333333333333
    """
    x, keep = fill_and_scale(x, real)
    x = scale_to_one(centre_on_mean(x, keep) if centred else x, (-1,))
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # at least 1 after scaling, or 0
    total = (x / norm.clamp_min(1)).sum(-2).square().sum(-1)
    n = (norm > 0).sum((-2, -1))
    return torch.where(n > 1, (total - n) / (n * (n - 1)), math.nan)


def _without_midrange(x: Matrices, keep: Mask) -> Matrices:
    absent = ~keep.unsqueeze(-1)
    middle = (
        x.masked_fill(absent, -math.inf).amax(-2, keepdim=True) / 2
        + x.masked_fill(absent, math.inf).amin(-2, keepdim=True) / 2
    )
    return (x - middle).masked_fill(absent, 0)


def _without_rank_one(x: Matrices, keep: Mask) -> Matrices:
    """x minus its first singular triple; NaN for a matrix that is not finite, where the solver would raise."""
    finite = x.isfinite().all(-1).all(-1)[..., None, None]
    with one_thread():
        U, s, Vh = torch.linalg.svd(x.masked_fill(~finite, 0), full_matrices=False)
    rest = (x - U[..., :, :1] * s[..., None, :1] * Vh[..., :1, :]).masked_fill(~finite, math.nan)
    return rest.masked_fill(~keep.unsqueeze(-1), 0)


def _composite(x: Matrices) -> Float[Tensor, "*n"]:
    size = x.abs()
    return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()


def _frobenius(x: Matrices) -> Float[Tensor, "*n"]:
    return torch.linalg.vector_norm(x, dim=(-2, -1))
