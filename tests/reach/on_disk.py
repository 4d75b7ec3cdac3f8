"""A model saved to disk and read back from there, beside the same model alive."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.checkpoints.sources import open_source
from locater.families.discovery.cache import VARIABLE
from locater.families.discovery.disk import discovered_on_disk
from locater.families.discovery.searching import Discovered
from locater.families.layer import AttentionLayer, Projection

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


def discovered_from(folder: str | Path) -> Discovered:
    """What is discovered from a folder, also where its architecture has a record."""
    return discovered_on_disk(*open_source(folder))


def differences(one: AttentionLayer, other: AttentionLayer) -> list[str]:
    """Names of the fields that differ between two layers: maps, norms, positions, biases, sinks, gates, numbers and
    reasons. Tensors have to be equal, as they are the same numbers.
    """
    names = [field.name for field in fields(AttentionLayer) if field.name not in ("index", "provenance")]
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
