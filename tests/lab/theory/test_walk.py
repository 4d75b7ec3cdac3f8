"""The simulator is the reference of `tests/theory/test_localization.py`; here it is held to its own definitions and to one solved
case.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from locater_lab.theory import simulate


def pair(head_dim: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(head_dim, width, generator=g), torch.randn(head_dim, width, generator=g)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_softmax_weights_sum_to_one_also_over_an_uneven_last_chunk(scale: float) -> None:
    seen = simulate(*pair(2, 5, 0), scale, 12, walks=2_500, chunk=1_000)
    assert seen.softmax.sum().item() == pytest.approx(1, abs=1e-12)
    assert seen.walks == 2_500


def test_a_single_walk_is_clipped_as_by_hand() -> None:
    """delta can be read off the softmax weights, as their centred logarithm: the clipped form must follow from it."""
    length, seen_below, seen_above = 4, False, False
    for seed in range(60):
        walk = simulate(*pair(1, 2, seed), 1.0, length, walks=1, seed=seed)
        logs = np.log(walk.softmax.numpy())
        for i, delta in enumerate(logs - logs.mean()):
            by_hand = 0.0 if delta < -1 else 1.0 if delta > length - 1 else (1 + delta) / length
            assert walk.clipped[i].item() == pytest.approx(by_hand, abs=1e-9)
            assert walk.propagated[i].item() == (1.0 if -1 < delta < length - 1 else 0.0)
            seen_below, seen_above = seen_below or delta < -1, seen_above or delta > length - 1
    assert seen_below, "no walk was clipped at 0"
    assert seen_above, "no walk was clipped at 1"


def test_the_last_token_asks_and_the_walk_answers() -> None:
    """With keys that read channel 1 the logits follow the walk in channel 1, whichever channel the query reads: it only
    scales them.
    """
    first, second = torch.eye(2).split(1)

    def centred(W_Q: Tensor, W_K: Tensor) -> np.ndarray:
        logs = np.log(simulate(W_Q, W_K, 1.0, 6, walks=1, seed=11).softmax.numpy())
        return (logs - logs.mean()) / np.linalg.norm(logs - logs.mean())

    assert abs(centred(first, second) @ centred(second, second)) == pytest.approx(1)
    assert abs(centred(first, second) @ centred(first, first)) < 0.99


def test_two_tokens_in_one_dimension_fit_the_integral() -> None:
    """x_1 = a, x_2 = a + b with variances c/2, so delta_2 = w (a+b) b/2 = -delta_1: one integral over b given x_2."""
    w, c, walks = 3.0, 1.7, 100_000
    seen = simulate(torch.tensor([[w]]), torch.ones(1, 1), 1.0, 2, walks=walks, covariance=torch.tensor([[c]]), seed=3)

    def mean_of(event) -> float:  # b given x_2 is normal with mean x_2/2 and variance c/4
        def given(x: float) -> float:
            mean, sd = w * x**2 / 4, abs(w * x) / 2 * math.sqrt(c / 4) + 1e-300
            return event(mean, sd) * stats.norm.pdf(x, scale=math.sqrt(c))

        return 2 * integrate.quad(given, 0, 12 * math.sqrt(c), limit=200)[0]

    propagated = mean_of(lambda mean, sd: stats.norm.cdf((1 - mean) / sd) - stats.norm.cdf((-1 - mean) / sd))
    x, weight = np.polynomial.hermite_e.hermegauss(80)
    near = mean_of(lambda mean, sd: float((weight / weight.sum()) @ (1 / (1 + np.exp(-2 * (mean + sd * x))))))
    for i in range(2):
        assert abs(seen.propagated[i].item() - propagated) < 5 * math.sqrt(propagated * (1 - propagated) / walks)
    # a weight in [0, 1] has a spread of at most 1/2
    assert abs(seen.softmax[1].item() - near) < 5 * 0.5 / math.sqrt(walks)
    assert near > 0.6, "the nearer token gets more: the case is not trivial"


def test_a_head_without_logits_is_uniform() -> None:
    seen = simulate(torch.zeros(2, 3), torch.zeros(2, 3), 1.0, 10, walks=50)
    for found, expected in ((seen.propagated, 1.0), (seen.clipped, 0.1), (seen.softmax, 0.1), (seen.error, 0.0)):
        torch.testing.assert_close(found, torch.full((10,), expected, dtype=torch.float64))


def test_a_covariance_is_a_change_of_basis_of_the_head() -> None:
    """Walks with C = R R^T through W_Q, W_K are walks with C = I through W_Q R, W_K R; C has no full rank here."""
    W_Q, W_K = pair(2, 5, 4)
    root = torch.randn(5, 3, generator=torch.Generator().manual_seed(5))
    coloured = simulate(W_Q, W_K, 0.3, 10, walks=40_000, covariance=root @ root.mT, seed=6)
    white = simulate(W_Q @ root, W_K @ root, 0.3, 10, walks=40_000, seed=7)
    error = (coloured.error**2 + white.error**2).sqrt() + 1e-4
    assert bool(((coloured.propagated - white.propagated).abs() < 5 * error).all())
    plain = simulate(W_Q, W_K, 0.3, 10, walks=40_000, seed=6)
    assert bool(((coloured.propagated - plain.propagated).abs() > 10 * error).any()), (
        "the covariance makes a difference"
    )


def test_the_seed_decides_everything() -> None:
    W_Q, W_K = pair(2, 5, 8)
    first, again, other = (simulate(W_Q, W_K, 1.0, 10, walks=500, seed=seed) for seed in (1, 1, 2))
    for name in ("propagated", "clipped", "softmax", "error"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


def test_the_stated_error_is_the_spread_over_seeds() -> None:
    W_Q, W_K = pair(2, 5, 9)
    runs = [simulate(W_Q, W_K, 1.0, 6, walks=400, seed=seed) for seed in range(100)]
    spread = torch.stack([run.propagated for run in runs]).std(0)
    stated = torch.stack([run.error for run in runs]).mean(0)
    # a standard deviation of 100 runs is known to about 7 %
    torch.testing.assert_close(spread, stated, rtol=5 / math.sqrt(2 * 99), atol=0)
