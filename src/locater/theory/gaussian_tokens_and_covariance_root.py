"""The Gaussian surrogate: the head itself, run on normal tokens with the mean and covariance of its real input.

A prediction from weights alone assumes tokens of mean zero and unit covariance. Real streams are far from that: their
mean carries much of the energy. The surrogate replaces real tokens by normal ones with the same first two moments and
ignores everything else, including the order of tokens. docs/theory.md section 6.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

# In units of eps times the mean variance (1e-6 of it in float32). Covariances of few tokens, or after a LayerNorm, are
# singular and need it.
JITTER = 8
LARGEST_JITTER = 2e-4  # relative to the mean variance; a matrix that is indefinite by more is not a covariance


def root(covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """R with R R^T = covariance + jitter; NaN where the covariance is not finite.

    The jitter is 1e-6 of the mean variance (1e-15 in float64), and more where rounding has made the covariance
    indefinite. It is always added. Without it the last bits of a singular covariance decide whether it has a Cholesky
    factor; they differ between processors, and predictions changed by 1e-4 with them.

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
    while jitter < LARGEST_JITTER:  # all attempts together are far cheaper than eigenvalues
        factor, failed = torch.linalg.cholesky_ex(covariance + jitter * mean)
        if not int(failed):
            return factor
        jitter *= 10
    return symmetric_root(covariance)


def symmetric_root(matrix: Float[Tensor, "*n d d"]) -> Float[Tensor, "*n d d"]:
    """The symmetric R with R R^T = matrix and no negative eigenvalue. Negative eigenvalues of `matrix` count as 0.

    Draws R z need a root that is unique. V sqrt(L), from eigenvectors V, is another root but not unique: signs, order
    and, for equal eigenvalues, the basis depend on the solver, the processor and the batch.

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
    """Independent normal tokens. `first` replaces the first token of each sequence, which models treat specially.

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
