"""The propagation probability and the localization index, held to simulated walks, exact covariances and quadrature.

Three references, none of which shares a formula with the source: walks drawn step by step (`simulate`), the covariance
of delta_i as a quadratic form in all T d steps, and for projectors the one-dimensional integral over the query's
length.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from locater.spectrum import Moments, moments
from locater.theory import (
    REGIMES,
    continuum,
    localization,
    mixture_continuum,
    mixture_localization,
    mixture_propagation,
    phase_diagram,
    regime,
    signal_propagation,
    unit_moments,
)
from locater_lab.theory import simulate

SKEW_ERROR = 0.064  # section 4: the closed form is off by about this much of |g1|
WALKS = 50_000
DRAWS = 100_000


def head(head_dim: int, width: int, shared: float, seed: int) -> tuple[Tensor, Tensor]:
    """W_Q and W_K with orthonormal rows scaled so that ||W||_F = sqrt(d_head); `shared` = 1: a projector, -1: minus
    one, 0: no mean.
    """
    rows = torch.randn(width, 2 * head_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    frame = torch.linalg.qr(rows)[0].mT
    W_Q, other = frame[:head_dim], frame[head_dim : 2 * head_dim]
    return W_Q, shared * W_Q if abs(shared) == 1 else shared * W_Q + math.sqrt(1 - shared**2) * other


def anisotropic(width: int, seed: int) -> Tensor:
    """A covariance whose largest and smallest directions differ by a factor of thirty, in no special basis."""
    basis = torch.linalg.qr(
        torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )[0]
    return basis @ torch.diag(torch.logspace(-1, 0.5, width, dtype=torch.float64)) @ basis.mT


def sampling_error(rho: Tensor, *counts: int) -> Tensor:
    """Standard error of simulated minus predicted. A mean of probabilities varies less than one of events: rho (1 -
    rho) bounds both.
    """
    return sum(((rho * (1 - rho) + 1 / n) / n for n in counts), torch.zeros_like(rho)).sqrt()


# --- the mean and the variance of delta_i ---------------------------------------------------------------------------


def exact_mean_and_variance(
    W: np.ndarray, step: np.ndarray, scale: float, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """delta_i = e^T A_i e in the T d numbers of all steps: mean tr(A Sigma), variance 2 tr((A_sym Sigma)^2)."""
    reach = np.tril(np.ones((length, length)))  # x_i is the sum of the first i steps
    centred = reach - reach.mean(0)
    sigma = np.kron(np.eye(length), step)
    forms = [scale * np.kron(np.outer(reach[-1], row), W) for row in centred]
    products = [(form + form.T) / 2 @ sigma for form in forms]
    return np.array([np.trace(p) for p in products]), np.array([2 * np.trace(p @ p) for p in products])


@pytest.mark.parametrize("length", [2, 5, 9])
@pytest.mark.parametrize("kind", ["symmetric", "general", "antisymmetric"])
def test_closed_form_has_the_exact_mean_and_variance_for_any_step_covariance(kind: str, length: int) -> None:
    """The general form of section 3: moments in a step covariance Sigma, `length` to bring them to unit tokens."""
    rng = np.random.default_rng(length)
    q, k, root = rng.standard_normal((3, 4)), rng.standard_normal((3, 4)), rng.standard_normal((4, 4)) / 3
    if kind == "symmetric":
        k = q
    elif kind == "antisymmetric":
        q, k = np.concatenate([q, -k]), np.concatenate([k, q])
    step = root @ root.T
    m = moments(torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(step))
    for scale in (0.1, 0.5, 2.0):  # rho sees (1 + E)/sd only: three scales tell the mean from the spread
        mean, variance = exact_mean_and_variance(q.T @ k, step, scale, length)
        sd = np.sqrt(variance)
        expected = stats.norm.cdf((length - 1 - mean) / sd) - stats.norm.cdf((-1 - mean) / sd)
        rho = signal_propagation(*unit_moments(m, scale, length), length=length)
        np.testing.assert_allclose(rho.numpy(), expected, atol=1e-10)


def test_unit_moments_of_a_step_covariance_are_those_of_the_token_covariance() -> None:
    W_Q, W_K = head(4, 12, 0.5, seed=0)
    C, length = anisotropic(12, seed=1), 24
    by_step = unit_moments(moments(W_Q, W_K, C / length), 0.7, length)
    torch.testing.assert_close(by_step, unit_moments(moments(W_Q, W_K, C), 0.7))
    WC = (W_Q.mT @ W_K @ C).numpy()
    expected = 0.7 * np.trace(WC), 0.49 * np.trace(WC @ WC), 0.49 * np.trace(WC @ (W_K.mT @ W_Q @ C).numpy())
    np.testing.assert_allclose([x.item() for x in by_step], expected, rtol=1e-10)


def test_on_the_sphere_the_eigenvalue_variance_is_the_noise_of_a_self_logit() -> None:
    """Var(x^T W x) = 2d/(d+2) [tr W_sym^2 - (tr W)^2/d] for |x|^2 = d: section 3's cleanest statement of the paper."""
    W_Q, W_K = head(4, 10, 0.6, seed=2)
    W_K = W_K * torch.tensor([[3.0], [1.0], [0.5], [2.0]], dtype=torch.float64)
    m, d = moments(W_Q, W_K), 10
    x = np.random.default_rng(3).standard_normal((200_000, d))
    x *= math.sqrt(d) / np.linalg.norm(x, axis=1, keepdims=True)
    blocks = np.einsum("ni,ij,nj->n", x, (W_Q.mT @ W_K).numpy(), x).reshape(20, -1).var(1)
    expected = 2 * d / (d + 2) * (m.symmetric_sq - m.trace**2 / d).item()
    assert abs(blocks.mean() - expected) < 5 * blocks.std(ddof=1) / math.sqrt(20)


# --- rho against walks -----------------------------------------------------------------------------------------------

HIGH_RANK = {
    "localized: a projector": (1.0, 0.5, False),
    "localized on the far end: minus a projector": (-1.0, 0.5, False),
    "not symmetric": (0.4, 1.0, False),
    "anisotropic tokens": (0.7, 0.6, True),
}


@pytest.mark.parametrize("name", HIGH_RANK)
def test_closed_form_fits_walks_of_a_head_with_many_directions(name: str) -> None:
    shared, scale, coloured = HIGH_RANK[name]
    W_Q, W_K = head(16, 32, shared, seed=4)
    C = anisotropic(32, seed=5) if coloured else None
    m = moments(W_Q, W_K, C)
    rho = signal_propagation(*unit_moments(m, scale), length=16)
    seen = simulate(W_Q, W_K, scale, 16, walks=WALKS, covariance=C, seed=6).propagated
    assert bool(((rho - seen).abs() < 5 * sampling_error(rho, WALKS) + SKEW_ERROR * abs(m.skew.item())).all())
    assert seen.max() - seen.min() > 0.5, "a head that is flat over positions would fit many formulas"


def edgeworth(W: np.ndarray, C: np.ndarray, scale: float, length: int) -> Tensor:
    """What P(delta_i > -1) has beyond a normal law, to the order of the kurtosis, from the exact cumulants of delta_i.

    delta_i = s x_T^T W v is a quadratic form in two normal vectors, the query and v = x_i - mean_j x_j.
    """
    reach = np.tril(np.ones((length, length))) / math.sqrt(length)
    centred, zero = reach - reach.mean(0), np.zeros_like(W)
    form = scale / 2 * np.block([[zero, W], [W.T, zero]])
    found = []
    for row in centred:
        p = form @ np.kron(np.array([[1.0, reach[-1] @ row], [reach[-1] @ row, row @ row]]), C)
        k1, k2, k3, k4 = np.trace(p), 2 * np.trace(p @ p), 8 * np.trace(p @ p @ p), 48 * np.trace(p @ p @ p @ p)
        z, g1, g2 = (-1 - k1) / math.sqrt(k2), k3 / k2**1.5, k4 / k2**2
        series = np.polynomial.hermite_e.hermeval(z, [0, 0, g1 / 6, g2 / 24, 0, g1**2 / 72])
        found.append(series * stats.norm.pdf(z))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("shared", [0.0, 0.4])
def test_closed_form_misses_walks_of_a_map_without_symmetry_only_by_its_shape(shared: float) -> None:
    """Little skew here, but tails: with the exact third and fourth cumulants put in, nothing but sampling error is
    left.
    """
    W_Q, W_K = head(16, 32, shared, seed=4)
    rho = signal_propagation(*unit_moments(moments(W_Q, W_K), 1.5), length=16)
    rho = rho + edgeworth((W_Q.mT @ W_K).numpy(), np.eye(32), 1.5, 16)
    seen = simulate(W_Q, W_K, 1.5, 16, walks=WALKS, seed=6).propagated
    assert bool(((rho - seen).abs() < 5 * sampling_error(rho, WALKS)).all())


LOW_RANK = {
    "rank 1, symmetric": (1, 1.0, 4.0, False),
    "rank 1, repels itself": (1, -1.0, 4.0, False),
    "rank 1, not symmetric": (1, 0.3, 6.0, False),
    "rank 1, anisotropic tokens": (1, 0.5, 4.0, True),
    "rank 4, symmetric": (4, 1.0, 1.0, False),
    "rank 4, not symmetric": (4, 0.5, 3.0, False),
    "rank 4, no mean": (4, 0.0, 3.0, False),
    "rank 4, anisotropic tokens": (4, 0.7, 2.0, True),
}


@pytest.mark.parametrize("name", LOW_RANK)
def test_mixture_fits_walks_of_a_head_with_few_directions(name: str) -> None:
    """No allowance for skew here: given the query the walk is a bridge and the mixture is exact."""
    rank, shared, scale, coloured = LOW_RANK[name]
    W_Q, W_K = head(rank, 10, shared, seed=7)
    C = anisotropic(10, seed=8) if coloured else None
    rho = mixture_propagation(moments(W_Q, W_K, C), scale, 24, draws=DRAWS, seed=9)
    seen = simulate(W_Q, W_K, scale, 24, walks=WALKS, covariance=C, seed=10).propagated
    assert bool(((rho - seen).abs() < 5 * sampling_error(rho, WALKS, DRAWS)).all())


@pytest.mark.parametrize(("rank", "M"), [(1, 8.0), (1, 2.0), (4, 4.0), (4, 16.0)])
def test_mixture_is_closer_to_walks_than_the_closed_form(rank: int, M: float) -> None:
    W_Q, W_K = head(rank, rank * 2, 1.0, seed=11)
    m, scale = moments(W_Q, W_K), M / rank
    seen = simulate(W_Q, W_K, scale, 32, walks=WALKS, seed=12).propagated
    closed = (signal_propagation(*unit_moments(m, scale), length=32) - seen).abs()
    mixture = (mixture_propagation(m, scale, 32) - seen).abs()  # with the default number of draws
    assert mixture.max() < 0.5 * closed.max()
    assert mixture.mean() < 0.5 * closed.mean()


def test_mixture_takes_over_where_skew_says_nothing() -> None:
    """A rotation in one plane has g1 = 0, yet the closed form is off: heavy tails, not asymmetry. The mixture knows."""
    W_Q, W_K = 4 * torch.eye(2, dtype=torch.float64), torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    m = moments(W_Q, W_K)
    seen = simulate(W_Q, W_K, 1.0, 32, walks=WALKS, seed=13).propagated
    assert m.skew.item() == 0
    assert (signal_propagation(*unit_moments(m, 1.0), length=32) - seen).abs().max() > 0.04
    rho = mixture_propagation(m, 1.0, 32, draws=DRAWS)
    assert bool(((rho - seen).abs() < 5 * sampling_error(rho, WALKS, DRAWS)).all())


# --- rho of projectors, by quadrature ---------------------------------------------------------------------------------


@cache
def query_lengths(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights for |P y|, P a projector of that rank: chi distributed."""
    law = stats.chi(rank)
    low, high = law.ppf(1e-14), law.isf(1e-14)
    x, w = np.polynomial.legendre.leggauss(400)
    z = (high - low) / 2 * x + (high + low) / 2
    return z, w * (high - low) / 2 * law.pdf(z)


def exact_projector(M: float, rank: int, u: np.ndarray, bridge: float, upper: float) -> np.ndarray:
    """rho at u for W a multiple of a projector. Given the query, delta is normal with mean u q and variance q M/rank
    times `bridge`.
    """
    z, weight = query_lengths(rank)
    mean, sd = M / rank * np.outer(z**2, u), abs(M) / rank * z[:, None] * math.sqrt(bridge)
    return weight @ (stats.norm.cdf((upper - mean) / sd) - stats.norm.cdf((-1 - mean) / sd))


def bridge_variance(length: int) -> float:
    """Variance of the centred bridge x_i - mean_j x_j given x_T, per direction, for steps of variance 1/T: the same at
    every i.
    """
    reach = np.tril(np.ones((length, length))) / math.sqrt(length)
    centred = reach - reach.mean(0)
    # less the regression on the sum of all steps
    given = centred - np.outer(centred @ np.ones(length), np.ones(length)) / length
    return float((given**2).sum(1)[0])


@pytest.mark.parametrize(("rank", "table"), [(1, 0.18), (4, 0.09), (16, 0.05), (64, 0.02)])
def test_closed_form_errs_by_the_stated_share_of_the_skew(rank: int, table: float) -> None:
    """Worst position and worst scale, against the exact integral: section 4's law and its four figures."""
    length = 64
    u = (np.arange(1, length + 1) - (length + 1) / 2) / length
    worst = 0.0
    for M in np.geomspace(0.5, 40, 40):
        closed = signal_propagation(M, M**2 / rank, M**2 / rank, length=length).numpy()
        exact = exact_projector(M, rank, u, bridge_variance(length), length - 1)
        worst = max(worst, np.abs(closed - exact).max())
    assert worst == pytest.approx(table, abs=0.01)
    frame, _ = head(rank, 2 * rank, 1.0, seed=14)
    assert worst / moments(frame, frame).skew.item() == pytest.approx(SKEW_ERROR, abs=0.004)


@pytest.mark.parametrize(("rank", "M"), [(1, 3.0), (1, -6.0), (4, 4.0), (16, 8.0)])
def test_mixture_equals_the_exact_integral_for_a_projector(rank: int, M: float) -> None:
    m = Moments(*[torch.eye(rank, dtype=torch.float64)] * 3)
    u = (np.arange(1, 33) - 16.5) / 32
    exact = torch.from_numpy(exact_projector(M, rank, u, bridge_variance(32), 31.0))
    rho = mixture_propagation(m, M / rank, 32, draws=DRAWS, seed=15)
    assert bool(((rho - exact).abs() < 5 * sampling_error(exact, DRAWS)).all())
    x, w = np.polynomial.legendre.leggauss(200)
    limit = exact_projector(M, rank, x / 2, 1 / 12, math.inf)
    mean = (limit * w / 2).sum()
    expected = np.sign(M) * (((limit - limit[::-1]) / 2) ** 2 * w / 2).sum() / (mean * (1 - mean))
    by_seed = np.array([mixture_localization(m, M / rank, seed=seed).item() for seed in range(8)])
    assert abs(by_seed.mean() - expected) < 5 * by_seed.std(ddof=1) / math.sqrt(8)
    assert by_seed.std(ddof=1) < 0.02, "the default number of draws settles two decimals"


def few_directions(head_dim: int) -> tuple[Tensor, Tensor]:
    """Queries and keys (head_dim, 2 head_dim) that are alike and soon fade."""
    generator = torch.Generator().manual_seed(3)
    query, other = torch.randn(2, head_dim, 2 * head_dim, generator=generator, dtype=torch.float64)
    fading = (-torch.arange(head_dim, dtype=torch.float64) / 2).exp()[:, None]
    return query * fading, (query + other / 2) * fading


@pytest.mark.parametrize("head_dim", [4, 32])
def test_mixture_knows_no_order_or_basis_of_channels(head_dim: int) -> None:
    """W_Q^T W_K is the same after each of these."""
    query, key = few_directions(head_dim)
    turn = torch.linalg.qr(torch.randn(head_dim, head_dim, dtype=torch.float64))[0]
    stretch = torch.rand(head_dim, 1, dtype=torch.float64) + 0.5
    order = torch.randperm(head_dim)
    pairs = [(query, key), (query[order], key[order]), (turn @ query, turn @ key), (query * stretch, key / stretch)]
    found = [mixture_localization(moments(q, k), 0.5).item() for q, k in pairs]
    assert abs(found[0]) > 0.05
    assert found == pytest.approx([found[0]] * 4, abs=1e-7)


@pytest.mark.parametrize("head_dim", [4, 32])
def test_the_default_draws_settle_three_decimals(head_dim: int) -> None:
    m = moments(*few_directions(head_dim))
    exact = mixture_localization(m, 0.5, draws=2**17, seed=1).item()
    assert mixture_localization(m, 0.5).item() == pytest.approx(exact, abs=1e-3)


def test_mixture_answers_head_by_head_and_repeats_itself() -> None:
    batch = [[head(2, 8, shared, seed) for shared in (0.2, 0.9)] for seed in (16, 17, 18)]
    W_Q, W_K = (torch.stack([torch.stack([pair[side] for pair in row]) for row in batch]) for side in (0, 1))
    rho = mixture_propagation(moments(W_Q, W_K), 2.0, 12, draws=256)
    assert rho.shape == (3, 2, 12)
    alone = mixture_propagation(moments(W_Q[1, 1], W_K[1, 1]), 2.0, 12, draws=256)
    torch.testing.assert_close(rho[1, 1], alone)
    assert not torch.equal(alone, mixture_propagation(moments(W_Q[1, 1], W_K[1, 1]), 2.0, 12, draws=256, seed=1))
    assert mixture_localization(moments(W_Q, W_K), 2.0, draws=256).shape == (3, 2)


# --- the limit of many tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["closed", "mixture"])
def test_the_continuum_is_the_limit_of_many_tokens(form: str) -> None:
    W_Q, W_K = head(4, 10, 0.6, seed=19)
    m = moments(W_Q, W_K)

    def gap(length: int) -> float:
        u = (torch.arange(1, length + 1, dtype=torch.float64) - (length + 1) / 2) / length
        if form == "closed":
            difference = signal_propagation(*unit_moments(m, 2.0), length=length) - continuum(*unit_moments(m, 2.0), u)
        else:
            difference = mixture_propagation(m, 2.0, length, draws=512) - mixture_continuum(m, 2.0, u, draws=512)
        return difference.abs().max().item()

    assert gap(1024) < 1e-6
    assert gap(1024) < gap(64) / 100  # the bridge loses 1/T^2 of its variance
    assert gap(4) > 1e-3, "a short walk is no continuum: the two are not the same function"


# --- Lambda -----------------------------------------------------------------------------------------------------------


def reference_localization(M: float, S: float, F: float) -> float:
    """Section 5 by adaptive quadrature, split where rho crosses one half."""

    def rho(u: float) -> float:
        return float(stats.norm.cdf((1 + M * u) / math.sqrt(F * (u**2 + 1 / 12) + S * u**2)))

    edge = min(abs(1 / M), 0.49) if M else 0.25
    options = {"points": [-edge, 0, edge], "epsabs": 1e-11, "epsrel": 1e-10, "limit": 200}
    mean = integrate.quad(rho, -0.5, 0.5, **options)[0]
    odd = integrate.quad(lambda u: ((rho(u) - rho(-u)) / 2) ** 2, -0.5, 0.5, **options)[0]
    return float(np.sign(M)) * odd / (mean * (1 - mean)) if mean * (1 - mean) >= 1e-9 else 0.0


TABLE = [(2.0, 0.25, 0.161), (4.0, 0.5, 0.565), (16.0, 2.0, 0.840), (-4.0, 0.5, -0.565)] + [
    (4.0, 0.5 * math.sqrt(1 + cv**2), expected) for cv, expected in [(2, 0.440), (4, 0.324), (8, 0.138), (16, 0.039)]
]  # M, sqrt F, Lambda; a coefficient of variation cv multiplies F = M^2/64 by 1 + cv^2


@pytest.mark.parametrize(("M", "root_F", "expected"), TABLE)
def test_lambda_has_the_values_of_the_table(M: float, root_F: float, expected: float) -> None:
    assert localization(M, root_F**2, root_F**2).item() == pytest.approx(expected, abs=1e-3)


@given(
    M=st.floats(-30, 30), head_dim=st.integers(1, 128), ratio=st.floats(-0.9, 1.0), cv=st.floats(0, 10),
)  # fmt: skip
@settings(max_examples=40, deadline=None, derandomize=True)
def test_lambda_equals_adaptive_quadrature_for_every_map_a_head_can_have(
    M: float, head_dim: int, ratio: float, cv: float
) -> None:
    """M^2 <= d_head (2F + S)/3 always: the transition of rho is never narrower than a head of 128 directions makes
    it.
    """
    F = 3 * (M**2 + 1e-4) / (head_dim * (2 + ratio)) * (1 + cv**2)
    found = localization(M, ratio * F, F).item()
    assert found == pytest.approx(reference_localization(M, ratio * F, F), abs=1e-6)
    assert -1 <= found <= 1


def test_lambda_is_zero_without_a_mean_and_without_scale() -> None:
    F = torch.logspace(-6, 6, 25, dtype=torch.float64)
    assert not localization(torch.zeros(25), F, F).any()
    assert not localization(torch.zeros(25), -F, F).any()  # antisymmetric
    for scale in (1e-1, 1e-3, 1e-8, 0.0):
        assert localization(4 * scale, (scale / 2) ** 2, (scale / 2) ** 2).item() == 0
    assert abs(localization(0.5, 1e-2, 1e-2).item()) < 1e-6
    zero = torch.zeros(3, 2, 6)
    m = moments(zero, zero)
    assert localization(*unit_moments(m, 1.0)).tolist() == [0, 0, 0]
    assert mixture_localization(m, 1.0).tolist() == [0, 0, 0]
    assert mixture_propagation(m, 1.0, 8).eq(1).all(), "a head without logits leaves every token in the linear part"


@pytest.mark.parametrize(("root_F", "silent"), [(0.12, True), (0.14, False)])
def test_lambda_is_zero_when_almost_every_token_propagates(root_F: float, silent: bool) -> None:
    """Below 1e-9 of rbar (1 - rbar) a share of it is a ratio of roundings and exactly 0 is promised; just above it is
    not.
    """
    F = root_F**2
    clipped = integrate.quad(
        lambda u: stats.norm.sf((1 + u) / math.sqrt(F * (2 * u**2 + 1 / 12))), -0.5, 0.5, epsabs=1e-16
    )[0]
    assert (clipped < 1e-9) is silent, "the two scales are meant to lie on either side"
    assert (localization(1.0, F, F).item() == 0) is silent


def test_without_spread_a_token_propagates_or_does_not() -> None:
    """Variance 0: a step at E = -1, and no NaN on the step itself, where M = 3.2 puts the second of eight tokens."""
    rho = signal_propagation(3.2, 0.0, 0.0, length=8)
    assert rho[0].item() == 0
    assert 0 <= rho[1].item() <= 1
    assert rho[2:].tolist() == [1] * 6
    assert continuum(3.2, 0.0, 0.0, torch.tensor([-0.4, -0.2], dtype=torch.float64)).tolist() == [0, 1]


def test_lambda_of_an_antisymmetric_head_is_zero() -> None:
    W_Q, W_K = head(3, 10, 0.0, seed=20)
    m = moments(torch.cat([W_Q, -W_K]), torch.cat([W_K, W_Q]))
    assert m.frobenius_sq.item() > 1
    assert abs(localization(*unit_moments(m, 3.0)).item()) < 1e-12
    # a trace that rounds to something else than 0 lets the noise of the draws in
    assert abs(mixture_localization(m, 3.0).item()) < 1e-3


@pytest.mark.parametrize("shared", [1.0, 0.4])
def test_lambda_is_odd_in_the_sign_of_the_map(shared: float) -> None:
    """Turning W round mirrors rho: what was seen at the near end is seen at the far end."""
    W_Q, W_K = head(8, 20, shared, seed=21)
    m = moments(W_Q, W_K)
    turned = m.scaled(-1.0)
    assert localization(*unit_moments(m, 1.0)).item() > 0.05
    assert localization(*unit_moments(turned, 1.0)).item() == pytest.approx(
        -localization(*unit_moments(m, 1.0)).item(), rel=1e-12
    )
    mirrored = signal_propagation(*unit_moments(turned, 1.0), length=20).flip(-1)
    torch.testing.assert_close(mirrored, signal_propagation(*unit_moments(m, 1.0), length=20))
    by_seed = torch.tensor([[mixture_localization(x, 1.0, seed=seed).item() for seed in range(8)] for x in (m, turned)])
    # the draws are not mirrored, so only the average is odd
    assert abs(by_seed.sum(0).mean()) < 5 * by_seed.std(1).max() / 2


def test_mixture_lambda_joins_the_closed_one_when_directions_are_many() -> None:
    W_Q, W_K = head(128, 256, 0.5, seed=22)
    m, scale = moments(W_Q, W_K), 4 / 64  # M = 4
    assert mixture_localization(m, scale).item() == pytest.approx(
        localization(*unit_moments(m, scale)).item(), abs=0.02
    )


def test_mixture_lambda_does_not_jump_where_the_mean_changes_sign() -> None:
    eigenvalues = torch.full((64,), -1.0, dtype=torch.float64)
    eigenvalues[0] = 63
    below, above = (
        mixture_localization(moments(torch.eye(64, dtype=torch.float64), torch.diag(eigenvalues + shift)), 3 / 8)
        for shift in (-1e-6, 1e-6)
    )
    assert abs(above - below).item() < 0.01


# --- regimes ----------------------------------------------------------------------------------------------------------


def test_regime_puts_collapse_before_localization_and_localization_before_uniformity() -> None:
    cases = [  # Lambda, variance of logits, at length 256, where attention is nearly one-hot above 102.6
        (0.0, 0.001, "uniform"), (0.0, 1.0, "spread"), (0.05, 1.0, "spread"), (0.3, 1.0, "localized"), (-0.3, 1.0, "localized"),
        (0.3, 0.001, "localized"), (0.3, 103.0, "sharp"), (0.0, 103.0, "sharp"), (0.0, 102.0, "spread"),
    ]  # fmt: skip
    found, variance = (torch.tensor([case[n] for case in cases], dtype=torch.float64) for n in (0, 1))
    assert [REGIMES[k] for k in regime(found, variance, 256).tolist()] == [case[2] for case in cases]
    assert REGIMES[int(regime(torch.tensor(0.0), torch.tensor(103.0), 4))] == "spread", (
        "a tenth of log 4 needs a larger spread"
    )


@pytest.mark.parametrize("ratio", [1.0, 0.0, -0.5])
def test_phase_diagram_has_means_along_rows_and_scales_along_columns(ratio: float) -> None:
    means, scales = torch.tensor([-4.0, 0.0, 2.0, 4.0]), torch.tensor([0.5, 1.5, 12.0])
    grid = phase_diagram(means, scales, ratio=ratio, length=256)
    assert all(x.shape == (4, 3) for x in grid.values())
    for i, M in enumerate(means.tolist()):
        for j, root_F in enumerate(scales.tolist()):
            F = root_F**2
            assert (grid["M"][i, j].item(), grid["F"][i, j].item()) == (M, F)
            expected = reference_localization(M, ratio * F, F)
            assert grid["localization"][i, j].item() == pytest.approx(expected, abs=1e-6)
            name = "sharp" if root_F > 10.13 else "localized" if abs(expected) >= 0.1 else "spread"
            assert REGIMES[grid["regime"][i, j]] == name
