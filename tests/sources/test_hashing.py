"""Digests of what was read: equal for equal weights alone, however they were read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from locater.commands.fleet.cache_keys import HashedWeights, combined_hash
from locater.sources.safetensors_file import SafetensorsWeights
from locater.sources.weights import DictWeights

Q = torch.arange(12.0).reshape(4, 3)


def digest(tensors: dict[str, torch.Tensor], *reads: tuple[str, list[tuple[int, int]] | None]) -> str:
    weights = HashedWeights(DictWeights(tensors, "here"))
    for name, rows in reads:
        weights.read(name, rows)
    return combined_hash(weights.reads)


def test_order_and_repetition_do_not_count() -> None:
    tensors = {"q": Q, "k": Q + 1}
    assert digest(tensors, ("q", None), ("k", [(0, 2)])) == digest(tensors, ("k", [(0, 2)]), ("q", None), ("q", None))


@pytest.mark.parametrize(
    "other",
    [
        {"q": Q.clone().index_fill_(0, torch.tensor([3]), 7.0)},  # one row
        {"q": Q.reshape(3, 4)},  # the same bytes in another shape
        {"q": Q.view(torch.int32)},  # and of another type
    ],
)
def test_other_weights_have_another_digest(other: dict[str, torch.Tensor]) -> None:
    assert digest({"q": Q}, ("q", None)) != digest(other, ("q", None))


def test_names_and_rows_count() -> None:
    assert digest({"q": Q}, ("q", None)) != digest({"k": Q}, ("k", None))
    assert digest({"q": Q}, ("q", [(0, 2)])) != digest({"q": Q}, ("q", [(2, 4)]))


def test_strides_do_not_count_and_numbers_pass_unchanged() -> None:
    turned = Q.mT.contiguous().mT
    assert digest({"q": turned}, ("q", None)) == digest({"q": Q}, ("q", None))
    assert torch.equal(HashedWeights(DictWeights({"q": turned}, "here")).read("q"), Q)


def test_what_a_file_has_beside_the_interface_is_passed_on(tmp_path: Path) -> None:
    save_file({"q": Q.bfloat16()}, tmp_path / "a.safetensors")
    weights = HashedWeights(SafetensorsWeights([tmp_path / "a.safetensors"], "a"))
    weights.read("q", [(1, 3)])
    assert weights.bytes_read == 12
    assert getattr(weights, "no such thing", None) is None


def test_a_plan_of_reads_leaves_no_digest() -> None:
    weights = HashedWeights(DictWeights({}, "here"))
    weights._weights.read = lambda name, rows=None: torch.empty(2, device="meta")  # type: ignore[method-assign]
    weights.read("q")
    assert not weights.reads
