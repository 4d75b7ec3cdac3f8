"""A model saved to disk and read back from there, beside the same model alive."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import locater
from locater.calls.attention_like import NUMBER
from locater.discovery.cache_on_disk import VARIABLE
from locater.discovery.from_config_json import discovered_on_disk
from locater.discovery.verified_search import Discovered
from locater.layers.layer import AttentionLayer, Projection
from locater.sources.open_source import open_source

MOST_APART = 6  # layers that are named
UNKNOWN = ("unknown_scale", "unknown_logits", "unknown_mask", "unknown_output")


class NotSavedError(Exception):
    """Why transformers refuses to save a tiny model: some configurations run and are not valid."""


@contextlib.contextmanager
def saved(model: nn.Module) -> Iterator[str]:
    """A folder with the model, as `save_pretrained` writes it. What is discovered in it is kept beside it."""
    with tempfile.TemporaryDirectory() as place, _cache_in(f"{place}/cache"):
        try:
            model.save_pretrained(f"{place}/model")  # type: ignore[operator]
        except Exception as error:
            line = " ".join(str(error).split())  # what is wrong with a configuration is in the second line
            raise NotSavedError(f"{type(error).__name__}: {line}") from None
        yield f"{place}/model"


def from_disk(folder: str, live: Discovered) -> dict[str, Any]:
    """Layers discovered from a saved copy, and how many are those of the live model, number by number; what differs in
    the others, and layers that only one of the two has.
    """
    stored = discovered_from(folder)
    verified = sum(all(getattr(layer, name) is None for name in UNKNOWN) for layer in stored.layers)
    left, apart, same = list(stored.layers), [], 0
    for layer in live.layers:
        candidates = [other for other in left if other.name == layer.name]
        found = [differences(layer, other) for other in candidates]
        if [] in found:
            same += 1
            left.remove(candidates[found.index([])])
        else:
            apart.append(f"{layer.name}: {', '.join(min(found, key=len)) if found else 'not from disk'}")
    counts = {"layers": len(stored.layers), "verified": verified, "live": len(live.layers), "same": same}
    return {**counts, **({"apart": apart[:MOST_APART]} if apart else {})}


NUMBERS = ("trace", "trace_of_square", "frobenius_sq", "symmetric_sq", "spectral_norm")


def scans_of(model: nn.Module, inputs: Mapping[str, Tensor], folder: str) -> dict[str, Any]:
    """The way of a user: `locater.scan` of the live model beside `locater.scan` of the saved folder. `rows` and `same`
    of them, and layers whose numbers differ (`apart`), those without a line about it in either scan counted (`silent`).

    Layers are paired by name; where none has a name of the other, as on disk under a record, by their order.
    """
    live, stored = locater.scan(model, example=dict(inputs)), locater.scan(folder)
    ours, theirs = _rows_by_layer(live), _rows_by_layer(stored)
    if ours.keys().isdisjoint(theirs):
        theirs = dict(zip(ours, theirs.values(), strict=False))
    text = "\n".join([*live.assumptions["notes"], *stored.assumptions["notes"]])
    same, apart = 0, []
    for name, rows in ours.items():
        alike_rows = sum(map(_same_numbers, rows, theirs.get(name, [])))
        same += alike_rows
        if alike_rows < len(rows):
            apart.append(name)
    silent = [name for name in apart if name not in text and NUMBER.sub("*", name) not in text]
    counts = {"rows": len(live.rows), "stored": len(stored.rows), "same": same}
    named = {"apart": apart[:MOST_APART], "silent": len(silent)} if apart else {}
    return {**counts, **named}


def _rows_by_layer(scan: locater.Scan) -> dict[str, list[Any]]:
    """Rows by the name of their layer; a layer that is called in two ways has all of them under one name."""
    names = {entry["layer"]: str(entry["name"]) for entry in scan.layers}
    rows: dict[str, list[Any]] = {}
    for row in scan.rows:
        rows.setdefault(names[row.layer], []).append(row)
    return rows


def _same_numbers(one: Any, other: Any) -> bool:
    """Whether two rows say the same of W: both have a number or neither, and they agree to 1e-4 of the size of W."""
    for name in NUMBERS:
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None):
            return False
        if a is not None and abs(a - b) > 1e-4 * max(
            abs(a), abs(b), one.frobenius_sq**0.5 if name == "trace" else one.frobenius_sq
        ):
            return False
    return one.kind == other.kind


def with_gains(model: nn.Module) -> nn.Module:
    """The model with gains and biases as training may leave them: with 1 and 0 a norm that is left out does not show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((0.3 * noise).to(parameter))
    return model


def discovered_from(folder: str | Path) -> Discovered:
    """What is discovered from a folder, also where its architecture has a record."""
    return discovered_on_disk(*open_source(folder))


def differences(one: AttentionLayer, other: AttentionLayer) -> list[str]:
    """Names of the fields that differ between two layers: maps, norms, positions, biases, sinks, gates, numbers and
    reasons. Tensors have to be equal, as they are the same numbers.
    """
    names = [
        field.name for field in fields(AttentionLayer) if field.name not in ("index", "provenance", "inputs_matter")
    ]
    return [name for name in names if not _alike(getattr(one, name), getattr(other, name))]


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are equal, part by part. Maps are compared by their weights."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Projection):
        return _equal(a.weight(), b.weight()) and _alike(a.bias, b.bias)
    if is_dataclass(a):
        return all(_alike(getattr(a, part.name), getattr(b, part.name)) for part in fields(a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return _close(a, b)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-6 * abs(a) or (a != a and b != b)  # a scale that is not known is NaN
    return bool(a == b)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9)


@contextlib.contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = folder
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
