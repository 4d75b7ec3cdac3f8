"""A model saved to disk and read back from there, beside the same model alive."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.checkpoints.sources import open_source
from locater.errors import first_line
from locater.families.discovery.cache import VARIABLE
from locater.families.discovery.disk import discovered_on_disk
from locater.families.discovery.searching import Discovered
from locater.families.layer import AttentionLayer

NUMBERS = ("heads", "kv_heads", "head_dim", "scale", "softcap", "causal", "window", "chunk", "kind", "norm_last")
UNKNOWN = ("unknown_scale", "unknown_logits", "unknown_mask", "unknown_output")


def from_disk(model: nn.Module, live: Discovered) -> dict[str, Any]:
    """Layers discovered from a saved copy, and how many are those of the live model, number by number. Some tiny
    configurations run, and transformers refuses to save them: `not_saved` says why.
    """
    with tempfile.TemporaryDirectory() as folder, _no_cache():
        try:
            model.save_pretrained(folder)  # type: ignore[operator]
        except Exception as error:
            return {"not_saved": f"{type(error).__name__}: {first_line(error)}"[:200]}
        stored = discovered_from(folder)
        layers = {layer.name: layer for layer in stored.layers}
        same = sum(layer.name in layers and not differences(layer, layers[layer.name]) for layer in live.layers)
        verified = sum(all(getattr(layer, name) is None for name in UNKNOWN) for layer in stored.layers)
    return {"layers": len(layers), "verified": verified, "live": len(live.layers), "same": same}


def discovered_from(folder: str | Path) -> Discovered:
    """What is discovered from a folder, also where its architecture has a record."""
    return discovered_on_disk(*open_source(folder))


def differences(one: AttentionLayer, other: AttentionLayer) -> list[str]:
    """What differs between two layers; tensors have to be equal, as they are the same numbers."""
    names = [name for name in (*NUMBERS, *UNKNOWN) if not _close(getattr(one, name), getattr(other, name))]
    for name in ("query", "key", "value", "out"):
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None) or (
            a is not None and not (_equal(a.weight(), b.weight()) and _equal(a.bias, b.bias))
        ):
            names.append(name)
    for name in ("norm", "memory_norm", "query_norm", "key_norm"):
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None) or (a is not None and not _same_norm(a, b)):
            names.append(name)
    a, b = one.rotary, other.rotary
    if (a is None) != (b is None) or (a is not None and b is not None and not _equal(a.frequencies, b.frequencies)):
        names.append("rotary")
    return names


def _same_norm(a: Any, b: Any) -> bool:
    return a.kind == b.kind and _close(a.eps, b.eps) and _equal(a.gain, b.gain) and _equal(a.bias, b.bias)


def _close(a: Any, b: Any) -> bool:
    return abs(a - b) <= 1e-6 * abs(a) if isinstance(a, float) and isinstance(b, float) else a == b


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9)


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "off"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
