"""Which tokens propagate their signal through a head: the propagation probability of Bao, Hataya and Karakida (2024),
re-derived for tokens of unit size; and the regimes of heads.

Tokens x_1 ... x_T follow a Gaussian random walk with step covariance C/T, so the last one, the query, has covariance C.
Its logit on token i is omega_i = s x_T^T W x_i, and token i propagates signal when softmax, replaced by its clipped
first-order form (1 + delta_i)/T with delta_i = omega_i - mean_j omega_j, is in its linear part: -1 < delta_i < T - 1.
The probability of that event, rho_i, needs only

    M = s tr(W C)      S = s^2 tr((W C)^2)      F = s^2 tr(W C W^T C)

M is the mean logit of a token with itself: the natural unit. A walk with step covariance Sigma instead of C/T has unit
moments T tr(W Sigma), T^2 tr((W Sigma)^2), T^2 tr(W Sigma W^T Sigma), each with its power of s; see `unit_moments`.
W need not be symmetric anywhere here. docs/theory.md sections 3 to 5.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.quasirandom import SobolEngine

from locater.numerics import as_float64, spread_over_workers
from locater.spectrum import Moments
from locater.theory.entropy import variance_at
from locater.theory.gaussian_tokens_and_covariance_root import symmetric_root

SKEW_LIMIT = 0.75  # |g1| above which the mixture is used: the closed form of a near-projector is off by 0.05 there
DRAWS = 2048
NODES = 64


def unit_moments(m: Moments, scale: float, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(M, S, F) of heads in logit units. Pass `length` when the moments were taken with a step covariance Sigma.

    >>> m = Moments(*[torch.eye(4)] * 3)     # W = a projector of rank 4
    >>> [x.item() for x in unit_moments(m, scale=0.5)]
    [2.0, 1.0, 1.0]
    """
    factor = scale * (1 if length is None else length)
    return m.trace * factor, m.trace_of_square * factor**2, m.frobenius_sq * factor**2


def signal_propagation(
    M: Float[Tensor, "*n"] | float, S: Float[Tensor, "*n"] | float, F: Float[Tensor, "*n"] | float, length: int
) -> Float[Tensor, "*n T"]:
    """rho_i for i = 1 ... T in closed form: exact mean and variance, with a Gaussian shape assumed.

        u = (i - (T+1)/2) / T,   E = M u,   V = (F [i(i-1) - iT + (T+1)(2T+1)/6] + S (i - (T+1)/2)^2) / T^2
        rho_i = Phi((T - 1 - E)/sqrt V) - Phi((-1 - E)/sqrt V)

    >>> rho = signal_propagation(4.0, 0.25, 0.25, length=64)
    >>> bool(rho[0] < 0.05), bool(rho[-1] > 0.95)
    (True, True)
    """
    M, S, F = (_column(x) for x in (M, S, F))
    i = torch.arange(1, length + 1, dtype=torch.float64, device=M.device)
    u = (i - (length + 1) / 2) / length
    variance = F * (_bridge(i, length) / length + u**2) + S * u**2
    return _between(M * u, variance, -1.0, length - 1.0)


def continuum(M: Tensor | float, S: Tensor | float, F: Tensor | float, u: Tensor) -> Float[Tensor, "*n u"]:
    """The limit of many tokens: rho(u) = Phi((1 + M u)/sqrt(F (u^2 + 1/12) + S u^2)), u in [-1/2, 1/2].

    >>> continuum(2.0, 0.25, 0.25, torch.tensor([-0.5, 0.0, 0.5])).round(decimals=2).tolist()
    [0.5, 1.0, 1.0]
    """
    M, S, F = (_column(x) for x in (M, S, F))
    return _between(M * u, F * (u**2 + 1 / 12) + S * u**2, -1.0, math.inf)


def mixture_propagation(
    m: Moments, scale: float, length: int, draws: int = DRAWS, seed: int = 0
) -> Float[Tensor, "*n T"]:
    """rho_i without assuming a Gaussian shape: for a fixed query the walk is a bridge, so delta_i is exactly normal.

        q = s y^T W y,   r^2 = s^2 y^T W C W^T y,   y ~ N(0, C)
        rho_i = E_y[ Phi((T - 1 - u q)/sd) - Phi((-1 - u q)/sd) ],   sd^2 = r^2 b_i / T

    y enters only through the 2 d_head numbers W_Q y, W_K y, so the three small matrices of `Moments` are enough.

    >>> m = Moments(*[torch.eye(4)] * 3)     # W = a projector of rank 4
    >>> bool((mixture_propagation(m, 1.0, 64).diff()[8:] > 0).all())     # near tokens get through more often
    True
    """
    i = torch.arange(1, length + 1, dtype=torch.float64, device=m.query_gram.device)
    u = (i - (length + 1) / 2) / length
    return _mixture(m, scale, u, _bridge(i, length) / length, length - 1.0, draws, seed)


def mixture_continuum(m: Moments, scale: float, u: Tensor, draws: int = DRAWS, seed: int = 0) -> Float[Tensor, "*n u"]:
    """`mixture_propagation` in the limit of many tokens: sd^2 = r^2 / 12, no upper clip.

    >>> m = Moments(*[torch.eye(4)] * 3)     # W = a projector of rank 4
    >>> mixture_continuum(m, 0.0, torch.tensor([-0.5, 0.5])).tolist()     # logits 0: every token gets through
    [1.0, 1.0]
    """
    u = u.to(m.query_gram.device)
    return _mixture(m, scale, u, torch.full_like(u, 1 / 12), math.inf, draws, seed)


def localization(M: Tensor | float, S: Tensor | float, F: Tensor | float) -> Float[Tensor, "*n"]:
    """Lambda, the share of the variance of the propagation event that position explains (odd part, with a sign).

        rho_o(u) = (rho(u) - rho(-u)) / 2,   rbar = mean of rho
        Lambda = sign * integral rho_o^2 du / (rbar (1 - rbar)),   0 where rbar (1 - rbar) < 1e-9

    The sign is that of integral u rho_o du, which here is the sign of M: positive where near tokens get through more
    often. Lambda lies in [-1, 1] and does not depend on the length. It is 0 for zero mean and for vanishing scale, and
    odd in the sign of W.

    >>> [round(localization(m, f**2, f**2).item(), 3) for m, f in [(2.0, 0.25), (4.0, 0.5), (16.0, 2.0), (-4.0, 0.5)]]
    [0.161, 0.566, 0.84, -0.566]
    """
    u, weight = (x.to(as_float64(M).device) for x in _quadrature())
    return _share_explained(continuum(M, S, F, u), u, weight)


def mixture_localization(m: Moments, scale: float, draws: int = DRAWS, seed: int = 0) -> Float[Tensor, "*n"]:
    """Lambda from the exact mixture, for heads with few directions: there position can matter even where M is 0.

    >>> m = Moments(*[torch.eye(4)] * 3)     # W = a projector of rank 4
    >>> mixture_localization(m, 1.0).round(decimals=1).item()
    0.3
    """
    u, weight = (x.to(m.query_gram.device) for x in _quadrature())
    return _share_explained(mixture_continuum(m, scale, u, draws, seed), u, weight)


def _bridge(i: Tensor, length: int) -> Tensor:
    """b_i: variance of the centred bridge in units of one step, times the length."""
    t = length
    return (i * (i - 1) - i * t + (t + 1) * (2 * t + 1) / 6 - (i - (t + 1) / 2) ** 2) / t


def _mixture(m: Moments, scale: float, u: Tensor, b: Tensor, upper: float, draws: int, seed: int) -> Tensor:
    A, B, G = (x.detach().double() for x in (m.query_gram, m.key_gram, m.gram))
    h, device = m.head_dim, A.device
    out = torch.empty(*A.shape[:-2], len(u), dtype=torch.float64, device=device)
    if not out.numel():
        return out
    # bring queries and keys to one size: a root of their joint covariance has only the digits of the larger one
    query, key = (torch.where(x > 0, x, 1)[..., None, None] for x in (_mean_diagonal(A), _mean_diagonal(B)))
    A, B, G, size = A / query, B / key, G / (query * key).sqrt(), scale * (query * key).sqrt()[..., 0]
    # covariance of (W_Q y, W_K y)
    covariance = torch.cat([torch.cat([A, G.mT], -1), torch.cat([G, B], -1)], -2)
    forms = spread_over_workers(_forms_of_normals, covariance.cpu()).to(device)
    noise = _normals(draws, 2 * h, seed).to(device)
    for index in np.ndindex(A.shape[:-2]):  # one head at a time, so that memory is draws x positions for any batch
        q, r_sq = (((noise @ form) * noise).sum(-1, keepdim=True) for form in forms[index].split(2 * h))
        out[index] = _between(size[index] * q * u, size[index] ** 2 * r_sq * b, -1.0, upper).mean(0)
    return out


MIXED_IN = 0.1  # of the form of the variance: it decides on directions of equal means
TIE = 1e-7  # of a fixed form, for directions that are equal in both


def _forms_of_normals(covariance: Float[Tensor, "*n k k"]) -> Float[Tensor, "*n two_k k"]:
    """Symmetric matrices of q = z^T (first k rows) z and r^2 = z^T (last k rows) z, where z has k independent normal
    numbers, from the covariance of (W_Q y, W_K y).

    Their basis is a property of the two forms, strongest directions first: what is drawn for a head depends on no order
    or basis of its channels, and on no solver, and draws that are spread evenly are so where it counts.
    """
    h = covariance.shape[-1] // 2
    root = symmetric_root(covariance)
    query, key = root[..., :h, :], root[..., h:, :]
    q, r_sq = (query.mT @ key + key.mT @ query) / 2, query.mT @ covariance[..., h:, h:] @ query
    size = r_sq.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-300).sqrt()
    fixed = torch.linspace(0, 1, 2 * h, dtype=root.dtype).diag()
    values, basis = torch.linalg.eigh(q + MIXED_IN * r_sq / size + TIE * size * fixed)
    order = values.abs().argsort(-1, descending=True)
    basis = basis.gather(-1, order.unsqueeze(-2).expand_as(basis))
    strongest = torch.linalg.eigh(r_sq + TIE * size**2 * fixed)[1][..., -1:]
    basis = torch.where((basis.mT @ strongest).mT < 0, -basis, basis)  # the sign of all at once changes nothing
    return torch.cat([basis.mT @ q @ basis, basis.mT @ r_sq @ basis], -2)


@lru_cache(maxsize=4)
def _normals(draws: int, count: int, seed: int) -> Tensor:
    """Rows of independent normal numbers, spread more evenly than chance would (a scrambled Sobol sequence)."""
    even = SobolEngine(count, scramble=True, seed=seed).draw(draws, dtype=torch.float64)
    return torch.special.ndtri(even.clamp(1e-12, 1 - 1e-12))


def _mean_diagonal(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).mean(-1)


def _between(mean: Tensor, variance: Tensor, lower: float, upper: float) -> Tensor:
    """P(lower < N(mean, variance) < upper), also for variance 0."""
    sd = variance.clamp_min(1e-300).sqrt()
    low = torch.special.ndtr((lower - mean) / sd)
    return torch.special.ndtr((upper - mean) / sd) - low if math.isfinite(upper) else 1 - low


def _share_explained(rho: Tensor, u: Tensor, weight: Tensor) -> Tensor:
    odd = (rho - rho.flip(-1)) / 2
    mean = (rho * weight).sum(-1)
    noise = mean * (1 - mean)
    share = (odd**2 * weight).sum(-1) / noise.clamp_min(1e-9)
    return torch.where(noise < 1e-9, torch.zeros_like(share), torch.sign((u * odd * weight).sum(-1)) * share)


def _column(x: Tensor | float) -> Tensor:
    return as_float64(x).unsqueeze(-1)


@cache
def _quadrature() -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights on [-1/2, 1/2]; symmetric, so flipping mirrors u."""
    x, w = np.polynomial.legendre.leggauss(NODES)
    return torch.from_numpy(x / 2), torch.from_numpy(w / 2)


# ---- regimes of heads, and the phase diagram ----


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
