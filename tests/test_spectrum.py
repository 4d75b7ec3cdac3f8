"""Moments from d_head x d_head matrices, held to the d x d matrix itself in float64.

The reference forms W = W_Q^T W_K and C explicitly and never uses a trace identity: that is what is under test.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from locater.spectrum import Moments, cross_moments, moments

TOLERANCE = 1e-5  # section 1: of ||W||_F sqrt(d_head) for the trace, of ||W||_F^2 for second moments
KINDS = ("random", "symmetric", "antisymmetric", "deficient")
COVARIANCES = ("none", "diagonal", "full")
MOMENTS = (
    "trace",
    "trace_of_square",
    "frobenius_sq",
    "symmetric_sq",
    "symmetric_cube",
    "mean",
    "variance",
    "concentration",
    "skew",
)


class Case(NamedTuple):
    W_Q: Tensor
    W_K: Tensor
    covariance: Tensor | None


class Dense(NamedTuple):
    """One head as d x d matrices: `product` is W C, `normal` is C^(1/2) W C^(1/2)."""

    product: np.ndarray
    normal: np.ndarray

    @property
    def norm(self) -> float:
        return float(np.linalg.norm(self.normal))

    @property
    def symmetric(self) -> np.ndarray:
        return (self.normal + self.normal.T) / 2


def dense(case: Case) -> list[Dense]:
    """Every head of the broadcast batch, in row-major order."""
    q, k = case.W_Q.double().numpy(), case.W_K.double().numpy()
    lead, d = np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-1]
    C = np.eye(d) if case.covariance is None else case.covariance.double().numpy()
    C = np.diag(C) if C.ndim == 1 else C
    values, vectors = np.linalg.eigh(C)
    root = vectors @ np.diag(np.sqrt(values.clip(0))) @ vectors.T
    q, k = np.broadcast_to(q, lead + q.shape[-2:]), np.broadcast_to(k, lead + k.shape[-2:])
    maps = [q[i].T @ k[i] for i in np.ndindex(lead)]
    return [Dense(W @ C, root @ W @ root) for W in maps]


def make(
    kind: str, head_dim: int, width: int, seed: int, *, lead: tuple[int, ...] = (), key_lead: tuple[int, ...] | None = None,
    covariance: str = "none", dtype: torch.dtype = torch.float64,
) -> Case:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(*lead, head_dim, width, generator=g, dtype=torch.float64)
    k = torch.randn(*(lead if key_lead is None else key_lead), head_dim, width, generator=g, dtype=torch.float64)
    if kind == "symmetric":
        k = q
    elif kind == "antisymmetric":  # W = p^T r - r^T p; d_head is twice the number of planes
        q, k = torch.cat([q, -k], -2), torch.cat([k, q], -2)
    elif kind == "deficient":
        q[..., head_dim // 2 :, :] = 0
        k[..., -1, :] = k[..., 0, :]
    C = None
    if covariance == "diagonal":
        C = torch.rand(width, generator=g, dtype=torch.float64) * 3 + 0.01
    elif covariance == "full":
        root = torch.randn(width, width, generator=g, dtype=torch.float64) / math.sqrt(width)
        C = root @ root.mT
    # the covariance is given in the precision that half-precision weights are upcast to, so that its rounding is no
    # error of moments
    return Case(q.to(dtype), k.to(dtype), None if C is None else C.to(torch.promote_types(dtype, torch.float32)))


def found(case: Case) -> Moments:
    return moments(case.W_Q, case.W_K, case.covariance)


def check_first_moments(case: Case, tolerance: float = TOLERANCE) -> None:
    """Section 1's three moments, and the two that follow from them linearly, head by head."""
    m = found(case)
    for i, head in enumerate(dense(case)):
        square = tolerance * head.norm**2
        assert abs(m.trace.flatten()[i].item() - np.trace(head.product)) <= tolerance * head.norm * math.sqrt(
            m.head_dim
        )
        assert abs(m.trace_of_square.flatten()[i].item() - np.trace(head.product @ head.product)) <= square
        assert abs(m.frobenius_sq.flatten()[i].item() - head.norm**2) <= square
        assert abs(m.symmetric_sq.flatten()[i].item() - np.linalg.norm(head.symmetric) ** 2) <= square
        assert abs(
            m.mean.flatten()[i].item() - np.trace(head.product) / m.head_dim
        ) <= tolerance * head.norm / math.sqrt(m.head_dim)


def cancellation(case: Case) -> float:
    """||W||_F / (||W_Q||_F ||W_K||_F) in C, the least over heads: near 0 when the d_head terms of W cancel each
    other.
    """
    m = moments(case.W_Q.double(), case.W_K.double(), None if case.covariance is None else case.covariance.double())
    sizes = [x.diagonal(dim1=-2, dim2=-1).sum(-1).flatten() for x in (m.query_gram, m.key_gram)]
    norms = torch.tensor([head.norm for head in dense(case)], dtype=torch.float64)
    return float((norms / (sizes[0] * sizes[1]).sqrt()).min())


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Case:
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    key_lead = lead
    if draw(st.booleans()):  # keys shared along some axes, or without the outer ones
        shared = [1 if draw(st.booleans()) else n for n in lead]
        key_lead = tuple(shared[draw(st.integers(0, len(lead))) :])
    return make(
        draw(st.sampled_from(("random", "deficient"))) if key_lead != lead else draw(st.sampled_from(KINDS)),
        draw(st.integers(1, 16)), draw(st.integers(1, 64)), draw(st.integers(0, 2**20)), lead=lead, key_lead=key_lead,
        covariance=draw(st.sampled_from(COVARIANCES)), dtype=draw(st.sampled_from(dtypes)),
    )  # fmt: skip


@given(cases((torch.float64,)))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_shape_in_float64_has_the_moments_of_the_dense_matrix(case: Case) -> None:
    assume(cancellation(case) > 1e-3)  # a zero map has no scale to be relative to
    check_first_moments(case, 1e-9)
    m = found(case)
    assert m.trace.shape == torch.broadcast_shapes(case.W_Q.shape[:-2], case.W_K.shape[:-2])


@given(cases((torch.float32, torch.bfloat16, torch.float16)))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_shape_in_single_and_half_precision_meets_the_stated_tolerances(case: Case) -> None:
    # d_head random rows have about 1/sqrt(d_head) >= 0.25; for less see the test of cancelling rows
    assume(cancellation(case) > 0.1)
    assert found(case).trace.dtype == torch.float32
    check_first_moments(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_head_size_meets_the_stated_tolerances(kind: str, covariance: str, dtype: torch.dtype) -> None:
    check_first_moments(make(kind, 64, 512, seed=1, lead=(2,), covariance=covariance, dtype=dtype))


@pytest.mark.parametrize("rest", [1.0, 0.1, 0.01, 0.001])
def test_rows_that_cancel_each_other_meet_the_stated_tolerances(rest: float) -> None:
    """Two halves of a head with nearly opposite keys and nearly equal queries: W is small although W_Q and W_K are
    not.
    """
    half, change = (make("random", 4, 64, seed=seed, dtype=torch.float32) for seed in (0, 1))
    W_Q = torch.cat([half.W_Q, half.W_Q + rest * change.W_Q])
    W_K = torch.cat([half.W_K, -half.W_K + rest * change.W_K])
    check_first_moments(Case(W_Q, W_K, None))


def test_single_precision_gives_way_before_its_tolerance_is_spent() -> None:
    """Cancellation of every degree around the point where the Gram matrices are taken in float64 instead."""
    for head_dim, width in ((2, 8), (16, 128)):
        for rest in np.geomspace(0.3, 0.03, 9):
            for seed in range(12):
                half, change = (
                    make("random", head_dim // 2, width, seed=2 * seed + n, dtype=torch.float32) for n in (0, 1)
                )
                W_Q = torch.cat([half.W_Q, half.W_Q + rest * change.W_Q]).float()
                W_K = torch.cat([half.W_K, -half.W_K + rest * change.W_K]).float()
                check_first_moments(Case(W_Q, W_K, None))


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_cube_variance_and_skew_are_those_of_the_symmetric_part(kind: str, covariance: str) -> None:
    case = make(kind, 6, 20, seed=3, lead=(4,), covariance=covariance)
    m = found(case)
    for i, head in enumerate(dense(case)):
        eigen = np.linalg.eigvalsh(head.symmetric)
        square, cube = (eigen**2).sum(), (eigen**3).sum()
        assert m.symmetric_cube[i].item() == pytest.approx(cube, abs=1e-10 * head.norm**3)
        # variance over the d_head directions a head can use, of which the eigenvalues of W_sym give the second moment
        assert m.variance[i].item() == pytest.approx(
            square / m.head_dim - (eigen.sum() / m.head_dim) ** 2, abs=1e-10 * head.norm**2
        )
        if square > 1e-9 * head.norm**2:
            assert m.skew[i].item() == pytest.approx(math.sqrt(8) * cube / square**1.5, abs=1e-8)


def test_skew_is_the_skewness_of_the_quadratic_form() -> None:
    """g1 is defined by what it measures: draws of y^T W y with y normal. W is not symmetric here."""
    case = make("random", 3, 5, seed=5)
    case = Case(case.W_Q, case.W_K + case.W_Q, None)  # a positive mean, so that the skew is far from 0
    y = np.random.default_rng(0).standard_normal((400_000, 5))
    form = np.einsum("ni,ij,nj->n", y, dense(case)[0].product, y)
    blocks = form.reshape(20, -1)
    skews = ((blocks - blocks.mean(1, keepdims=True)) ** 3).mean(1) / blocks.std(1) ** 3
    assert abs(found(case).skew.item()) > 0.5
    assert abs(skews.mean() - found(case).skew.item()) < 5 * skews.std(ddof=1) / math.sqrt(20)


@given(cases((torch.float64,)))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_bounds_that_hold_for_every_map(case: Case) -> None:
    m = found(case)
    assert bool((m.variance >= 0).all())
    assert bool((m.symmetric_sq >= m.trace**2 / m.head_dim * (1 - 1e-9) - 1e-9).all()), (
        "the clamp of variance must only remove rounding"
    )
    assert bool((m.concentration.abs() <= 1).all())
    spread = m.head_dim * (2 * m.frobenius_sq + m.trace_of_square) / 3
    assert bool((m.trace**2 <= spread * (1 + 1e-9) + 1e-9).all()), (
        "the clamp of concentration must only remove rounding"
    )
    scale = 1.0 if case.covariance is None else case.covariance.abs().max() ** 2
    alive = m.frobenius_sq > 1e-12 * scale * case.W_Q.square().sum() * case.W_K.square().sum()  # else rounding alone
    assert bool((m.stable_rank[alive] >= 1 - 1e-6).all())
    assert bool((m.stable_rank[alive] <= m.head_dim + 1e-6).all())


@pytest.mark.parametrize("sign", [1, -1])
def test_concentration_of_a_projector_is_one(sign: int) -> None:
    frame = torch.linalg.qr(torch.randn(24, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0].mT
    m = moments(3 * frame, 3 * sign * frame)
    assert m.concentration.item() == pytest.approx(sign, abs=1e-12)
    assert m.variance.item() == pytest.approx(0, abs=1e-12)
    assert m.stable_rank.item() == pytest.approx(6)  # concentration forces the stable rank up to d_head, not down


def test_concentration_is_below_one_for_anything_else() -> None:
    """Each departure from a projector costs: a missing direction, unequal eigenvalues, an oblique projector, a
    rotation.
    """
    eye = torch.eye(6, 24, dtype=torch.float64)
    fewer, unequal, oblique, rotated = eye.clone(), eye.clone(), eye.clone(), eye.clone()
    fewer[5] = 0
    unequal[0, 0] = 1.1
    oblique[0, 10] = 0.2
    c, s = math.cos(0.2), math.sin(0.2)
    rotated[:2, :2] = torch.tensor([[c, -s], [s, c]])
    kappa = [moments(eye, other).concentration.item() for other in (fewer, unequal, oblique, rotated)]
    assert kappa[0] == pytest.approx(5 / 6)
    assert max(kappa) < 0.9999


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_concentration_of_a_symmetric_map_is_mean_and_variance_of_its_eigenvalues(covariance: str) -> None:
    case = make("symmetric", 5, 12, seed=7, lead=(3,), covariance=covariance)
    m = found(case)
    for i, head in enumerate(dense(case)):
        eigen = np.sort(np.linalg.eigvalsh(head.symmetric))[-5:]  # positive semi-definite: the rest is 0
        mean, variance = eigen.mean(), eigen.var()
        assert m.mean[i].item() == pytest.approx(mean)
        assert m.variance[i].item() == pytest.approx(variance)
        assert m.concentration[i].item() == pytest.approx(mean**2 / (mean**2 + variance))


def test_an_antisymmetric_map_has_no_mean_and_a_negative_square() -> None:
    m = found(make("antisymmetric", 3, 16, seed=2))
    assert m.trace_of_square.item() == pytest.approx(-m.frobenius_sq.item())
    for number in (m.trace, m.symmetric_sq, m.symmetric_cube, m.variance, m.concentration):
        assert abs(number.item()) < 1e-10 * m.frobenius_sq.item()


@pytest.mark.parametrize(("head_dim", "width"), [(1, 7), (8, 32), (6, 6), (10, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_singular_values_norm_and_stable_rank(kind: str, head_dim: int, width: int) -> None:
    case = make(kind, head_dim, width, seed=11, lead=(3,), covariance="full")
    m = found(case)
    for i, head in enumerate(dense(case)):
        values = np.zeros(m.head_dim)  # d_head of them, also when d_head > d
        dense_values = np.linalg.svd(head.normal, compute_uv=False)[: m.head_dim]
        values[: len(dense_values)] = dense_values
        top = values[0]
        # squares are what is computed: a zero singular value may come back as the root of rounding
        np.testing.assert_allclose(m.singular_values()[i].numpy() ** 2, values**2, rtol=0, atol=1e-12 * top**2)
        assert m.spectral_norm[i].item() == pytest.approx(top, rel=1e-10, abs=1e-300)
        assert m.stable_rank[i].item() == pytest.approx((values**2).sum() / top**2 if top else 0, rel=1e-9)
    assert bool((m.singular_values().diff(dim=-1) <= 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_in_single_precision_are_second_moments_too(dtype: torch.dtype) -> None:
    case = make("random", 32, 128, seed=4, dtype=dtype)
    head = dense(case)[0]
    squares = np.linalg.svd(head.normal, compute_uv=False)[:32] ** 2
    np.testing.assert_allclose(
        found(case).singular_values().double().numpy() ** 2, squares, rtol=0, atol=TOLERANCE * head.norm**2
    )


@pytest.mark.parametrize(("head_dim", "width"), [(1, 5), (7, 30), (8, 8), (9, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_eigenvalues_are_the_non_zero_ones_of_the_dense_matrix(kind: str, head_dim: int, width: int) -> None:
    case = make(kind, head_dim, width, seed=13, lead=(2,), covariance="full")
    m = found(case)
    values = m.eigenvalues()
    assert values.shape == (2, m.head_dim)
    assert bool((values.abs().diff(dim=-1) <= 1e-12).all()), "by decreasing modulus"
    for i, head in enumerate(dense(case)):
        reference = np.linalg.eigvals(head.product)
        padded = np.concatenate([values[i].numpy(), np.zeros(max(0, width - m.head_dim))])
        reference = np.concatenate([reference, np.zeros(max(0, m.head_dim - width))])
        distance = np.abs(padded[:, None] - reference[None, :])
        rows, columns = linear_sum_assignment(distance)  # conjugate pairs have no order of their own
        assert distance[rows, columns].max() <= 1e-8 * head.norm


def test_eigenvalues_of_equal_modulus_do_not_depend_on_rounding() -> None:
    """±a of a symmetric map differ by a rounding or two, and so may fall on either side of any fixed edge."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(300, 4, generator=generator).sort(-1, descending=True).values + torch.tensor(
        [0.4, 0.3, 0.2, 0.1]
    )
    spectrum = torch.stack([sizes, -sizes], -1).flatten(-2).double()  # a, -a, b, -b, ...
    turns = torch.linalg.qr(torch.randn(300, 8, 8, generator=generator, dtype=torch.float64)).Q
    W = ((turns * spectrum[:, None, :]) @ turns.mT).float()
    values = moments(torch.eye(8).expand(300, 8, 8), W).eigenvalues()
    torch.testing.assert_close(values.real, spectrum.float(), rtol=0, atol=1e-4)


def test_eigenvalues_leave_the_number_of_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the solver does not converge."""
    before, m = torch.get_num_threads(), found(make("random", 4, 8, seed=0))
    try:
        torch.set_num_threads(2)
        m.eigenvalues()
        assert torch.get_num_threads() == 2

        def fails(x: Tensor) -> Tensor:
            raise torch.linalg.LinAlgError("no convergence")

        monkeypatch.setattr(torch.linalg, "eigvals", fails)
        with pytest.raises(torch.linalg.LinAlgError):
            m.eigenvalues()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_grouped_keys_equal_keys_copied_to_every_query_head(covariance: str) -> None:
    case = make("random", 4, 24, seed=17, lead=(3, 5), key_lead=(3, 1), covariance=covariance)
    check_first_moments(case, 1e-12)
    m = found(case)
    for kv in range(3):
        for head in range(5):
            alone = moments(case.W_Q[kv, head], case.W_K[kv, 0], case.covariance)
            # the matrix itself: a transposed group would keep the trace
            torch.testing.assert_close(m.gram[kv, head], alone.gram)
            for name in MOMENTS:
                torch.testing.assert_close(getattr(m, name)[kv, head], getattr(alone, name))


def test_a_diagonal_covariance_is_the_full_one_written_short() -> None:
    case = make("random", 5, 16, seed=19, covariance="diagonal")
    full = moments(case.W_Q, case.W_K, torch.diag(case.covariance))
    for name in MOMENTS:
        torch.testing.assert_close(getattr(found(case), name), getattr(full, name))


def test_mixed_precision_is_promoted() -> None:
    case = make("random", 3, 8, seed=0)
    assert moments(case.W_Q.float(), case.W_K).trace.dtype == torch.float64


@pytest.mark.parametrize("factor", [2.5, -0.3, 0.0])
def test_scaled_is_the_moments_of_the_scaled_map(factor: float) -> None:
    case = make("random", 4, 12, seed=23, lead=(2,), covariance="full")
    scaled, direct = found(case).scaled(factor), moments(case.W_Q * factor, case.W_K, case.covariance)
    for name in (*MOMENTS, "spectral_norm", "stable_rank"):
        torch.testing.assert_close(
            getattr(scaled, name), getattr(direct, name), msg=lambda text, name=name: f"{name}: {text}"
        )
    cross = cross_moments(case.W_Q, case.W_K)
    torch.testing.assert_close(cross.scaled(factor).frobenius_sq, cross.frobenius_sq * factor**2)


@pytest.mark.parametrize("index", [2, slice(1, 3), torch.tensor([3, 0]), torch.tensor([True, False, False, True])])
def test_select_keeps_the_chosen_heads(index: int | slice | Tensor) -> None:
    case = make("random", 4, 12, seed=29, lead=(4, 2), key_lead=(4, 1))
    part, direct = found(case).select(index), moments(case.W_Q[index], case.W_K[index])
    for name in (*MOMENTS, "spectral_norm"):
        torch.testing.assert_close(getattr(part, name), getattr(direct, name))
    assert cross_moments(case.W_Q, case.W_K).select(index).cross is None


def test_selecting_no_head_still_answers() -> None:
    m = found(make("random", 4, 12, seed=0, lead=(3,))).select(torch.tensor([False] * 3))
    assert m.trace.shape == m.spectral_norm.shape == (0,)
    assert m.eigenvalues().shape == m.singular_values().shape == (0, 4)


def test_cross_attention_keeps_norms_and_refuses_traces() -> None:
    g = torch.Generator().manual_seed(31)
    q, k = torch.randn(3, 2, 6, 20, generator=g), torch.randn(3, 1, 6, 33, generator=g)  # keys of another width
    m = cross_moments(q, k)
    for i in range(3):
        for j in range(2):
            values = np.linalg.svd(q[i, j].double().numpy().T @ k[i, 0].double().numpy(), compute_uv=False)[:6]
            assert m.frobenius_sq[i, j].item() == pytest.approx((values**2).sum(), rel=TOLERANCE)
            np.testing.assert_allclose(m.singular_values()[i, j].numpy(), values, rtol=1e-4)
            assert m.stable_rank[i, j].item() == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-4)
    for name in ("gram", *(set(MOMENTS) - {"frobenius_sq"})):
        with pytest.raises(ValueError, match="cross-attention"):
            getattr(m, name)
    with pytest.raises(ValueError, match="cross-attention"):
        m.eigenvalues()


@pytest.mark.parametrize(
    "name", ["trace", "symmetric_sq", "frobenius_sq", "trace_of_square", "variance", "concentration", "skew"]
)
def test_gradients_flow_to_both_projections(name: str) -> None:
    """A penalty trains through these; groups and a covariance included, because both take other paths."""
    case = make("random", 3, 5, seed=37, lead=(2, 2), key_lead=(2, 1), covariance="full")
    inputs = (case.W_Q.requires_grad_(), case.W_K.requires_grad_())
    assert torch.autograd.gradcheck(lambda q, k: getattr(moments(q, k, case.covariance), name), inputs)


def test_the_gradient_of_the_stable_rank_is_whole_or_refused() -> None:
    case = make("random", 3, 5, seed=41)
    q = case.W_Q.requires_grad_()
    rank = moments(q, case.W_K).stable_rank
    assert not rank.requires_grad or torch.autograd.gradcheck(lambda x: moments(x, case.W_K).stable_rank, (q,))


SCALES = [1e-30, 1e-20, 1e-14, 1e-11, 1e-6, 1.0, 1e6, 1e11, 1e14, 1e17]
FREE = ("concentration", "skew", "stable_rank")  # have no scale


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_weights_are_too_small_or_too_large(kind: str, scale: float) -> None:
    """Products of four weights leave the range of float32 long before the weights do."""
    case = make(kind, 4, 24, seed=43, lead=(3,))
    q, k = (scale * case.W_Q).float(), (scale * case.W_K).float()
    m, wide = moments(q, k), moments(q.double(), k.double())
    cross, wide_cross = cross_moments(q, k), cross_moments(q.double(), k.double())
    for name in (*MOMENTS, "spectral_norm", "stable_rank"):
        exact = getattr(wide, name)
        power = {"trace": 1, "mean": 1, "spectral_norm": 1, "symmetric_cube": 3}.get(name, 0 if name in FREE else 2)
        error = (getattr(m, name).double() - exact).abs() / wide.frobenius_sq ** (power / 2)
        assert error.max().item() < 1e-5, name
    for name in ("frobenius_sq", "stable_rank", "spectral_norm"):
        torch.testing.assert_close(getattr(cross, name).double(), getattr(wide_cross, name), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-14, 1.0, 1e14])
@pytest.mark.parametrize("name", FREE)
def test_numbers_without_a_scale_survive_training_at_any(name: str, scale: float) -> None:
    """With a gradient everything stays in float32."""
    case = make("random", 4, 24, seed=47, lead=(3,))
    exact = getattr(moments(case.W_Q, case.W_K), name)
    q, k = ((scale * x).float().requires_grad_() for x in (case.W_Q, case.W_K))
    found = getattr(moments(q, k), name)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach().double(), exact, rtol=1e-4, atol=1e-5)
    if found.requires_grad:
        found.sum().backward()
        wide = [x.clone().requires_grad_() for x in (case.W_Q, case.W_K)]
        getattr(moments(*wide), name).sum().backward()
        torch.testing.assert_close(q.grad.double() * scale, wide[0].grad, rtol=1e-3, atol=1e-5)


def test_a_head_of_zeros_beside_tiny_ones_stays_zero() -> None:
    q, k = torch.full((3, 2, 4), 1e-30), torch.full((3, 2, 4), 1e-30)
    q[1] = 0
    m = moments(q, k)
    for name in (*MOMENTS, "spectral_norm", "stable_rank"):
        assert getattr(m, name)[1].item() == 0, name
    assert m.stable_rank.tolist() == pytest.approx([1, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_zero_map_gives_zeros(dtype: torch.dtype) -> None:
    zero = torch.zeros(2, 4, 8, dtype=dtype)
    m = moments(zero, zero)
    for name in (*MOMENTS, "spectral_norm", "stable_rank"):
        assert getattr(m, name).tolist() == [0, 0], name
    assert not m.eigenvalues().any()
    assert not m.singular_values().any()


@pytest.mark.parametrize("name", ["trace", "symmetric_sq", "frobenius_sq", "variance", "concentration"])
def test_the_gradient_at_a_zero_map_is_finite(name: str) -> None:
    """Projections that start at zero must be able to train."""
    q, k = (torch.zeros(4, 8, requires_grad=True) for _ in range(2))
    getattr(moments(q, k), name).backward()
    assert bool(q.grad.isfinite().all())
    assert bool(k.grad.isfinite().all())


def test_shapes_are_checked_at_run_time() -> None:
    """The import hook of conftest.py is at work: a wrong shape is caught at the door, by its annotation."""
    from jaxtyping import TypeCheckError

    with pytest.raises(TypeCheckError):
        moments(torch.zeros(2, 3), torch.zeros(2, 4))
