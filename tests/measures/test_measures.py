"""Measures of hidden states against plain loops, numpy and scipy in float64; padding, extremes and degenerate
sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from locater.errors import LocaterError
from locater.measures import (
    ChannelMoments,
    excess_kurtosis,
    massive_activations,
    mean_share,
    normality_distance,
    rank_residual,
    ranks,
    ranks_of_gram,
    singular_values,
    token_cosine,
    top_directions,
)

PER_SEQUENCE: dict[str, Callable[..., Tensor]] = {
    "composite": rank_residual,
    "frobenius": lambda x, real=None: rank_residual(x, real, norm="frobenius"),
    "cosine": token_cosine,
    "centred cosine": lambda x, real=None: token_cosine(x, real, centred=True),
    "stable": lambda x, real=None: ranks(x, real).stable,
    "effective": lambda x, real=None: ranks(x, real).effective,
    "numerical": lambda x, real=None: ranks(x, real).numerical,
    "centred effective": lambda x, real=None: ranks(x, real, centred=True).effective,
    "massive ratio": lambda x, real=None: massive_activations(x, real).ratio,
}
every_measure = pytest.mark.parametrize("measure", PER_SEQUENCE.values(), ids=PER_SEQUENCE.keys())
quick = settings(max_examples=30, deadline=None, derandomize=True)


def states(batch: int, tokens: int, width: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal tokens around a common mean, channels of very different sizes."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 1, width, dtype=torch.float64)
    mean = torch.randn(width, generator=g, dtype=torch.float64)
    return ((torch.randn(batch, tokens, width, generator=g, dtype=torch.float64) + mean) * sizes).to(dtype)


def some_real(batch: int, tokens: int, seed: int) -> Tensor:
    """Padding anywhere, at least two tokens left."""
    real = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
    real[:, [0, -1]] = True
    return real


def sequences(x: Tensor, real: Tensor) -> list[np.ndarray]:
    """The real tokens of every sequence, cut out: what the measures must see."""
    return [x[i][real[i]].double().numpy() for i in range(len(x))]


def same(found: Tensor, wanted: Sequence[float], tolerance: float = 1e-10) -> None:
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(wanted, rel=tolerance, abs=tolerance)


# --- against loops and other libraries --------------------------------------------------------------------------------

SHAPES = pytest.mark.parametrize(("tokens", "width"), [(2, 3), (5, 4), (7, 7), (4, 19), (30, 6)])


@SHAPES
def test_rank_residual_is_that_of_the_definition(tokens: int, width: int) -> None:
    x, real = states(3, tokens, width, seed=1), some_real(3, tokens, seed=2)

    def composite(m: np.ndarray) -> float:
        return math.sqrt(np.linalg.norm(m, 1) * np.linalg.norm(m, np.inf))

    parts = [(m, m - np.outer(np.ones(len(m)), m.mean(0))) for m in sequences(x, real)]
    same(rank_residual(x, real), [composite(rest) / composite(m) for m, rest in parts])
    same(
        rank_residual(x, real, norm="frobenius"), [float(np.linalg.norm(rest) / np.linalg.norm(m)) for m, rest in parts]
    )


@SHAPES
@pytest.mark.parametrize("centred", [False, True])
def test_token_cosine_is_the_mean_over_pairs(tokens: int, width: int, centred: bool) -> None:
    x, real = states(3, tokens, width, seed=3), some_real(3, tokens, seed=4)
    wanted = []
    for m in sequences(x, real):
        m = m - m.mean(0) if centred else m
        pairs = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in itertools.combinations(m, 2)]
        wanted.append(float(np.mean(pairs)))
    same(token_cosine(x, real, centred=centred), wanted)


@SHAPES
@pytest.mark.parametrize("centred", [False, True])
def test_ranks_are_those_of_the_singular_values(tokens: int, width: int, centred: bool) -> None:
    x, real = states(3, tokens, width, seed=5), some_real(3, tokens, seed=6)
    x[1, :, 1:] = x[1, :, :1]  # one sequence of rank 1, or less once centred
    found = ranks(x, real, centred=centred)
    for i, m in enumerate(sequences(x, real)):
        m = m - m.mean(0) if centred else m
        s = np.linalg.svd(m, compute_uv=False)
        assert found.singular_values[i, : len(s)].numpy() == pytest.approx(s, abs=1e-7 * s[0])
        s = s * (s > 1e-13 * s[0])
        assert found.stable[i].item() == pytest.approx((s**2).sum() / s[0] ** 2)
        assert found.effective[i].item() == pytest.approx(math.exp(stats.entropy(s / s.sum())))
        assert found.numerical[i].item() == np.linalg.matrix_rank(m)


def test_a_gram_matrix_gives_the_ranks_of_its_factor() -> None:
    x = states(4, 6, 40, seed=7)
    s = np.linalg.svd(x.numpy(), compute_uv=False)
    assert singular_values(x @ x.mT).numpy() == pytest.approx(s, rel=1e-9)
    wide = ranks_of_gram(x.mT @ x)
    same(wide.stable, ranks(x).stable.tolist())
    same(wide.effective, ranks(x).effective.tolist(), 1e-6)
    same(wide.numerical, [6, 6, 6, 6])
    assert wide.singular_values[:, :6].numpy() == pytest.approx(s, rel=1e-9)
    assert ranks_of_gram((x @ x.mT).reshape(2, 2, 6, 6)).stable.shape == (2, 2)


@SHAPES
def test_the_top_activation_and_the_median_are_found_by_looking(tokens: int, width: int) -> None:
    x, real = states(3, tokens, width, seed=8), some_real(3, tokens, seed=9)
    found = massive_activations(x, real)
    for i, m in enumerate(sequences(x, real)):
        values = np.sort(np.abs(m).ravel())
        assert found.top[i].item() == values[-1]
        assert found.median[i].item() == values[(len(values) - 1) // 2]
        assert found.ratio[i].item() == pytest.approx(values[-1] / values[(len(values) - 1) // 2])
        assert bool(real[i, found.token[i]])
        assert abs(x[i, found.token[i], found.channel[i]].item()) == values[-1]


@pytest.mark.parametrize(
    ("top", "rest"),
    [(101.0, 0.1), (-101.0, 0.1), (1000.0, 1.0), (101.0, 0.0), (99.0, 0.01), (100.0, 0.01), (999.0, 1.0)],
)
def test_massive_asks_for_size_and_for_ratio(top: float, rest: float) -> None:
    x = torch.full((1, 4, 5), rest, dtype=torch.float64)
    x[0, 1, 3] = top
    found = massive_activations(x)
    assert (found.token.item(), found.channel.item(), found.is_massive.item()) == (
        1,
        3,
        top not in (99.0, 100.0, 999.0),
    )


@quick
@given(
    parts=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda p: sum(p) >= 4),
    offset=st.sampled_from([0.0, 1e4, -1e6]),
    seed=st.integers(0, 99),
)
def test_moments_of_parts_are_those_of_the_whole(parts: list[int], offset: float, seed: int) -> None:
    """With a mean of 10^6 spreads the power sums would have lost the kurtosis: their fourth powers need 24 digits."""
    x = np.random.default_rng(seed).standard_gamma(2.0, (sum(parts), 4)) + offset
    seen = ChannelMoments.empty(4)
    for part in torch.from_numpy(x).split(parts):
        seen = seen.add(part)
    halves = ChannelMoments.of(torch.from_numpy(x[: len(x) // 2])).merge(
        ChannelMoments.of(torch.from_numpy(x[len(x) // 2 :]))
    )
    for found in (seen, halves):
        assert found.count.item() == len(x)
        assert found.mean.numpy() == pytest.approx(x.mean(0), rel=1e-12)
        assert (found.second / found.count).numpy() == pytest.approx(x.var(0), rel=1e-6)
        assert (found.third / found.count).numpy() == pytest.approx(
            stats.moment(x, 3), rel=1e-6, abs=1e-6 * x.std(0).max() ** 3
        )
        assert found.excess_kurtosis.numpy() == pytest.approx(stats.kurtosis(x), rel=1e-6, abs=1e-6)
        assert found.median_kurtosis.item() == pytest.approx(np.median(stats.kurtosis(x)), rel=1e-6, abs=1e-6)
        assert found.mean_share.item() == pytest.approx((x.mean(0) ** 2).sum() / (x**2).sum(1).mean(), rel=1e-10)


def test_mean_share_and_kurtosis_of_hidden_states_count_real_tokens() -> None:
    x, real = states(3, 40, 5, seed=10), some_real(3, 40, seed=11)
    tokens = np.concatenate(sequences(x, real))
    x[~real] = math.nan
    assert excess_kurtosis(x, real).numpy() == pytest.approx(stats.kurtosis(tokens))
    assert mean_share(x, real).item() == pytest.approx((tokens.mean(0) ** 2).sum() / (tokens**2).sum(1).mean())
    residual = rank_residual(torch.from_numpy(tokens)[None], norm="frobenius").item()
    assert mean_share(x, real).item() == pytest.approx(1 - residual**2), "the two are one measure"


@pytest.mark.parametrize("draw", ["normal", "gamma", "ties"])
@pytest.mark.parametrize("n", [3, 300, 5000])
def test_normality_distance_is_that_of_scipy_along_the_only_direction(draw: str, n: int) -> None:
    rng = np.random.default_rng(0)
    x = {"normal": rng.normal(5, 2, n), "gamma": rng.gamma(1, size=n), "ties": rng.choice([0.0, 1.0, 4.0], n)}[draw]
    wanted = stats.kstest((x - x.mean()) / x.std(ddof=1), "norm").statistic
    found = normality_distance(torch.from_numpy(x)[:, None])
    assert (found.mean, found.max) == pytest.approx((wanted, wanted))


def test_the_directions_of_the_normality_distance_are_uniform() -> None:
    """Two clusters in a plane: the mean over 600 random directions is that over the circle, and the largest is along
    the clusters.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((500, 2)) + 3 * rng.choice([-1, 1], 500)[:, None] * np.array([0.6, 0.8])
    along = x @ np.array([[math.cos(a), math.sin(a)] for a in np.linspace(0, math.pi, 200, endpoint=False)]).T
    wanted = np.array(
        [stats.kstest(row, "norm").statistic for row in ((along - along.mean(0)) / along.std(0, ddof=1)).T]
    )
    found = normality_distance(torch.from_numpy(x), projections=600)
    assert abs(found.mean - wanted.mean()) < 4 * wanted.std() / math.sqrt(600) < 0.1 * wanted.mean()
    assert found.max == pytest.approx(wanted.max(), rel=0.01)


@pytest.mark.parametrize("n", [8, 50, 400])
def test_the_expected_distance_is_that_of_normal_draws(n: int) -> None:
    """Drawn anew, standardised and measured by hand, some of them by scipy too; the formula must lie within four errors
    of their mean, 2 % of it.
    """
    x = np.random.default_rng(n).standard_normal((1500, n))
    z = (x - x.mean(1, keepdims=True)) / x.std(1, ddof=1, keepdims=True)
    below = stats.norm.cdf(np.sort(z, axis=1))
    seen = np.maximum(np.arange(1, n + 1) / n - below, below - np.arange(n) / n).max(1)
    assert seen[:20] == pytest.approx([stats.kstest(row, "norm").statistic for row in z[:20]])
    error = seen.std() / math.sqrt(len(seen))
    expected = normality_distance(torch.zeros(n, 1)).expected
    assert abs(expected - seen.mean()) < 4 * error < 0.03 * expected


def test_normality_tells_normal_tokens_from_heavy_ones_at_any_covariance() -> None:
    rng = np.random.default_rng(12)
    mix = rng.standard_normal((64, 64))
    normal = normality_distance(torch.from_numpy(rng.standard_normal((4000, 64)) @ mix + 100))
    assert normal.mean < 1.2 * normal.expected
    assert normal.max < 2 * normal.expected
    bimodal = normality_distance(
        torch.from_numpy(rng.standard_normal((4000, 64)) + 4 * rng.choice([-1, 1], 4000)[:, None])
    )
    assert bimodal.max > 4 * bimodal.expected


def test_normality_is_repeated_by_its_seed() -> None:
    x = torch.from_numpy(np.random.default_rng(13).gamma(0.5, size=(500, 12)))
    assert normality_distance(x) == normality_distance(x)
    assert normality_distance(x, seed=0).mean != normality_distance(x, seed=1).mean


@pytest.mark.parametrize("k", [1, 3, 6])
def test_shares_of_energy_are_those_of_the_tokens(k: int) -> None:
    """From the tokens themselves: their mean, their projections on its axis, the singular values of what is left."""
    tokens = states(1, 50, 6, seed=14)[0].numpy()
    mean, rest = tokens.mean(0), tokens - tokens.mean(0)
    energy = (tokens**2).sum(1).mean()
    found = top_directions(torch.from_numpy(mean), torch.from_numpy(np.cov(tokens.T, bias=True)), k)
    assert found.mean.item() == pytest.approx(mean_share(torch.from_numpy(tokens)).item())
    axis = (tokens @ mean / np.linalg.norm(mean)) ** 2
    assert (found.mean + found.along_mean).item() == pytest.approx(axis.mean() / energy)
    assert found.principal.numpy() == pytest.approx(
        np.linalg.svd(rest, compute_uv=False)[:k] ** 2 / len(tokens) / energy
    )
    if k == 6:
        assert (found.mean + found.principal.sum()).item() == pytest.approx(1)


# --- what must not matter ---------------------------------------------------------------------------------------------


@every_measure
@quick
@given(
    tokens=st.integers(2, 9),
    width=st.integers(2, 12),
    extra=st.integers(1, 20),
    garbage=st.sampled_from([math.nan, math.inf, 1e30, -1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 999),
)
def test_padding_changes_nothing(
    measure: Callable[..., Tensor], tokens: int, width: int, extra: int, garbage: float, dtype: torch.dtype, seed: int
) -> None:
    x = states(2, tokens, width, seed, dtype)
    padding = torch.full((2, extra, width), garbage, dtype=dtype)
    real = torch.tensor([True] * tokens + [False] * extra).expand(2, -1)
    alone = measure(x)
    same(measure(torch.cat([x, padding], 1), real), alone.tolist(), 1e-9)
    same(measure(torch.cat([padding, x], 1), real.flip(1)), alone.tolist(), 1e-9)


@every_measure
@quick
@given(tokens=st.integers(2, 9), width=st.integers(2, 12), power=st.integers(-30, 30), seed=st.integers(0, 999))
def test_neither_scale_nor_order_matters(
    measure: Callable[..., Tensor], tokens: int, width: int, power: int, seed: int
) -> None:
    x = states(2, tokens, width, seed)
    wanted = measure(x).tolist()
    same(measure(x * 10.0**power), wanted, 1e-7)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    same(measure(x[:, order]), wanted, 1e-7)


@every_measure
@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-38])
def test_float32_extremes_are_measured_as_well_as_ordinary_values(measure: Callable[..., Tensor], size: float) -> None:
    x = (states(3, 8, 5, seed=15) * size).float()
    assert bool(x.isfinite().all())
    same(measure(x), measure(x.double() / size).tolist(), 1e-6)


@pytest.mark.parametrize("name", ["composite", "frobenius", "cosine", "centred cosine"])
@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_float64_extremes_do_not_leave_the_range(name: str, size: float) -> None:
    x = states(3, 8, 5, seed=16)
    same(PER_SEQUENCE[name](x * size), PER_SEQUENCE[name](x).tolist())


@every_measure
def test_half_precision_is_measured_on_its_own_values(measure: Callable[..., Tensor]) -> None:
    x = states(2, 9, 6, seed=17, dtype=torch.bfloat16)
    same(measure(x), measure(x.float()).tolist())


# --- collapse ---------------------------------------------------------------------------------------------------------


@quick
@given(
    tokens=st.integers(2, 300),
    width=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 999),
)
def test_equal_tokens_are_collapse(tokens: int, width: int, dtype: torch.dtype, seed: int) -> None:
    x = states(1, 1, width, seed, dtype).expand(1, tokens, width)
    assert rank_residual(x).item() == rank_residual(x, norm="frobenius").item() == 0
    same(token_cosine(x), [1.0], 1e-12)
    assert math.isnan(token_cosine(x, centred=True).item()), "what rounding leaves of equal tokens has no direction"
    same(ranks(x).stable, [1.0])
    same(ranks(x).effective, [1.0])
    assert ranks(x).numerical.item() == 1
    assert ranks(x, centred=True).numerical.item() == 0


def test_a_rank_of_one_is_not_a_residual_of_zero() -> None:
    """Multiples of one vector: rank 1 and cosine 1, but the tokens differ."""
    x = torch.tensor([1.0, 2.0, 3.0])[None, :, None] * torch.tensor([1.0, -4.0, 2.0, 0.5])
    same(token_cosine(x), [1.0])
    assert ranks(x).numerical.item() == 1
    assert rank_residual(x, norm="frobenius").item() == pytest.approx(math.sqrt(2 / 14))


def test_a_small_residual_keeps_its_digits_in_float32() -> None:
    """Tokens that differ by 2^-20 of their size: their mean in float32 would be wrong by as much as a tenth of that."""
    step = 2.0**-20
    x = 1 + step * torch.randint(0, 8, (1, 1000, 3), generator=torch.Generator().manual_seed(0)).float()
    rest = x.double().numpy()[0] - x.double().numpy()[0].mean(0)
    assert rank_residual(x, norm="frobenius").item() == pytest.approx(
        np.linalg.norm(rest) / np.linalg.norm(x.double().numpy()), rel=1e-9
    )


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numerical_rank_sees_through_rounding_and_no_further(rank: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rank)
    left, right = (
        torch.randn(1, 40, rank, generator=g, dtype=torch.float64),
        torch.randn(1, rank, 24, generator=g, dtype=torch.float64),
    )
    x = (left @ right).to(dtype)
    assert ranks(x).numerical.item() == rank
    assert ranks(x, tolerance=0.999).numerical.item() == 1
    small = 1e-3 if dtype == torch.float32 else 1e-6  # above the floor, so it is a direction
    x[0, 0, 0] += small * x.norm().item()
    assert ranks(x).numerical.item() == rank + 1


@pytest.mark.parametrize("shape", [(40, 4), (4, 40)])
def test_the_default_tolerance_is_the_usual_one(shape: tuple[int, int]) -> None:
    """numpy's, of float32: singular values at twice and at half of max(tokens, width) eps are a direction and none."""
    edge = max(shape) * torch.finfo(torch.float32).eps
    x = torch.zeros(1, *shape)
    x[0, [0, 1, 2], [0, 1, 2]] = torch.tensor([1.0, 2 * edge, edge / 2])
    assert ranks(x).numerical.item() == np.linalg.matrix_rank(x[0].numpy()) == 2
    padded, real = torch.cat([x, x, x, x], 1), torch.arange(4 * shape[0])[None] < shape[0]
    assert ranks(padded, real).numerical.item() == 2, "padding is no part of the size"


def test_rounding_below_zero_is_no_eigenvalue() -> None:
    x = states(1, 1, 30, seed=24)[0].double()
    gram = x.mT @ x
    assert torch.linalg.eigvalsh(gram).min() < 0, "nothing to round"
    assert bool((singular_values(gram) >= 0).all())
    assert bool((top_directions(x[0], gram, 30).principal >= 0).all())


def test_what_a_gram_matrix_cannot_hold_is_not_counted() -> None:
    """Singular values 1 and 1e-9 (float64), 1 and 1e-4 (float32): below the floor, so one direction is reported even if
    asked for both.
    """
    turn = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    for dtype, small in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        squares = torch.zeros(30, dtype=torch.float64)
        squares[:2] = torch.tensor([1.0, small**2])
        gram = (turn * squares @ turn.mT).to(dtype)
        assert ranks_of_gram(gram, tolerance=0.0).numerical.item() == 1
        assert ranks_of_gram(gram).effective.item() == pytest.approx(1, abs=1e-6)


# --- degenerate and bad input -----------------------------------------------------------------------------------------


def test_one_token_has_no_pairs_and_no_residual() -> None:
    x = states(2, 1, 5, seed=18)
    assert rank_residual(x).tolist() == [0, 0]
    assert token_cosine(x).isnan().all()
    assert ranks(x).numerical.tolist() == [1, 1]


@every_measure
@pytest.mark.parametrize("spoiled", ["padded", "nan"])
def test_a_sequence_without_an_answer_is_nan_and_leaves_the_others_alone(
    measure: Callable[..., Tensor], spoiled: str
) -> None:
    x, real = states(3, 6, 4, seed=19), torch.ones(3, 6, dtype=torch.bool)
    wanted = measure(x).tolist()
    if spoiled == "padded":
        real[1] = False
    else:
        x[1, 2, 3] = math.nan
    found = measure(x, real)
    assert math.isnan(found[1].item())
    same(found[[0, 2]], [wanted[0], wanted[2]])


@pytest.mark.parametrize("name", [name for name in PER_SEQUENCE if name != "massive ratio"])
def test_an_infinite_activation_has_no_measure(name: str) -> None:
    x = states(2, 6, 4, seed=20)
    x[0, 1, 2] = math.inf
    found = PER_SEQUENCE[name](x)
    assert found.isnan().tolist() == [True, False]


def test_an_infinite_or_undefined_activation_is_located() -> None:
    x = states(2, 6, 4, seed=21)
    x[0, 1, 2], x[1, 3, 1] = -math.inf, math.nan
    found = massive_activations(x)
    assert (found.token.tolist(), found.channel.tolist(), found.is_massive.tolist()) == ([1, 3], [2, 1], [True, False])


def test_no_tokens_have_no_place() -> None:
    found = massive_activations(torch.ones(1, 3, 2), torch.zeros(1, 3, dtype=torch.bool))
    assert (found.token.item(), found.channel.item(), found.is_massive.item()) == (-1, -1, False)
    assert math.isnan(found.top.item())
    assert math.isnan(found.median.item())


def test_zero_states() -> None:
    x = torch.zeros(1, 4, 3)
    assert rank_residual(x).isnan().all()
    assert token_cosine(x).isnan().all()
    found = ranks(x)
    assert (found.stable.item(), found.effective.item(), found.numerical.item()) == (0, 0, 0)
    assert mean_share(x).isnan()


def test_a_zero_token_has_no_direction() -> None:
    x = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]])
    same(token_cosine(x), [math.sqrt(0.5)])


def test_channels_that_do_not_vary_have_no_kurtosis() -> None:
    x = torch.from_numpy(np.random.default_rng(22).standard_normal((300, 3)))
    x[:, 1] = 0.1  # its mean in float64 is not 0.1 exactly
    seen = ChannelMoments.of(x[:100]).add(x[100:])
    assert seen.excess_kurtosis.isnan().tolist() == [False, True, False]
    assert seen.median_kurtosis.item() == pytest.approx(stats.kurtosis(x[:, [0, 2]]).mean())
    assert ChannelMoments.empty(3).mean_share.isnan()
    assert ChannelMoments.empty(3).excess_kurtosis.isnan().all()


def test_normality_without_an_answer_is_nan() -> None:
    assert all(math.isnan(v) for v in vars(normality_distance(torch.ones(2, 4))).values())
    equal = torch.full((999, 4), 0.1, dtype=torch.float64)  # along most directions rounding leaves them a spread
    assert all(math.isnan(normality_distance(equal, projections=1, seed=seed).mean) for seed in range(20))
    x = states(1, 30, 4, seed=23)[0]
    x[3, 2] = math.inf
    assert math.isnan(normality_distance(x).mean)


def test_directions_of_nothing_and_of_no_mean() -> None:
    assert top_directions(torch.zeros(3), torch.zeros(3, 3), 1).mean.isnan()
    found = top_directions(torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3), 2)
    assert (found.mean.tolist(), found.along_mean.tolist()) == ([0, 0], [0, 0])
    same(found.principal.flatten(), [1 / 3] * 4)


def test_what_cannot_be_asked_is_refused_by_name() -> None:
    with pytest.raises(LocaterError, match="norm='nuclear'"):
        rank_residual(torch.ones(1, 2, 2), norm="nuclear")
    for k in (0, 4):
        with pytest.raises(LocaterError, match=f"k={k}"):
            top_directions(torch.ones(3), torch.eye(3), k)
