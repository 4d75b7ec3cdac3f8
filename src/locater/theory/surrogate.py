"""The Gaussian surrogate: the head itself, run on normal tokens with the mean and covariance that its real input has.

Weights alone assume tokens of mean zero and unit covariance, which real streams are far from: their mean carries much
of the energy. Replacing real tokens by normal ones with the same first two moments keeps that and forgets everything
else, the order of tokens included. docs/theory.md section 6.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

# roundings of the mean variance, 1e-6 of it in float32: covariances of few tokens, or behind a LayerNorm, are singular
JITTER = 8
MOST = 2e-4  # of the mean variance; what is indefinite by more is no covariance


def root(covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """R with R R^T = covariance + 1e-6 of the mean variance (1e-15 in float64), more where rounding has made it
    indefinite; NaN where it is not finite.

    The jitter is always there. Whether a singular covariance has a Cholesky factor without it is decided by its last
    bits, which differ between processors, and predictions changed by 1e-4 with that.

    >>> r = root(torch.diag(torch.tensor([4.0, 0.0])))
    >>> torch.allclose(r @ r.mT, torch.diag(torch.tensor([4.0, 0.0])), atol=1e-5)
    True
    """
    if not bool(covariance.isfinite().all()):
        return torch.full_like(covariance, torch.nan)
    mean = covariance.diagonal().mean() * torch.eye(
        covariance.shape[-1], dtype=covariance.dtype, device=covariance.device
    )
    jitter = JITTER * torch.finfo(covariance.dtype).eps
    while jitter < MOST:  # even all of them are far cheaper than eigenvalues
        factor, failed = torch.linalg.cholesky_ex(covariance + jitter * mean)
        if not int(failed):
            return factor
        jitter *= 10
    return symmetric_root(covariance)


def symmetric_root(matrix: Float[Tensor, "*n d d"]) -> Float[Tensor, "*n d d"]:
    """The one symmetric R with R R^T = matrix and no negative eigenvalue; what is negative in `matrix` itself counts as
    0.

    Draws R z need such a root. V sqrt(L) of the eigenvectors V is one too, and not a number: V has signs, an order and,
    where eigenvalues are equal, a basis that solvers choose, on each processor and for each batch in their own way.

    >>> symmetric_root(torch.tensor([[2.0, 2.0], [2.0, 2.0]]))
    tensor([[1.0000, 1.0000],
            [1.0000, 1.0000]])
    """
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT


def gaussian_tokens(
    mean: Float[Tensor, " d"],
    covariance: Float[Tensor, "d d"],
    sequences: int,
    length: int,
    first: Float[Tensor, " d"] | None = None,
    seed: int = 0,
) -> Float[Tensor, "B T d"]:
    """Independent normal tokens; `first` takes the place of the first of each sequence, which in trained models is like
    no other.

    >>> x = gaussian_tokens(torch.tensor([3.0]), torch.tensor([[4.0]]), 100, 100)
    >>> round(x.mean().item(), 1), round(x.std().item(), 1)
    (3.0, 2.0)
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    noise = torch.randn(sequences, length, len(mean), generator=generator, dtype=mean.dtype).to(mean.device)
    tokens = mean + noise @ root(covariance).mT
    if first is not None:
        tokens[:, 0] = first
    return tokens
