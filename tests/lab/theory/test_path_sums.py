"""Paths against explicit enumeration, integers and fractions; their lengths against the binomial law and published
models.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from locater.errors import LocaterError
from locater.measures import token_residual
from locater_lab.theory import (
    FrozenLayer,
    FunctionalBlock,
    all_paths,
    apply_layers,
    frozen_layers,
    hidden_states,
    length_contributions,
    length_weights,
    path_counts,
    path_lengths,
    path_sum,
    skip_weight,
    terms_by_length,
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stack(heads: list[int], skips: list[bool], tokens: int = 5, width: int = 3) -> list[FrozenLayer]:
    """Any matrices: rows of attention need not sum to one for the sum over paths to hold."""
    return [
        FrozenLayer(normal(h, tokens, tokens, seed=10 * i), normal(h, width, width, seed=10 * i + 1), skip)
        for i, (h, skip) in enumerate(zip(heads, skips, strict=True))
    ]


STACKS = pytest.mark.parametrize(
    ("heads", "skips"),
    [
        ([1], [False]),
        ([3], [True]),
        ([2, 2, 2], [True] * 3),
        ([2, 2, 2], [False] * 3),
        ([1, 3, 2, 1], [True, False, True, True]),
    ],
)

# --- the sum ----------------------------------------------------------------------------------------------------------


@STACKS
def test_the_sum_over_paths_is_the_stack(heads: list[int], skips: list[bool]) -> None:
    layers, x = stack(heads, skips), normal(5, 3, seed=99)
    through = x.numpy()
    for layer in layers:  # plain, head by head
        added = [a @ through @ w for a, w in zip(layer.attention.numpy(), layer.value.numpy(), strict=True)]
        through = sum(added) + (through if layer.skip else 0)
    size = np.abs(through).max()
    assert apply_layers(x, layers).numpy() == pytest.approx(through, abs=1e-13 * size)
    assert path_sum(x, layers).numpy() == pytest.approx(through, abs=1e-13 * size)


@STACKS
def test_every_path_is_the_product_of_its_choices(heads: list[int], skips: list[bool]) -> None:
    layers, x = stack(heads, skips), normal(5, 3, seed=99)
    choices = [[*range(h), None][: h + skip] for h, skip in zip(heads, skips, strict=True)]
    found = list(all_paths(layers))
    assert [path.heads for path in found] == list(itertools.product(*choices))
    assert len(found) == math.prod(h + skip for h, skip in zip(heads, skips, strict=True))
    for path in found:
        P, W = np.eye(5), np.eye(3)
        for head, layer in zip(path.heads, layers, strict=True):
            if head is not None:
                P, W = layer.attention[head].numpy() @ P, W @ layer.value[head].numpy()
        assert path.length == len(layers) - path.heads.count(None)
        assert path(x).numpy() == pytest.approx(P @ x.numpy() @ W, rel=1e-12, abs=1e-12)


@STACKS
def test_terms_by_length_are_the_paths_of_that_length(heads: list[int], skips: list[bool]) -> None:
    layers, x = stack(heads, skips), normal(5, 3, seed=99)
    wanted = torch.zeros(len(layers) + 1, 5, 3, dtype=torch.float64)
    for path in all_paths(layers):
        wanted[path.length] += path(x)
    found = terms_by_length(x, layers)
    assert found.numpy() == pytest.approx(wanted.numpy(), abs=1e-12 * wanted.abs().max().item())
    assert found.sum(0).numpy() == pytest.approx(apply_layers(x, layers).numpy(), abs=1e-12 * wanted.abs().max().item())


def test_many_paths_add_up_without_being_listed() -> None:
    """25^24 of them: no list, the same sum."""
    layers = [
        FrozenLayer(normal(24, 4, 4, seed=i).softmax(-1), 0.05 * normal(24, 3, 3, seed=i + 50), True) for i in range(24)
    ]
    x = normal(4, 3, seed=1)
    whole = apply_layers(x, layers)
    assert terms_by_length(x, layers).sum(0).numpy() == pytest.approx(
        whole.numpy(), abs=1e-12 * whole.abs().max().item()
    )


@pytest.mark.parametrize("skip", [False, True])
def test_a_real_stack_is_the_sum_of_its_paths_with_attention_held(skip: bool) -> None:
    blocks = [
        FunctionalBlock(normal(2, 3, 3, seed=i), normal(2, 3, 3, seed=i + 7), scale=0.6, skip=skip) for i in range(3)
    ]
    x = normal(6, 3, seed=5)
    out = hidden_states(x, blocks)[-1].numpy()
    layers = frozen_layers(x, blocks)
    assert path_sum(x, layers).numpy() == pytest.approx(out, abs=1e-12 * np.abs(out).max())
    other = 2 * x  # the attention of x, held, is not that of other tokens
    assert np.abs(path_sum(other, layers).numpy() - hidden_states(other, blocks)[-1].numpy()).max() > 0.1


def test_biases_leave_one_vector_for_all_tokens() -> None:
    layers, x = stack([2, 2, 2], [True] * 3), normal(5, 3, seed=99)
    layers = [FrozenLayer(layer.attention.softmax(-1), layer.value, True) for layer in layers]
    through = x
    for i, layer in enumerate(layers):
        through = through + (layer.attention @ through @ layer.value).sum(0) + normal(3, seed=70 + i)
    left = through - path_sum(x, layers)
    assert left.abs().max() > 0.1
    assert token_residual(left).abs().max() < 1e-12


def test_longer_paths_have_more_equal_tokens() -> None:
    """Products of attention matrices lose their rank, and the path keeps only what is left."""
    blocks = [
        FunctionalBlock(normal(2, 8, 8, seed=i), normal(2, 8, 8, seed=i + 7) / 4, scale=0.1, skip=True)
        for i in range(5)
    ]
    x = normal(12, 8, seed=5)
    found: dict[int, list[float]] = {}
    for path in all_paths(frozen_layers(x, blocks)):
        share = torch.linalg.matrix_norm(token_residual(path.attention)) / torch.linalg.matrix_norm(path.attention)
        found.setdefault(path.length, []).append(share.item())
    medians = [float(np.median(found[k])) for k in range(6)]
    assert all(b < 0.7 * a for a, b in itertools.pairwise(medians))


def test_blocks_that_are_not_linear_are_refused() -> None:
    plain = FunctionalBlock(normal(1, 2, 2, seed=1), normal(1, 2, 2, seed=2), scale=1.0)
    for bent in (
        FunctionalBlock(plain.W_QK, plain.W_VO, 1.0, norm=True),
        FunctionalBlock(plain.W_QK, plain.W_VO, 1.0, mlp=torch.relu),
    ):
        with pytest.raises(LocaterError, match="block 1"):
            frozen_layers(normal(3, 2, seed=3), [plain, bent])


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "heads"), [(0, 3), (1, 1), (4, 2), (3, 5), (6, 3)])
def test_counts_are_those_of_a_list_of_all_paths(depth: int, heads: int) -> None:
    listed = Counter(sum(choice > 0 for choice in path) for path in itertools.product(range(heads + 1), repeat=depth))
    assert path_counts(depth, heads) == [listed[k] for k in range(depth + 1)]


@pytest.mark.parametrize(("depth", "heads"), [(12, 12), (24, 128), (96, 96), (200, 300)])
def test_counts_are_the_coefficients_of_a_power_and_shares_are_rounded_once(depth: int, heads: int) -> None:
    power = [1]
    for _ in range(depth):  # (1 + H t)^L, multiplied out in integers
        power = [a + heads * b for a, b in zip([*power, 0], [0, *power], strict=True)]
    assert path_counts(depth, heads) == power
    assert sum(power) == (1 + heads) ** depth
    shares = path_lengths(depth, heads)
    assert shares.tolist() == [float(Fraction(count, (1 + heads) ** depth)) for count in power]
    assert shares.sum().item() == pytest.approx(1, abs=1e-14)
    mean = (shares * torch.arange(depth + 1)).sum().item()
    assert mean == pytest.approx(depth * heads / (1 + heads), rel=1e-13)


@pytest.mark.parametrize(("depth", "heads"), [(6, 12), (96, 96), (200, 300)])
def test_logarithms_are_those_of_the_integers(depth: int, heads: int) -> None:
    wanted = [math.log(count) - depth * math.log(1 + heads) for count in path_counts(depth, heads)]
    assert path_lengths(depth, heads, log=True).tolist() == pytest.approx(wanted, abs=1e-11)


def test_logarithms_reach_where_shares_underflow() -> None:
    found = path_lengths(100_000, 64, log=True)
    k = np.array([0, 1, 50_000, 98_000, 98_462, 100_000])
    wanted = stats.binom.logpmf(k, 100_000, 64 / 65)
    assert found[k].tolist() == pytest.approx(wanted.tolist(), rel=1e-9, abs=1e-8)
    assert found[0].exp().item() == 0


# depth, heads, mean, mode, share of the mode, share of the longest
MODELS = {
    "DistilBERT": (6, 12, 5.538, 6, 0.6186, 0.6186),
    "MobileBERT": (12, 4, 9.600, 10, 0.2835, 0.0687),
    "DeiT-T": (12, 3, 9.000, 9, 0.2581, 0.0317),
    "BERT-base": (12, 12, 11.077, 11, 0.3827, 0.3827),
    "BERT-large": (24, 16, 22.588, 23, 0.3501, 0.2334),
    "ViT-H": (32, 16, 30.118, 31, 0.2874, 0.1437),
    "T5-3B": (24, 32, 23.273, 24, 0.4778, 0.4778),
    "T5-11B": (24, 128, 23.814, 24, 0.8296, 0.8296),
    "GPT-3": (96, 96, 95.010, 95, 0.3698, 0.3698),
}


@pytest.mark.parametrize("model", MODELS)
def test_lengths_of_published_models(model: str) -> None:
    depth, heads, mean, mode, at_mode, longest = MODELS[model]
    shares = path_lengths(depth, heads)
    counts = path_counts(depth, heads)
    assert round((shares * torch.arange(depth + 1)).sum().item(), 3) == mean
    assert counts.index(max(counts)) == mode
    assert round(shares[mode].item(), 4) == at_mode
    assert round(shares[-1].item(), 4) == longest
    assert (counts[-1] == counts[-2]) == (depth == heads), "as many paths of length L - 1 as of L where L = H, exactly"


# --- weights ----------------------------------------------------------------------------------------------------------

TRAINED = torch.tensor([0.901, 0.905, 0.907, 0.889, 0.856, 0.778], dtype=torch.float64)  # of a model of six layers


@pytest.mark.parametrize(
    "skip", [TRAINED, torch.tensor([0.3]), torch.rand(9, generator=torch.Generator().manual_seed(0))]
)
def test_weights_are_summed_over_sets_of_layers(skip: Tensor) -> None:
    alpha = skip.double().tolist()
    wanted = [0.0] * (len(alpha) + 1)
    for visited in itertools.product([False, True], repeat=len(alpha)):
        wanted[sum(visited)] += math.prod(1 - a if seen else a for a, seen in zip(alpha, visited, strict=True))
    assert length_weights(skip).tolist() == pytest.approx(wanted, rel=1e-12)
    assert length_weights(skip).sum().item() == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize(("depth", "heads"), [(6, 12), (96, 96)])
def test_equal_weights_give_the_share_of_paths(depth: int, heads: int) -> None:
    skip = torch.full((depth,), 1 / (1 + heads), dtype=torch.float64)
    assert length_weights(skip, log=True).tolist() == pytest.approx(
        path_lengths(depth, heads, log=True).tolist(), abs=1e-11
    )


def test_weights_at_the_ends_and_beyond_float64() -> None:
    assert length_weights(torch.tensor([1.0, 0.0, 1.0])).tolist() == [0, 1, 0, 0]
    assert length_weights(torch.zeros(0)).tolist() == [1]
    tiny = length_weights(torch.full((5,), 1e-200, dtype=torch.float64), log=True)
    assert tiny[0].item() == pytest.approx(-1000 * math.log(10))
    assert tiny[5].item() == pytest.approx(0, abs=1e-12)


def test_contributions_fall_with_the_third_power_of_the_length() -> None:
    found = length_contributions(TRAINED, residual=400.0, rate=1.0491046).tolist()
    wanted = [400 / 1.0491046 ** (3**k - 1) * weight for k, weight in enumerate(length_weights(TRAINED).tolist())]
    assert found == pytest.approx(wanted, rel=1e-10)
    assert sum(found[:2]) > 0.85 * sum(found), "paths of length 0 and 1 carry most of it"
    assert length_contributions(torch.full((60,), 0.5), 1.0, 1.01)[-1].item() == 0


def test_the_weight_of_a_skip_is_a_share_of_squared_composite_norms() -> None:
    x, added = normal(2, 5, 3, seed=1), 0.3 * normal(2, 5, 3, seed=2)
    sizes = [[np.linalg.norm(m, 1) * np.linalg.norm(m, np.inf) for m in t.numpy()] for t in (x, added)]
    wanted = [a / (a + b) for a, b in zip(*sizes, strict=True)]
    assert skip_weight(x, added).tolist() == pytest.approx(wanted)
