"""Tensors of two sources: what counts as equal, how large a change is, and its rank beside rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from locater.commands import differences
from locater.commands.differences import HIGHEST, TensorDifference, difference, tensor_differences
from locater.sources.weights import DictWeights


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank(rank: int, rows: int, columns: int) -> Tensor:
    return drawn(rows, rank, seed=1) @ drawn(rank, columns, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 8, 32, HIGHEST])
@pytest.mark.parametrize("size", [0.02, 0.5, 20.0])
def test_the_rank_of_a_merged_change(dtype: torch.dtype, rank: int, size: float) -> None:
    """A change of 2 % of the weights in bfloat16 stands out of their rounding, up to rank 8."""
    weights, change = drawn(384, 200).to(dtype), low_rank(rank, 384, 200)
    change = size * change * weights.float().norm() / change.norm()
    found = difference("w", weights, (weights.float() + change).to(dtype))
    assert found.kind == "changed"
    assert found.relative == pytest.approx(size, rel=0.02)
    if (dtype, size) != (torch.bfloat16, 0.02) or rank <= 8:
        assert found.rank == rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_full_rank_has_none(dtype: torch.dtype) -> None:
    weights = drawn(384, 200).to(dtype)
    assert difference("w", weights, (weights + 0.05 * drawn(384, 200, seed=3)).to(dtype)).rank is None
    for by in (0.002, 0.005, 0.01, 0.02, 0.04):
        tuned = (weights.float() + by * drawn(384, 200, seed=3)).to(dtype)
        assert difference("w", weights, tuned).rank in (None, 0), "0 where rounding hides it"
    rows = weights.clone()
    rows[7:57] *= 3
    assert difference("w", weights, rows).rank == 50, "as many as rows that changed"


def test_rounding_is_no_change_of_low_rank() -> None:
    """Twice rounded numbers differ by noise that has no directions of its own."""
    weights = drawn(384, 200)
    found = difference("w", weights.bfloat16(), weights.half())
    assert found.kind == "changed"
    assert found.relative == pytest.approx(0.0016, rel=0.1)
    assert found.rank == 0


def test_what_is_equal() -> None:
    weights = drawn(6, 4)
    weights[0, 0] = math.nan
    assert difference("w", weights, weights.clone()).kind == "equal", "NaN in both"
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert difference("w", weights, weights.to(dtype)).kind == "dtype"
        assert difference("w", weights.to(dtype), weights).kind == "dtype"
    assert difference("w", weights.mT, weights.mT.contiguous()).kind == "equal", "the layout in memory is not"
    assert difference("n", torch.arange(3), torch.arange(3.0)).kind == "changed"
    assert difference("n", torch.tensor(1.0), torch.tensor(1.5)) == TensorDifference("n", "changed", 0.5)
    assert difference("n", torch.zeros(0, 3), torch.zeros(0, 3)).kind == "equal"


def test_numbers_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = drawn(6, 4)
    broken = weights.clone()
    broken[2, 1:3] = torch.tensor([math.nan, math.inf])
    assert difference("w", weights, broken) == TensorDifference("w", "changed", None, None, 2)
    assert difference("w", broken, weights) == TensorDifference("w", "changed")
    assert difference("w", torch.zeros(4, 4), weights[:4]).relative is None, "of nothing"
    monkeypatch.setattr(differences, "NUMBERS_AT_ONCE", 8)
    assert difference("w", weights, broken) == TensorDifference("w", "changed", None, None, 2)


def test_blocks_of_rows_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, change = drawn(384, 20, 10), low_rank(5, 384, 200).view(384, 20, 10)
    whole = difference("w", weights, weights + change)
    assert whole.rank == 5
    monkeypatch.setattr(differences, "NUMBERS_AT_ONCE", 1000)
    assert difference("w", weights, weights + change) == (
        *whole[:2],
        pytest.approx(whole.relative),
        *whole[3:],
    )
    assert difference("w", weights, weights.half()).kind == "dtype"


def test_sources_side_by_side() -> None:
    one = {"b.0.q.weight": drawn(6, 4), "b.1.q.weight": drawn(6, 4), "head": drawn(3), "gone": drawn(1)}
    two = {
        "b.0.q.weight": one["b.0.q.weight"],
        "b.1.q.weight": drawn(5, 4),
        "head": one["head"].half(),
        "new": drawn(1),
    }
    found = list(tensor_differences(DictWeights(one, "a"), DictWeights(two, "b")))
    assert [(x.name, x.kind) for x in found] == [
        ("b.0.q.weight", "equal"),
        ("b.1.q.weight", "shape"),
        ("head", "dtype"),
    ]
    assert [x.module for x in found] == ["b.*.q.weight", "b.*.q.weight", "head"]
