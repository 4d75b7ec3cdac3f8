"""A layer in blocks of heads: the numbers are those of the whole layer, and only a block of its rows is read at a time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import locater
from locater.commands import layer_moments
from locater.commands.scan_rows import ScanOptions, head_rows
from locater.discovery import layers_of
from locater.layers import AttentionLayer, effective
from locater.layers.head_blocks import head_blocks
from locater.layers.row_readers import rows_within
from locater.results.scan import HeadRow
from locater.sources.open_source import open_source
from locater.sources.weights import Rows, Weights
from tests.families import CASES
from tests.parity import model_of

# separate maps with grouped keys, a latent with shared rotary channels, fused rows, norms of queries and keys, rows in
# another order, one that is stored (in, out)
KINDS = ["llama", "deepseek_v3", "gpt_neox", "qwen3", "cohere", "stablelm", "gpt2"]
ELEMENTS = 800  # fewer than a layer of these models has, and as many as a key head and its query heads


class Recorded:
    """Weights that record the rows of each read."""

    def __init__(self, inner: Weights) -> None:
        self.where, self._inner = inner.where, inner
        self.reads: list[tuple[str, int]] = []

    def names(self) -> Collection[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._inner.read(name, rows)
        self.reads.append((name, len(tensor)))
        return tensor


def written(kind: str, folder: Path) -> Path:
    model_of(next(case for case in CASES if case.label == kind)).save_pretrained(folder)
    return folder


def opened(kind: str, folder: Path) -> tuple[Recorded, list[AttentionLayer]]:
    weights, config = open_source(written(kind, folder))
    recorded = Recorded(weights)
    return recorded, layers_of(recorded, config)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_moments_of_the_layer(kind: str, tmp_path: Path) -> None:
    for layer in opened(kind, tmp_path)[1]:
        whole = effective(layer)
        blocks = list(head_blocks(layer, ELEMENTS))
        assert len(blocks) > 1
        assert sum(block.heads for block in blocks) == layer.heads
        folded = [effective(block) for block in blocks]
        torch.testing.assert_close(torch.cat([x.query for x in folded]), whole.query, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(torch.cat([x.key_bias for x in folded]), whole.key_bias, rtol=1e-6, atol=1e-7)
        expected = whole.moments()
        for name in ("frobenius_sq", "trace"):
            got = torch.cat([getattr(x.moments(), name) for x in folded])
            torch.testing.assert_close(got, getattr(expected, name), rtol=1e-5, atol=1e-7)


def test_a_group_too_large_for_a_block_is_split(tmp_path: Path) -> None:
    layer = opened("llama", tmp_path)[1][0]
    assert layer.group > 1
    blocks = list(head_blocks(layer, 1))
    assert [(block.heads, block.kv_heads) for block in blocks] == [(1, 1)] * layer.heads
    whole = effective(layer).moments()
    parts = [effective(block).moments() for block in blocks]
    torch.testing.assert_close(torch.cat([part.gram for part in parts]), whole.gram)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gpt_neox", "qwen3", "cohere"])
def test_no_block_reads_the_map_of_the_layer(kind: str, tmp_path: Path) -> None:
    """What is read at a time is the rows of a block's heads, and every row of a map once."""
    weights, (layer, *_) = opened(kind, tmp_path)
    sizes = {part.shape[0] for part in (layer.query, layer.key)}
    weights.reads.clear()
    counts = []
    for block in head_blocks(layer, ELEMENTS):
        counts.append(block.heads)
        effective(block)
    by_name: dict[str, list[int]] = {}
    for name, rows in weights.reads:
        by_name.setdefault(name, []).append(rows)
    assert by_name
    wide = {name: rows for name, rows in by_name.items() if "_a_proj" not in name}  # latents are read once, and kept
    for name, rows in wide.items():
        assert len(rows) >= len(counts), name
        assert max(rows) < max(sizes), name
        assert sum(rows) <= weights.shape(name)[0] * (2 if kind == "gpt_neox" else 1), name


def test_rows_of_a_scan_do_not_depend_on_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the last bit: a key head and its query heads meet in the same products."""
    folder = written("llama", tmp_path)
    whole = locater.scan(folder, eigenvalues=True).rows
    calls: list[int] = []

    def small(layer: AttentionLayer, elements: int) -> list[AttentionLayer]:
        blocks = list(head_blocks(layer, ELEMENTS))
        calls.append(len(blocks))
        return blocks

    monkeypatch.setattr(layer_moments, "head_blocks", small)
    assert locater.scan(folder, eigenvalues=True).rows == whole
    assert min(calls) > 1


def test_one_block_in_float64_takes_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads do not change their precision with the block that they are in."""
    layer = opened("llama", tmp_path)[1][0]
    weight = layer.query.weight().clone()
    weight[-layer.head_dim :] *= 1e-12  # the last head is lost in float32
    layer = replace(layer, query=replace(layer.query, weight=lambda: weight))

    def rows() -> list[HeadRow]:
        parts = layer_moments.layer_moments([(0, layer)], [layer], layer_moments.Work())
        return [row for part in parts for row in head_rows(part, ScanOptions())]

    whole = rows()
    monkeypatch.setattr(layer_moments, "head_blocks", lambda layer, elements: head_blocks(layer, ELEMENTS))
    assert rows() == whole


def test_ranges_within_ranges() -> None:
    rows = [(0, 3), (10, 11), (20, 24)]
    every = [row for a, b in rows for row in range(a, b)]
    for start in range(len(every)):
        for stop in range(start + 1, len(every) + 1):
            inside = rows_within(rows, start, stop)
            assert [row for a, b in inside for row in range(a, b)] == every[start:stop]
