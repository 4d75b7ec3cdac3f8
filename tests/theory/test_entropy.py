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
from scipy import special, stats
from torch import Tensor

from locater.theory import entropy_floor, entropy_floor_of_range, entropy_ratio, expected_entropy


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


@pytest.mark.parametrize("variance", [0.01, 0.1, 0.5, 1.0])
def test_expected_entropy_is_that_of_normal_logits(variance: float) -> None:
    length = 4096
    seen = entropy(np.random.default_rng(1).normal(0, math.sqrt(variance), (400, length)))
    # log T - v/2 is the limit of many keys; the next order is below this
    finite = variance * math.exp(variance) / length
    error = 5 * seen.std(ddof=1) / math.sqrt(len(seen))
    assert abs(seen.mean() - expected_entropy(variance, length).item()) < error + finite
    assert error + finite < 0.2 * variance / 2, "the test would not see a wrong coefficient of v"


def test_expected_entropy_is_zero_from_collapse_on() -> None:
    length = 4096
    edge = 2 * math.log(length)
    assert expected_entropy(edge * 0.99, length).item() > 0
    assert expected_entropy(torch.tensor([edge, 4 * edge]), length).tolist() == pytest.approx([0, 0], abs=1e-6)
    collapsed = entropy(np.random.default_rng(2).normal(0, math.sqrt(4 * edge), (200, length)))
    # so do drawn logits: beyond the edge the random energy model has psi(1) - psi(1 - sqrt(edge/v)) nats, however many
    # the keys
    assert collapsed.mean() < special.digamma(1) - special.digamma(0.5) < 0.2 * math.log(length)


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
