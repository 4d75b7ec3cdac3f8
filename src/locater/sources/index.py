"""The index of a checkpoint in several files, and names of such files: parts are never read as the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from locater.errors import LocaterError


def shards_of(document: Any, where: str) -> dict[str, str]:
    """The shard of each tensor, as an index gives it; every shard has to be in the folder of the index."""
    shard_of = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(x, str) for x in shard_of.values()):
        raise LocaterError(
            f"{where}: not an index (weight_map does not give the shard of each tensor): download it again"
        )
    for shard in sorted(set(shard_of.values())):
        if not _inside(shard):
            raise LocaterError(f"{where}: names the shard {shard!r:.80}, which is not in its folder: refused")
    return shard_of


def refuse_lost(shard_of: dict[str, str], names: Iterable[str], where: str) -> None:
    """Refuse an index that names tensors which are in no shard."""
    there = set(names)
    lost = [name for name in shard_of if name not in there]
    if lost:
        raise LocaterError(
            f"{where}: names the tensor {lost[0]}, which is not in {shard_of[lost[0]]} ({len(lost)} missing)"
        )


def refuse_one_of_many(document: Any, file: str, index: str, where: str, folder: str) -> None:
    """A single shard would be read as a model with fewer layers, and without the norms in other shards."""
    shard_of = document.get("weight_map") if isinstance(document, dict) else None
    shards = {x for x in shard_of.values() if isinstance(x, str)} if isinstance(shard_of, dict) else set()
    if file in shards and len(shards) > 1:
        raise LocaterError(f"{where}: one of the {len(shards)} shards of {index}: give the folder {folder}")


def refuse_missing_shards(files: Iterable[str], where: str) -> None:
    """Files named `model-00002-of-00003` are read only together with all others of the set."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in files:
        if match := re.fullmatch(r"(.*)-(\d{1,6})-of-(\d{1,6})", PurePosixPath(name).stem, re.ASCII):
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in sets.items():
        if len(numbers) < count:
            raise LocaterError(
                f"{where}: {len(numbers)} of the {count} shards {stem}-*-of-{count:05}: give the folder with all"
            )


def _inside(shard: str) -> bool:
    """Whether the path of a shard stays inside the folder of its index, on every operating system."""
    parts = PureWindowsPath(shard).parts  # splits at both kinds of slash, and knows drives
    return bool(parts) and ".." not in parts and not PureWindowsPath(shard).anchor and "\0" not in shard
