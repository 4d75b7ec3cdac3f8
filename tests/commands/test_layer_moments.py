"""Layers by workers, in blocks and joined: the rows are those of one layer after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import locater
from locater import spectrum
from locater.commands import layer_moments as module
from locater.commands.layer_moments import Work, layer_moments
from locater.commands.scan_rows import ScanOptions, head_rows
from locater.discovery import attention_layers
from locater.layers import effective
from locater.results.scan import HeadRow


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def model(**changes: Any) -> Any:
    """A Llama of four layers, every parameter redrawn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    torch.manual_seed(0)
    built = LlamaForCausalLM(LlamaConfig(vocab_size=50, intermediate_size=64, **{**shape, **changes}))
    for p in built.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return built


def one_by_one(source: Any, options: ScanOptions) -> list[HeadRow]:
    """Each layer in a call of its own, by one thread."""
    rows: list[HeadRow] = []
    for pair in enumerate(attention_layers(source)):
        with threads(1):
            for part in layer_moments([pair], [pair[1]], Work(options.raw)):
                rows.extend(head_rows(part, options))
    return rows


@pytest.mark.parametrize("live", [True, False], ids=["live", "from disk"])
def test_workers_and_joined_layers_change_no_number(
    live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = model()
    built.save_pretrained(tmp_path)
    source = built if live else tmp_path
    options = ScanOptions(eigenvalues=True, details=True)
    apart = one_by_one(source, options)
    monkeypatch.setattr(module, "FEW", 0)
    seen: list[str] = []
    moments = module._moments
    monkeypatch.setattr(module, "_moments", lambda *a, **k: seen.append(current()) or moments(*a, **k))
    for together in (module.TOGETHER, 2 * 8 * 8 * 8, 1):  # four layers in one record, two, one
        monkeypatch.setattr(module, "TOGETHER", together)
        with threads(4):
            rows = locater.scan(source, eigenvalues=True, details=True).rows
            assert torch.get_num_threads() == 4
        assert [(row.layer, row.head) for row in rows] == [(i, j) for i in range(4) for j in range(8)]
        for row, other in zip(rows, apart, strict=True):
            assert_close(row, other)
    assert all(name.startswith("ThreadPoolExecutor") for name in seen)
    assert len(seen) == 12


def current() -> str:
    import threading

    return threading.current_thread().name


def assert_close(row: HeadRow, other: HeadRow) -> None:
    assert (row.flags, row.approximation, row.kind, row.scale) == (
        *(other.flags, other.approximation, other.kind, other.scale),
    )
    for name in locater.results.scan.NUMERIC_COLUMNS:
        assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name
    assert torch.tensor(row.eigenvalues) == pytest.approx(torch.tensor(other.eigenvalues), rel=1e-4, abs=1e-6)
    assert row.drive is not None
    assert other.drive is not None
    assert row.drive["even"] == pytest.approx(other.drive["even"], rel=1e-5, abs=1e-7)


def test_small_blocks_have_the_products_of_the_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED", 1)
    built = model()
    pairs = list(enumerate(attention_layers(built)))
    parts = list(layer_moments(pairs, [layer for _, layer in pairs], Work()))
    assert [number for part in parts for number, _ in part.layers] == [0, 1, 2, 3]
    whole = [effective(layer).moments() for _, layer in pairs]
    for name in ("trace", "trace_of_square", "frobenius_sq", "symmetric_cube"):
        joined = torch.cat([getattr(part.moments, name) for part in parts])
        assert torch.equal(joined, torch.cat([getattr(m, name) for m in whole])), name


@pytest.mark.parametrize("arrived", [False, True], ids=["on the CPU", "as from a GPU"])
def test_a_head_that_needs_float64_stays_apart_from_the_others(arrived: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second layer queries and keys use nearly separate channels: W is much smaller than its factors. On a GPU this is
    seen when the numbers of several layers have arrived.
    """
    if arrived:
        monkeypatch.setattr(spectrum, "_needs_double", lambda *_: False)
    built = model()
    attention = built.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight.view(8, 8, 64)[:, 4:] *= 1e-5
        attention.k_proj.weight.view(2, 8, 64)[:, :4] *= 1e-5
    pairs = list(enumerate(attention_layers(built)))
    parts = list(layer_moments(pairs, [layer for _, layer in pairs], Work()))
    assert [[number for number, _ in part.layers] for part in parts] == [[0], [1], [2, 3]]
    assert [part.moments.query_gram.dtype for part in parts] == [torch.float32, torch.float64, torch.float32]
    rows = locater.scan(built).rows
    gain = built.model.layers[1].input_layernorm.weight.double()
    q = (attention.q_proj.weight.double() * gain).view(8, 8, 64)
    k = (attention.k_proj.weight.double() * gain).view(2, 8, 64).repeat_interleave(4, 0)
    expected = (q @ k.mT).diagonal(dim1=-2, dim2=-1).sum(-1).tolist()
    assert [row.trace for row in rows if row.layer == 1] == pytest.approx(expected, rel=1e-9)
    assert len(rows) == 32


def test_layers_of_several_scales_and_kinds_keep_their_own() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 32, "vocab_size": 40}
    built = T5ForConditionalGeneration(T5Config(**shape))
    rows = locater.scan(built).rows
    assert len({(row.layer, row.head) for row in rows}) == len(rows) == 4 * 6
    kinds = [rows[4 * i].kind for i in range(6)]
    assert kinds == ["self", "self", "self", "cross", "self", "cross"]
    assert all((row.trace is None) == (row.kind == "cross") for row in rows)


def test_the_caller_keeps_its_threads_when_a_layer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW", 0)

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(module, "_moments", broken)
    with threads(4):
        with pytest.raises(ValueError, match="no"):
            locater.scan(model())
        assert torch.get_num_threads() == 4
