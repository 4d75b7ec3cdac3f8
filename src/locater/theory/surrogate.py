"""The Gaussian surrogate: the head itself, run on normal tokens with the mean and covariance that its real input has.

Weights alone assume tokens of mean zero and unit covariance, which real streams are far from: their mean carries much of the
energy. Replacing real tokens by normal ones with the same first two moments keeps that and forgets everything else, the order of
tokens included. docs/theory.md section 6.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

JITTER = 1e-6  # of the mean variance: covariances of few tokens are singular


def root(covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """R with R R^T = covariance, where it is singular too (then to 1e-6 of the mean variance); NaN where it is not finite.

    >>> r = root(torch.diag(torch.tensor([4.0, 0.0])))
    >>> torch.allclose(r @ r.mT, torch.diag(torch.tensor([4.0, 0.0])), atol=1e-5)
    True
    """
    if not bool(covariance.isfinite().all()):
        return torch.full_like(covariance, torch.nan)
    unit = covariance.diagonal().mean() * torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    for jitter in (0.0, JITTER):  # both are far cheaper than eigenvalues
        factor, failed = torch.linalg.cholesky_ex(covariance + jitter * unit)
        if not int(failed):
            return factor
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt()


def gaussian_tokens(
    mean: Float[Tensor, " d"],
    covariance: Float[Tensor, "d d"],
    sequences: int,
    length: int,
    first: Float[Tensor, " d"] | None = None,
    seed: int = 0,
) -> Float[Tensor, "B T d"]:
    """Independent normal tokens; `first` takes the place of the first of each sequence, which in trained models is like no other.

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
