"""Entropy floors against rows that try to go below them, the estimate against drawn logits, the ratio against
counting.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locater.theory import (
    entropy_floor,
    entropy_floor_of_range,
    entropy_ratio,
    expected_entropy,
    residual_kept,
    second_order_entropy,
    variance_at,
)


def entropy(logits: np.ndarray) -> np.ndarray:
    """Of softmax rows, from the probabilities themselves."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return stats.entropy(weights, axis=-1)


def with_centred_norm(rows: np.ndarray, norm: float) -> np.ndarray:
    centred = rows - rows.mean(-1, keepdims=True)
    return centred * (norm / np.linalg.norm(centred, axis=-1, keepdims=True))


def shapes_of_rows(length: int, seed: int) -> np.ndarray:
    """Rows of many kinds: normal, heavy tailed (close to one high logit), and every two-level row."""
    rng = np.random.default_rng(seed)
    levels = np.tril(np.ones((length, length)))[:-1]  # k of T logits are high, k = 1 ... T - 1
    return np.concatenate(
        [
            rng.standard_normal((200, length)),
            rng.standard_t(1.0, (200, length)),
            rng.exponential(size=(100, length)),
            levels,
        ]
    )


def descend(start: Tensor, project: Callable[[Tensor], Tensor], size: float, steps: int = 300) -> np.ndarray:
    """Rows that follow the gradient of entropy downwards inside a constraint, a fifth of its size at a time; the
    entropies reached.
    """
    rows = start.clone().requires_grad_()
    for _ in range(steps):
        logs = torch.log_softmax(rows, -1)
        (slope,) = torch.autograd.grad(-(logs.exp() * logs).sum(), rows)
        with torch.no_grad():
            rows -= size / 5 * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-30)
            rows.copy_(project(rows))
    return entropy(rows.detach().numpy())


# --- the floor of a norm ----------------------------------------------------------------------------------------------


@given(length=st.integers(2, 200), norm=st.floats(0.01, 60), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_row_of_a_given_norm_is_below_its_floor(length: int, norm: float, seed: int) -> None:
    rows = with_centred_norm(shapes_of_rows(length, seed), norm)
    floor = entropy_floor(norm, length).item()
    assert entropy(rows).min() >= floor - 1e-12
    assert floor >= 0


@pytest.mark.parametrize("length", [2, 3, 8, 100])
@pytest.mark.parametrize("norm", [0.1, 1.0, 4.0, 20.0])
def test_the_floor_of_a_norm_is_reached_by_one_logit_above_equal_ones(length: int, norm: float) -> None:
    row = with_centred_norm(np.eye(length)[0], norm)
    assert entropy_floor(norm, length).item() == pytest.approx(entropy(row), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("length", [3, 8, 30])
@pytest.mark.parametrize("norm", [0.5, 2.0, 6.0])
def test_descending_on_the_sphere_of_a_norm_ends_at_the_floor(length: int, norm: float) -> None:
    """An optimiser finds no row below it; and the best of its rows come down to it, so it cannot be raised."""
    start = torch.from_numpy(with_centred_norm(np.random.default_rng(length).standard_normal((100, length)), norm))

    def onto_the_sphere(rows: Tensor) -> Tensor:
        centred = rows - rows.mean(-1, keepdim=True)
        return centred * norm / centred.norm(dim=-1, keepdim=True)

    reached = descend(start, onto_the_sphere, norm)
    floor = entropy_floor(norm, length).item()
    assert reached.min() >= floor - 1e-12
    assert reached.min() < floor + 0.01 * (math.log(length) - floor)


def test_the_floor_of_a_norm_falls_from_uniform_to_nothing() -> None:
    norms = torch.linspace(0, 80, 200, dtype=torch.float64)
    floor = entropy_floor(norms, 16)
    assert floor[0].item() == pytest.approx(math.log(16))
    assert bool((floor.diff() < 0).all())
    assert floor[-1].item() < 1e-12
    assert entropy_floor(torch.ones(2, 3), 16).shape == (2, 3)
    assert entropy_floor(3.0, 1).item() == 0, "one key leaves no choice"


# --- the floor of a range ---------------------------------------------------------------------------------------------


@given(length=st.integers(2, 200), spread=st.floats(0.01, 60), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_row_within_a_range_is_below_its_floor(length: int, spread: float, seed: int) -> None:
    rows = shapes_of_rows(length, seed)
    rows = rows / np.ptp(rows, axis=-1, keepdims=True) * spread
    clipped = np.clip(shapes_of_rows(length, seed + 1) * spread, 0, spread)  # many logits at the ends of the range
    floor = entropy_floor_of_range(spread, length).item()
    assert min(entropy(rows).min(), entropy(clipped).min()) >= floor - 1e-12
    assert floor >= 0


@pytest.mark.parametrize("length", [2, 5, 10])
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
def test_the_floor_of_a_range_is_the_best_corner_of_the_box(length: int, spread: float) -> None:
    """Every row with each logit at one of the two ends, 2^T of them: the least of their entropies is the floor
    itself.
    """
    corners = np.array(list(itertools.product([0.0, spread], repeat=length)))
    assert entropy_floor_of_range(spread, length).item() == pytest.approx(entropy(corners).min(), rel=1e-9)


@pytest.mark.parametrize("length", [3, 8, 40])
@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_descending_inside_a_range_ends_at_the_floor(length: int, spread: float) -> None:
    """From rows with many high logits to rows with few: each corner is a local minimum, the start decides which is
    reached.
    """
    power = torch.logspace(-0.5, 2.5, 200, dtype=torch.float64)[:, None]
    start = (
        torch.rand(200, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64) ** power * spread
    )
    reached = descend(start, lambda rows: rows.clamp(0, spread), spread)
    floor = entropy_floor_of_range(spread, length).item()
    assert reached.min() >= floor - 1e-12
    assert reached.min() < floor + 0.01 * (math.log(length) - floor)


def test_more_than_one_high_logit_can_be_the_worst_case_of_a_range() -> None:
    """With a narrow range the least entropy has about half of the logits high: a floor from one high logit alone would
    be wrong.
    """
    one_high = entropy(np.eye(50)[0] * 0.5)
    assert entropy_floor_of_range(0.5, 50).item() < one_high - 1e-2


def test_the_floor_of_a_range_falls_from_uniform_to_nothing() -> None:
    floor = entropy_floor_of_range(torch.linspace(0, 30, 200, dtype=torch.float64), 16)
    assert floor[0].item() == pytest.approx(math.log(16))
    assert bool((floor.diff() < 0).all())
    assert floor[-1].item() < 1e-10
    assert entropy_floor_of_range(torch.ones(2, 3), 16).shape == (2, 3)
    assert entropy_floor_of_range(3.0, 1).item() == 0


# --- the estimate -----------------------------------------------------------------------------------------------------


def drawn_entropies(spread: float, length: int, rows: int, seed: int) -> np.ndarray:
    """Of rows of normal logits, drawn in float64, some at a time."""
    rng, some = np.random.default_rng(seed), max(1, 2_000_000 // length)
    parts = [entropy(rng.normal(0, spread, (min(some, rows - at), length))) for at in range(0, rows, some)]
    return np.concatenate(parts)


@pytest.mark.parametrize("length", [2, 3, 16, 256, 4096])
def test_expected_entropy_is_that_of_drawn_rows(length: int) -> None:
    """To 0.01 nats, from uniform rows to one-hot ones; the rows are so many that an error of 0.01 would show."""
    for seed, spread in enumerate((0.1, 1.0, 3.33, 10.0, 15.1, 83.7)):
        seen = drawn_entropies(
            spread, length, min(60_000, (15_000_000 if length == 256 else 4_000_000) // length), seed
        )
        error = seen.std(ddof=1) / math.sqrt(len(seen))
        found = expected_entropy(spread**2, length).item()
        assert abs(seen.mean() - found) < 0.002 + 4 * error, (length, spread)
        assert error < 0.0033 or length > 256, "too few rows to tell"


@pytest.mark.parametrize("length", [2, 256, 10**9])
def test_expected_entropy_has_its_limits_and_falls_between_them(length: int) -> None:
    v = torch.cat([torch.zeros(1), torch.logspace(-3, 12, 151)]).double()
    found = expected_entropy(v, length)
    assert found[0].item() == pytest.approx(math.log(length), abs=1e-8)
    assert bool((found.diff() < 0).all()), "it falls, also where the integral gives way to its continuation"
    assert 0 < found[-1].item() < 2e-5
    ends = expected_entropy(torch.tensor([math.inf, math.nan, -1.0]), length).tolist()
    assert ends[0] == 0
    assert [math.isnan(x) for x in ends] == [False, True, True]
    assert expected_entropy(torch.rand(2, 3), length).shape == (2, 3)


def test_expected_entropy_of_a_head_does_not_depend_on_its_batch() -> None:
    v = torch.tensor([0.0, 0.3, 4.0, 11.1, 224.0, 226.0, 7000.0], dtype=torch.float64)
    assert expected_entropy(v, 256).tolist() == [expected_entropy(x, 256).item() for x in v]


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.size = max(self.size, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("measure", [expected_entropy, lambda v, length: residual_kept(v, length, typical=True)])
def test_rows_with_a_large_spread_take_little_memory(measure: Callable[[Tensor, int], Tensor]) -> None:
    with LargestTensor() as largest:
        measure(torch.tensor([1.0, 200.0, 1e4]), 4_321)
    assert largest.size <= 4 * 2**20


def test_expected_entropy_is_not_zero_where_its_second_order_is() -> None:
    """At v = 2 log T: 2.26 nats of 5.55 are left over 256 keys. Scans said 0 there."""
    edge = 2 * math.log(256)
    assert second_order_entropy(torch.tensor([edge, 4 * edge]), 256).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert expected_entropy(edge, 256).item() == pytest.approx(2.26, abs=0.01)
    assert second_order_entropy(0.01, 4096).item() == pytest.approx(expected_entropy(0.01, 4096).item(), abs=1e-5)


@pytest.mark.parametrize("length", [2, 256, 8192])
def test_variance_at_is_where_the_expected_entropy_has_fallen_to_a_share(length: int) -> None:
    for share in (0.9, 0.5, 0.1, 0.02):
        assert expected_entropy(variance_at(share, length), length).item() == pytest.approx(
            share * math.log(length), abs=1e-4
        )
    assert variance_at(0.1, 256) ** 0.5 == pytest.approx(10.13, abs=0.01)


# --- the ratio --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 17, 300])
def test_the_ratio_of_uniform_rows_is_one_at_every_length(length: int) -> None:
    visible = torch.arange(1, length + 1)
    assert entropy_ratio(torch.log(visible.double()), visible).item() == pytest.approx(1)
    assert entropy_ratio(torch.zeros(length), visible).item() == 0


def test_the_ratio_is_the_mean_over_rows_that_have_a_choice() -> None:
    """Row by row by hand; the rows with one key or none would pull it down, or divide by log 1."""
    rows = torch.tensor([[0.0, 0.3, 0.9, 1.0], [0.0, 0.0, 0.6, 0.0]], dtype=torch.float64)
    visible = torch.tensor([[1, 2, 3, 4], [0, 1, 5, 1]])
    first = (0.3 / math.log(2) + 0.9 / math.log(3) + 1.0 / math.log(4)) / 3
    assert entropy_ratio(rows, visible).tolist() == pytest.approx([first, 0.6 / math.log(5)])


def test_the_ratio_ignores_what_an_empty_row_holds() -> None:
    """A fully masked row has an undefined entropy; it must not spread to the mean."""
    found = entropy_ratio(torch.tensor([math.nan, math.log(2.0)]), torch.tensor([0, 2]))
    assert found.item() == pytest.approx(1)
