"""The head with anchors: against plain arithmetic, its bounds on every temperature, and its map."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from locater.errors import LocaterError
from locater_lab.theory import approximation
from locater_lab.theory.approximation import Anchors


def softmax_by_hand(s: float, low: float, high: float, count: int, beta: float) -> float:
    """From distances, not from keys: weights exp(-beta (s - L)^2)."""
    anchors = [low + k * (high - low) / (count - 1) for k in range(count)]
    nearest = min((s - L) ** 2 for L in anchors)
    weights = [math.exp(-beta * ((s - L) ** 2 - nearest)) for L in anchors]
    return sum(w * L for w, L in zip(weights, anchors, strict=True)) / sum(weights)


@pytest.mark.parametrize(
    ("low", "high", "count", "beta"), [(-1.0, 1.0, 5, 3.0), (0.0, 4.0, 9, 40.0), (-3.0, -1.0, 2, 0.5)]
)
def test_keys_give_the_parabola(low: float, high: float, count: int, beta: float) -> None:
    s = torch.linspace(low - 2, high + 2, 41, dtype=torch.float64)
    expected = [softmax_by_hand(x, low, high, count, beta) for x in s.tolist()]
    np.testing.assert_allclose(approximation.interpolate(s, Anchors(low, high, count, beta)), expected, atol=1e-10)


def test_logits_of_the_maps_and_their_rank() -> None:
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(7, generator=g, dtype=torch.float64), torch.randn(20, 7, generator=g, dtype=torch.float64)
    anchors = Anchors(-2.0, 1.0, 6, 5.0)
    W, features = approximation.head_maps(w, 0.3, anchors)
    logits = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1) @ W @ features.mT
    np.testing.assert_allclose(logits, approximation.anchor_logits(x @ w + 0.3, anchors), atol=1e-10)
    assert int(torch.linalg.matrix_rank(W)) == 2


def test_the_hard_limit_is_the_nearest_anchor() -> None:
    anchors = Anchors.sharp(-1.0, 1.0, 8, 4000.0)
    s = torch.linspace(-1.2, 1.2, 997, dtype=torch.float64)
    far = (s[:, None] - anchors.values).abs().sort(1).values
    s = s[far[:, 1] - far[:, 0] > 0.01 * anchors.gap]  # a tie has no nearest anchor
    nearest = anchors.values[(s[:, None] - anchors.values).abs().argmin(1)]
    np.testing.assert_allclose(approximation.interpolate(s, anchors), nearest, atol=1e-10)
    assert approximation.largest_error(anchors) == pytest.approx(anchors.gap / 2, rel=1e-2)


def test_bounds_hold_on_random_heads_and_are_reached_in_the_hard_limit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        x, p, heads = 10 ** rng.uniform(-1, 3), int(rng.integers(2, 40)), int(rng.integers(1, 6))
        parts = approximation.segments(-1.0, 2.0, p, heads, x)
        s = torch.linspace(-2, 3, 3001, dtype=torch.float64)
        error = float((approximation.interpolate_by_heads(s, parts) - s.clamp(-1, 2)).abs().max())
        assert error <= parts[0].gap * approximation.heads_bound(x, p, heads) * (1 + 1e-12)
        if heads == 1:
            assert error <= parts[0].gap * approximation.interpolation_bound(x) * (1 + 1e-12)
    hard = Anchors.sharp(0.0, 1.0, 5, 1e6)
    assert approximation.largest_error(hard, 100_001) > 0.999 * hard.gap * approximation.interpolation_bound(1e6)


def test_formulas_at_the_ends_and_between_anchors() -> None:
    for x in (0.7, 1.5, 2.5):
        anchors = Anchors.sharp(0.0, 1.0, 81, x)
        end = float(approximation.interpolate(torch.tensor([0.0], dtype=torch.float64), anchors))
        assert end / anchors.gap == pytest.approx(approximation.edge_error(x), abs=1e-10)
        s = 0.5 + anchors.gap * torch.linspace(-0.5, 0.5, 2001, dtype=torch.float64)
        between = float((approximation.interpolate(s, anchors) - s).abs().max()) / anchors.gap
        assert between == pytest.approx(approximation.ripple(x), rel=1e-2)


def test_the_best_temperature_is_better_than_its_neighbours() -> None:
    best = approximation.best_sharpness(8)
    errors = [approximation.largest_error(Anchors.sharp(0.0, 1.0, 8, f * best)) for f in (0.8, 1.0, 1.25)]
    assert errors[1] == min(errors)


@pytest.mark.parametrize(("count", "high", "beta"), [(1, 1.0, 1.0), (4, -1.0, 1.0), (4, 1.0, 0.0), (4, 1.0, math.nan)])
def test_anchors_that_are_none(count: int, high: float, beta: float) -> None:
    with pytest.raises(LocaterError, match="needs low < high"):
        Anchors(0.0, high, count, beta)
