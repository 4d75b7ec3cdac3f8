"""Checkpoints of this machine as a list: what a pattern matches, and what tells that a checkpoint has changed."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from locater.errors import LocaterError
from locater.files import read_json, regular_file
from locater.sources.adapter_folder import ADAPTERS, base_on_this_machine
from locater.sources.adapter_folder import SETTINGS as ADAPTER
from locater.sources.index import shards_of

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".distcp")
# where these are in a folder, nothing but safetensors is read from it: optimizers and other states do not count
SAFE = ("model.safetensors", "model.safetensors.index.json")
SETTINGS = ("config.json", ADAPTER)
SAMPLE = 1 << 16  # bytes at the beginning and at the end of a file that count among its identity
METADATA = ".metadata"  # of torch.distributed.checkpoint
GLOB = frozenset("*?[")


@dataclass(frozen=True)
class Matched:
    """Sources that a pattern matches, and what else it matched."""

    sources: list[str]
    skipped: list[str]  # files that are no weights, folders without any


def expand(pattern: str) -> Matched:
    """The checkpoints that a pattern such as `run/step-*` matches, as absolute paths in their order.

    A name without `*`, `?` or `[` is taken as it is, whether it can be read or not.
    """
    if os.path.lexists(pattern):
        _refuse_a_folder_of_checkpoints(Path(pattern))
        return Matched([os.path.abspath(pattern)], [])
    if not GLOB & set(pattern):
        return Matched([os.path.abspath(pattern)], [])
    found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise LocaterError(f"{pattern}: matches nothing: no checkpoint has such a name")
    sources = [os.path.abspath(path) for path in found if holds_weights(Path(path))]
    skipped = [path for path in found if not holds_weights(Path(path))]
    if not sources:
        raise LocaterError(f"{pattern}: matches no checkpoint (it matches {', '.join(skipped[:4])}, without weights)")
    return Matched(sources, skipped)


def holds_weights(path: Path) -> bool:
    """Whether a path is a file of weights, or a folder that has one."""
    if os.path.isdir(path):
        return any(_weights_in(path))
    return path.suffix in WEIGHTS or path.name.endswith(".index.json")


def _weights_in(folder: Path) -> Iterator[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise LocaterError(f"{folder}: cannot be read ({error.strerror})") from None
    return (name for name in names if name.endswith(WEIGHTS) and not name.startswith("."))


def _refuse_a_folder_of_checkpoints(path: Path) -> None:
    if not os.path.isdir(path) or any(_weights_in(path)):
        return
    inner = [name for name in sorted(os.listdir(path)) if os.path.isdir(path / name) and any(_weights_in(path / name))]
    if inner:
        raise LocaterError(
            f"{path}: has no weights of its own, and {len(inner)} folders with weights: give '{path / '*'}' to read "
            f"them, or one of them, such as {path / inner[0]}"
        )


def identity(source: str) -> str:
    """What changes when a checkpoint changes: names, sizes, times and both ends of its files, as a digest."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files_of(Path(source)):
        size = regular_file(path)
        try:
            status = os.stat(path)
            digest.update(f"{path.name}\0{size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
            with open(path, "rb") as file:
                digest.update(file.read(SAMPLE))
                file.seek(max(0, size - SAMPLE))
                digest.update(file.read(SAMPLE))
        except OSError as error:
            raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None
    return f"local:{digest.hexdigest()}"


def size_of(source: str) -> int:
    """Bytes of the weights of a source."""
    return sum(regular_file(path) for path in files_of(Path(source)))


def files_of(path: Path, adapters: tuple[str, ...] = ()) -> list[Path]:
    """The files that the numbers of a source can depend on; the base of an adapter is among them."""
    if not os.path.lexists(path):
        raise LocaterError(f"{path}: no such file or folder (a model of the hub is hf://org/model)")
    if not os.path.isdir(path):
        regular_file(path)
        beside = [path.parent / "config.json"]
        if path.name.endswith(".index.json"):
            beside += [*(path.parent / name for name in _weights_in(path.parent)), *_shards_below(path)]
        return [path, *(other for other in beside if os.path.lexists(other))]
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None
    files = [path / name for name in names if name in SETTINGS]
    ends = (".safetensors", ".safetensors.index.json") if {*SAFE} & {*names} else (*WEIGHTS, ".index.json", METADATA)
    files += [path / name for name in names if name.endswith(ends)]
    files += [shard for file in files if file.name.endswith(".index.json") for shard in _shards_below(file)]
    if METADATA in names and "config.json" not in names and os.path.lexists(path.parent / "config.json"):
        files.append(path.parent / "config.json")  # of a folder of torch.distributed.checkpoint
    if (path / ADAPTER) in files:
        settings = read_json(path / ADAPTER)
        base = base_on_this_machine(settings, path) if isinstance(settings, dict) else None
        adapters = (*adapters, os.path.realpath(path))
        if base is not None and os.path.realpath(base) not in adapters and len(adapters) <= ADAPTERS:
            files += files_of(base, adapters)
    return files


def _shards_below(index: Path) -> list[Path]:
    """The shards of an index that are in folders below its own; none of a damaged one, which is refused when read."""
    try:
        shards = {*shards_of(read_json(index), str(index)).values()}
    except LocaterError:
        return []
    return [index.parent / shard for shard in sorted(shards) if "/" in shard and os.path.lexists(index.parent / shard)]
