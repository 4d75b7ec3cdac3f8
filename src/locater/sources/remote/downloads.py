"""Whole files, for what cannot be read by ranges: pickles, GGUF, and servers without ranges."""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from locater.sources.index import shards_of
from locater.sources.remote.address import Address
from locater.sources.remote.folders import HubFolder
from locater.sources.remote.hub import asked
from locater.sources.remote.ranged import RemoteFolder, has, remote_json
from locater.sources.weights import Weights

logger = logging.getLogger("locater")
SETTINGS = ("config.json", "adapter_config.json")
STEMS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")


def announce(address: Address, what: str) -> None:
    """One line before something is downloaded that a user may expect to be read by ranges."""
    logger.warning("%s: %s, so all of it is downloaded", address, what)


def downloaded(folder: RemoteFolder, names: Sequence[str]) -> Path:
    """A local folder with these files: in the hub's cache, or a temporary one (`remove_with`)."""
    if isinstance(folder, HubFolder):
        return _from_hub(folder, names)
    place = Path(tempfile.mkdtemp(prefix="locater-"))
    try:
        for name in names:
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.file(name).save(target)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return place


def remove_with(weights: Weights, place: Path) -> None:
    """Remove a temporary folder when its weights are not used any more."""
    if place.name.startswith("locater-") and place.parent == Path(tempfile.gettempdir()):
        weakref.finalize(weights, shutil.rmtree, place, ignore_errors=True)


def _from_hub(folder: HubFolder, names: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    address, commit = folder.address, folder.model.commit
    paths = [address.inside(name).path for name in names]
    return (
        Path(asked(address, lambda: snapshot_download(address.root, revision=commit, allow_patterns=paths)))
        / address.path
    )


def checkpoint_files(folder: RemoteFolder) -> list[str]:
    """The files of a checkpoint that are read: settings, and weights in the form that comes first."""
    listed = folder.names()
    if listed is not None:
        return [name for name in listed if name in SETTINGS] + _first_form(listed)
    settings = [name for name in SETTINGS if has(folder, name)]
    for stem in STEMS:
        index = remote_json(folder, f"{stem}.index.json", unique=True)
        if index is not None:
            shards = shards_of(index, str(folder.address.inside(f"{stem}.index.json")))
            return [*settings, f"{stem}.index.json", *sorted(set(shards.values()))]
        if has(folder, stem):
            return [*settings, stem]
    return settings


def _first_form(names: Iterable[str]) -> list[str]:
    for end in (".safetensors", ".bin"):
        weights = [name for name in names if name.endswith((end, f"{end}.index.json"))]
        if any(name.endswith(end) for name in weights):
            return weights
    return []
