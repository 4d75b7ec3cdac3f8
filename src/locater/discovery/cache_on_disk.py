"""What was discovered from a config.json, kept on disk: names, rows and numbers, no weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from locater.discovery.carried_layouts import SearchResult
from locater.discovery.layout_json import from_json, to_json
from locater.discovery.verified_search import Refusal
from locater.errors import LocaterError
from locater.files import read_json, write_whole
from locater.layers.layout import AttentionLayout
from locater.sources.renamed_weights import TensorOrigin
from locater.sources.weights import Weights, quantised_names
from locater.version import __version__, code_version

VARIABLE = "LOCATER_CACHE"
# rooms whose code decides what is discovered
CODE = (
    *("calls", "discovery", "families", "kernels", "layers", "numerics"),
    *("sources", "spectrum", "theory", "torch_private"),
)


@dataclass(frozen=True)
class CachedLayouts:
    """Layouts by names of the model, and where its tensors are in the checkpoint."""

    searched: SearchResult
    origins: dict[str, TensorOrigin]


def cache_folder() -> Path | None:
    """Where files are kept; None where nothing is."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return None if given.strip().lower() in ("", "off", "0") else Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "locater"
    except RuntimeError:  # no home
        return None


def cache_file(weights: Weights, config: Mapping[str, Any]) -> Path | None:
    """The file of a checkpoint; None where nothing is kept."""
    folder = cache_folder()
    if folder is None:
        return None
    formats = quantised_names(weights)  # the shape of a packed map would be read from the file, one by one
    tensors = sorted(
        (name, [formats[name]] if name in formats else list(weights.shape(name))) for name in weights.names()
    )
    try:
        library = version("transformers")
    except PackageNotFoundError:
        return None
    facts = [__version__, code_version(*CODE), torch.__version__, library, config, tensors]
    text = json.dumps(facts, sort_keys=True, default=repr)
    return folder / f"discovered-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_cached(path: Path | None) -> CachedLayouts | None:
    """What a file holds; None where there is none, or none that can be read."""
    if path is None:
        return None
    try:
        document = read_json(path)
        searched = SearchResult(
            [_layout(layout) for layout in document["layouts"]],
            [Refusal(str(name), str(reason)) for name, reason in document["refused"]],
            [str(name) for name in document["unreached"]],
        )
        origins = {
            name: TensorOrigin(tuple(names), from_json(rows)) for name, (names, rows) in document["origins"].items()
        }
    except (LocaterError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return CachedLayouts(searched, origins)


def write_cached(path: Path | None, content: CachedLayouts) -> None:
    """Write a file. A folder that cannot be written to is no error: the next call discovers again."""
    if path is None:
        return
    searched = content.searched
    document = {
        "layouts": [to_json(layout) for layout in searched.layouts],
        "refused": [[refusal.name, refusal.reason] for refusal in searched.refused],
        "unreached": searched.unreached,
        "origins": {name: [origin.names, to_json(origin.rows)] for name, origin in content.origins.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(document))
    except (OSError, LocaterError):
        return


def _layout(document: Any) -> AttentionLayout:
    layout = from_json(document)
    if not isinstance(layout, AttentionLayout):
        raise TypeError("not a layout")
    return layout
