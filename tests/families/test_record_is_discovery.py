"""Every record against discovery on the same saved model: both say where the heads are, and have to say the same.

The record reads a folder, then discovery reads it with all records taken out. Compared are the rows of the scans, column
by column; of each layer its numbers, norm, biases, mask, logits and output on the same tokens; and the layouts, name by
name, row by row. What differs stands in DIFFERENCES and LAYOUTS, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.discovery import record_or_discovery
from locater.errors import LocaterError
from locater.families.registry import BUILT_IN
from locater.layers import AttentionLayer
from locater.layers.map_layouts import numbers_in
from locater.results.scan import NUMERIC_COLUMNS, Scan
from locater.sources.open_source import open_source
from tests.families import CASES, decoders
from tests.families.decoders import GEMMA, make_gpt2
from tests.families.torch_modules import stream
from tests.parity import Case, decoder_sites, model_of, tokens

NEAR = 1e-9  # relative; of logits and outputs, to their standard deviation
TOKENS, MEMORY = 9, 7
# columns of the maps alone, which the scale is no part of
OF_MAPS = {"trace", "trace_of_square", "frobenius_sq", "symmetric_sq", "mean", "variance", "spectral_norm"}


def deeper(label: str, name: str, layers: int, **settings: Any) -> Case:
    """More layers than the small model that discovery runs."""
    return decoders.case(label, name, num_hidden_layers=layers, **settings)


DEEP = [
    deeper("llama-deep", "Llama", 5, rope_parameters=decoders.LLAMA3, attention_bias=True),
    deeper("qwen2-deep", "Qwen2", 4, use_sliding_window=True, sliding_window=9, max_window_layers=2),
    deeper("gemma3-deep", "Gemma3", 7, **GEMMA, sliding_window=6),
    deeper("gemma2-deep", "Gemma2", 4, **GEMMA, sliding_window=5),
    deeper("olmo3-deep", "Olmo3", 5, sliding_window=5),
    deeper("cohere2-deep", "Cohere2", 5, sliding_window=5),
    Case("gpt2-deep", lambda: make_gpt2(n_layer=6), tokens, decoder_sites(6)),
]
EVERY = [*CASES, *DEEP]
QUICK = ("llama", "gpt2", "falcon", "deepseek_v2", "gemma3-deep", "bert", "t5", "vit")


@dataclass(frozen=True)
class Both:
    """A model as its record and as discovery read it."""

    record: list[AttentionLayer]
    found: list[AttentionLayer]
    record_scan: Scan
    found_scan: Scan
    record_layouts: Sequence[Any]
    found_layouts: Sequence[Any]


def read_twice(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Both:
    """From disk where transformers knows the class, else alive."""
    model = model_of(case)
    source, options = _saved(case, model, folder)
    record, record_scan = locater.attention_layers(source, **options), locater.scan(source, **options)
    record_layouts = record_or_discovery.read_source(*open_source(source), **options).found
    monkeypatch.setattr(record_or_discovery, "reader_for", _no_record)
    monkeypatch.setenv("LOCATER_CACHE", str(folder / "cache"))
    example = _example(case) if source is model else None
    found = locater.attention_layers(source, example=example)
    scan = locater.scan(source, example=example)
    found_layouts = record_or_discovery.read_source(*open_source(source), example=example).found
    assert {layer.provenance for layer in found} == {"discovered"}
    return Both(record, found, record_scan, scan, record_layouts, found_layouts)


def _example(case: Case) -> dict[str, Tensor] | None:
    """Arguments of the model; None where the case calls it in its own way, and they can be guessed."""
    if case.label == "torch-attention":
        return dict.fromkeys(("query", "key", "value"), stream())
    return case.batch() if case.call is None else None


def _no_record(*_: Any) -> Any:
    raise LocaterError("all records are taken out")


def _saved(case: Case, model: nn.Module, folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import CONFIG_MAPPING

    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in CONFIG_MAPPING:
        return model, {}
    (folder / "model").mkdir()
    (case.save or (lambda model, place: model.save_pretrained(place)))(model, folder / "model")
    return folder / "model", case.options


def differences(both: Both, near: float) -> tuple[set[str], set[str]]:
    """What differs between the two readings, in words, and the fields of the layouts that do."""
    names, others = ([layer.name for layer in layers] for layers in (both.record, both.found))
    found = {"number of layers"} if len(names) != len(others) else set()
    if not found and names != others:
        found |= {"order" if sorted(names) == sorted(others) else "names"}
    left, fields_apart = list(range(len(both.found))), set()
    for number, layer in enumerate(both.record):
        alike = [n for n in left if _same_size(layer, both.found[n])]  # names may be others on disk
        apart = {n: set(_apart(both, number, n, near)) for n in alike}
        nearest = min(alike, key=lambda n: len(apart[n]))
        left.remove(nearest)
        found |= apart[nearest]
        layouts = both.record_layouts[number], both.found_layouts[nearest]
        fields_apart |= set(layout_fields_apart(*layouts, near, named=names == others or "order" in found))
    return found, fields_apart


# where a layer was found, and which of two factors a scale was split into, is no part of where its heads are
NOT_COMPARED = ("index", "provenance", "product_scale")


def layout_fields_apart(one: Any, other: Any, near: float, named: bool, field: str = "") -> Iterator[str]:
    """Fields of two layouts that differ. Names are compared where the model has those of the file (`named`)."""
    if is_dataclass(one) and type(one) is type(other):
        for part in fields(one):
            if part.name not in NOT_COMPARED:
                values = getattr(one, part.name), getattr(other, part.name)
                yield from layout_fields_apart(*values, near, named, f"{field}.{part.name}".removeprefix("."))
    elif not _same_value(one, other, near, named):
        yield field


def _same_value(one: Any, other: Any, near: float, named: bool) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        if one and isinstance(one[0], range):
            return numbers_in(one) == numbers_in(other)
        return len(one) == len(other) and all(_same_value(*two, FLOAT32, named) for two in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=near)
    return bool(one == other) or (not named and isinstance(one, str) and isinstance(other, str))


@torch.no_grad()
def _same_size(one: AttentionLayer, other: AttentionLayer) -> bool:
    """Whether two layers have the same values, or the same name where these are not known."""
    assert one.value is not None
    if other.value is None:
        return one.name == other.name
    return math.isclose(one.value.weight().norm(), other.value.weight().norm(), rel_tol=NEAR)


def _apart(both: Both, number: int, other: int, near: float) -> Iterator[str]:
    yield from _layers_apart(both.record[number], both.found[other], near)
    rows = [row for row in both.record_scan.rows if row.layer == number]
    others = [row for row in both.found_scan.rows if row.layer == other]
    columns = {
        name
        for one, two in zip(rows, others, strict=True)
        for name in NUMERIC_COLUMNS
        if not _close(one[name], two[name], near)
    }
    alone = {"scale", "localization"}
    yield from columns & alone if columns <= OF_MAPS | alone else ()
    if columns - alone:
        yield "columns of maps" if columns <= OF_MAPS | alone else "columns"


def _close(one: float | None, other: float | None, near: float) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=near, abs_tol=near)


@torch.no_grad()
def _layers_apart(one: AttentionLayer, other: AttentionLayer, near: float) -> Iterator[str]:
    for name in ("heads", "kv_heads", "head_dim", "width", "kind", "window", "chunk", "softcap"):
        if getattr(one, name) != getattr(other, name):
            yield name
    if one.norm.kind != other.norm.kind:
        yield "norm"
    if type(one.bias) is not type(other.bias) or type(one.relative) is not type(other.relative):
        yield "positions"
    cross = one.kind == "cross"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS, one.width, generator=generator, dtype=torch.float64)
    memory = torch.randn(2, MEMORY, one.key.shape[1], generator=generator, dtype=torch.float64) if cross else None
    sizes = (20, 20) if not cross else (TOKENS, MEMORY)
    if other.unknown_mask is not None or not torch.equal(one.visible(*sizes), other.visible(*sizes)):
        yield "mask"
    if other.unknown_logits is not None:
        yield "logits unknown"
    elif not _alike(
        one.logits(x, memory), other.logits(x, memory), one.visible(TOKENS, MEMORY if cross else TOKENS), near
    ):
        yield "logits"
    if other.unknown_output is not None:
        yield "output unknown"
    elif not _alike(one.output(x, memory), other.output(x, memory), torch.ones(1, dtype=torch.bool), near):
        yield "output"


def _alike(one: Tensor, other: Tensor, where: Tensor, near: float) -> bool:
    where = where.expand(one.shape)
    return bool((one - other)[where].abs().max() <= near * one[where].std())


FLOAT32 = 1e-6  # amplitudes are read from cosines in float32, as are the scales of logits that are float32
DEBERTA = [case.label for case in CASES if case.label.startswith("deberta")]
COARSE = ("llama-rope-yarn", "gpt_oss", "phi3-longrope", "deepseek_v3-yarn-biased", *DEBERTA)
AMPLITUDE = {"scale", "columns of maps"}
UNKNOWN = {"positions", "logits unknown", "output unknown"}
DIFFERENCES: dict[str, tuple[set[str], str]] = {
    **dict.fromkeys(
        ("llama-rope-yarn", "gpt_oss", "phi3-longrope"),
        (AMPLITUDE, "all channels turn, so that the amplitude of the rotation counts as a part of the scale"),
    ),
    **dict.fromkeys(
        ("vit", "gemma3-composite"), ({"names"}, "the record has the names on disk, discovery those of the live model")
    ),
    **dict.fromkeys(
        ("dinov2", "dinov2_with_registers"),
        ({"names", "output"}, "names; and the factors of channels behind the output map"),
    ),
    **dict.fromkeys(("timm", "timm-rms"), ({"output"}, "the factors of channels behind the output map")),
    **dict.fromkeys(
        ("clip", "siglip", "torch-transformer-pre", "torch-transformer-post"),
        ({"order"}, "the record has the order of the tensors, discovery that of the calls"),
    ),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "t5-encoder", "mpnet"),
        ({"positions"}, "the record has the rule of the buckets, discovery the rows that the example's distances read"),
    ),
    "falcon-alibi": ({"positions"}, "the record rounds by the position of the key, which no short example shows"),
    "falcon-alibi-rounded": (UNKNOWN, "slopes that are rounded by position are no slopes"),
    **dict.fromkeys(("xlnet", "xlnet-causal-clamped"), (UNKNOWN, "keys of distances are computed from a sinusoid")),
    **dict.fromkeys(DEBERTA, (UNKNOWN, "distances have keys and queries of their own")),
    **dict.fromkeys(
        ("albert", "albert-inner"),
        ({"number of layers"}, "a module at several depths is one layer for the record; the first depth reads no norm"),
    ),
    "albert-groups": (
        {"number of layers", "columns", "logits", "output"},
        "the small model has three of four depths, and in none of them the second module reads its own norm",
    ),
    "cohere2-deep": (
        {"localization"},
        "heads of few directions are drawn, and what is drawn follows the order of a head's channels",
    ),
    "bloom-slow": ({"output unknown"}, "its output map is applied in slices that are added up"),
}
ROTATION = {"logits.scale", "rotary.amplitude"}
UNREAD_TERMS = {"logits.relative", "value", "out", "unknown_logits", "unknown_output"}
LAYOUTS: dict[str, tuple[set[str], str]] = {
    **dict.fromkeys(("llama-rope-yarn", "gpt_oss", "phi3-longrope"), (ROTATION, "the amplitude counts as scale")),
    **dict.fromkeys(("dinov2", "dinov2_with_registers", "timm", "timm-rms"), ({"out.factors"}, "as above")),
    **dict.fromkeys(("t5", "mt5", "umt5", "t5-encoder", "mpnet"), ({"logits.bias"}, "a rule of buckets, or its rows")),
    "falcon-alibi": ({"logits.bias.slopes", "logits.bias.rounded"}, "as above: the factor is a part of the slopes"),
    "falcon-alibi-rounded": ({"logits.bias", *UNREAD_TERMS} - {"logits.relative"}, "as above"),
    **dict.fromkeys(("xlnet", "xlnet-causal-clamped", *DEBERTA), (UNREAD_TERMS, "as above")),
    "roberta-cross": (
        {"memory_norm", "logits.causal"},
        "keys without a norm have none or one of the kind none; a mask over distance is no part of cross-attention",
    ),
    **dict.fromkeys(
        ("cohere2", "cohere2-deep"),
        ({"query.rows", "key.rows"}, "the record orders rows for a rotation in layers without one, too"),
    ),
    **dict.fromkeys(
        ("deepseek_v2",),
        (
            {"key.parts", "key.places"},
            "rows that all heads share are put in order in the map, or where maps are joined",
        ),
    ),
    "bloom-slow": ({"value", "out", "unknown_output"}, "as above"),
}
REFUSED = {
    "cohere-normed": "a channel of its queries, keys or values mixes 8 channels",  # a gain for each channel of each head
    "stablelm-normed": "more than one norm is between its map and its queries or keys",  # one for each head
}


def _cases() -> list[Any]:
    return [
        pytest.param(case, id=case.label, marks=[] if case.label in QUICK else [pytest.mark.slow]) for case in EVERY
    ]


@pytest.mark.parametrize("case", _cases())
def test_a_record_is_what_discovery_finds(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.label in REFUSED:
        with pytest.raises(LocaterError, match=REFUSED[case.label]):
            read_twice(case, tmp_path, monkeypatch)
        return
    expected, reason = DIFFERENCES.get(case.label, (set(), ""))
    near = FLOAT32 if case.label in COARSE else NEAR
    found, fields_apart = differences(read_twice(case, tmp_path, monkeypatch), near)
    assert found == expected, reason
    expected, reason = LAYOUTS.get(case.label, (set(), ""))
    assert fields_apart == expected, reason


@pytest.mark.slow
def test_every_architecture_is_compared() -> None:
    """A new record needs a case here, which it has by its case of the parity tests."""
    types = {getattr(getattr(case.build(), "config", None), "model_type", None) for case in EVERY}
    assert set(BUILT_IN) - types == {"torch", "timm", "torchtitan"}, (
        "modules that are known by their class have no configuration"
    )
