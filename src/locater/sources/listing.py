"""Checkpoints of this machine, the hub, buckets and URLs as lists: what a pattern matches, and what shows that a
checkpoint has changed.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from locater.errors import LocaterError
from locater.files import read_json, regular_file
from locater.sources.adapter_folder import ADAPTERS, BASE, base_on_the_hub, base_on_this_machine, checked_settings
from locater.sources.adapter_folder import SETTINGS as ADAPTER
from locater.sources.remote.address import BUCKETS, WILD, Address, hub_address, remote_address
from locater.sources.remote.address import WEIGHTS as REMOTE_WEIGHTS
from locater.sources.remote.buckets import listing
from locater.sources.remote.folders import RemoteFolder, folder_of, remote_json
from locater.sources.remote.hub import hub_revisions
from locater.sources.safetensors_file import shards_of
from locater.sources.weights import natural_key

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".distcp")
# where these are in a folder, nothing but safetensors is read from it: optimizers and other states do not count
SAFE = ("model.safetensors", "model.safetensors.index.json")
SETTINGS = ("config.json", ADAPTER)
SAMPLE = 1 << 16  # bytes at the beginning and at the end of a file that count among its identity
METADATA = ".metadata"  # of torch.distributed.checkpoint
GLOB = frozenset("*?[")


# Files of this machine.


@dataclass(frozen=True)
class MatchedSources:
    """Sources that a pattern matches, and what else it matched."""

    sources: list[str]
    skipped: list[str]  # files that are no weights, folders without any


def _expand_local(pattern: str) -> MatchedSources:
    """The checkpoints that a pattern such as `run/step-*` matches, as absolute paths in their order.

    A name without `*`, `?` or `[` is taken as it is, whether it can be read or not.
    """
    if os.path.lexists(pattern):
        _refuse_a_folder_of_checkpoints(Path(pattern))
        return MatchedSources([os.path.abspath(pattern)], [])
    if not GLOB & set(pattern):
        return MatchedSources([os.path.abspath(pattern)], [])
    found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise LocaterError(f"{pattern}: matches nothing: no checkpoint has such a name")
    sources = [os.path.abspath(path) for path in found if holds_weights(Path(path))]
    skipped = [path for path in found if not holds_weights(Path(path))]
    if not sources:
        raise LocaterError(f"{pattern}: matches no checkpoint (it matches {', '.join(skipped[:4])}, without weights)")
    return MatchedSources(sources, skipped)


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


def _local_identity(source: str) -> str:
    """What changes when local files change: their names, sizes, times and both ends, as a digest."""
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


def _local_size(source: str) -> int:
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


# Both: of this machine, or remote.


def expand(pattern: str) -> MatchedSources:
    """The checkpoints that a pattern matches, each under the one name that it always has."""
    if remote_address(pattern) is None:
        return _expand_local(pattern)
    return MatchedSources([full_name(source) for source in expand_remote(pattern)], [])


def full_name(source: str) -> str:
    """The name of a checkpoint that is the same from every folder: an absolute path, or an address.

    >>> full_name("s3://bucket/run/step-10/"), full_name("/data/run/../step-10")
    ('s3://bucket/run/step-10', '/data/step-10')
    """
    address = remote_address(source)
    if address is None:
        return os.path.abspath(source)
    if address.query:
        raise LocaterError(
            f"{address}: a URL with a signature or a token after '?': it would be kept with the results and expire; "
            "give hf://, s3://, gs:// or az://, or scan it by itself"
        )
    return str(address)


def identity(source: str) -> str:
    """What changes when a checkpoint changes, as a text. Weights are not read, but for both ends of local files."""
    return _local_identity(source) if remote_address(source) is None else remote_identity(source)


def size_of(source: str) -> int | None:
    """Bytes of the files of a checkpoint; None where a server does not list them."""
    address = remote_address(source)
    if address is None:
        return _local_size(source)
    sizes = [fact.rpartition(" ")[2] for fact in folder_of(address).digests().values()]
    return sum(map(int, sizes)) if sizes and all(size.isdecimal() for size in sizes) else None


# Remote checkpoints.

SHOWN = 5  # names that a message lists


def expand_remote(pattern: str) -> list[str]:
    """The sources that match a pattern, in the order of the numbers in their names.

    `hf://org/model@step*` is every branch and tag that matches, `s3://bucket/run/step-*` (gs, az) every prefix, and
    every weights file. A name without `*`, `?` or `[` stands for itself, as do names of this machine.

    >>> expand_remote("hf://org/model@step1000"), expand_remote("org/model")
    (['hf://org/model@step1000'], ['org/model'])
    """
    address = remote_address(pattern)
    if address is None or not WILD.search(f"{address.root}{address.path}{address.revision or ''}"):
        return [pattern]
    if WILD.search(address.root) or (address.scheme == "hf" and WILD.search(address.path)):
        part = "the revision, after @," if address.scheme == "hf" else "the path"
        raise LocaterError(f"{pattern}: only {part} may have * in it")
    if address.scheme == "http":
        raise LocaterError(f"{pattern}: a plain server does not list its folders: give each URL by itself")
    matching = _revisions(address) if address.scheme == "hf" else sorted(_prefixes(address), key=natural_key)
    if not matching:
        raise LocaterError(
            f"{pattern}: no {'folder or weights file' if address.scheme in BUCKETS else 'revision'} matches"
        )
    return matching


def _revisions(address: Address) -> list[str]:
    names, wanted = hub_revisions(address), address.revision or ""
    matching = sorted((name for name in names if fnmatchcase(name, wanted)), key=natural_key)
    if not matching:
        shown = ", ".join(sorted(names, key=natural_key)[:SHOWN])
        raise LocaterError(f"{address}: no branch or tag matches (there are {len(names)}: {shown}, ...)")
    return [str(replace(address, revision=name)) for name in matching]


def _prefixes(address: Address) -> Iterator[str]:
    """Addresses that match, one part of the path after the other; each part with a wildcard is listed."""
    parts = address.path.split("/")
    at = next((i for i, part in enumerate(parts) if WILD.search(part)), None)
    if at is None:
        yield str(address)
        return
    above = replace(address, path="/".join(parts[:at]))
    there, rest = listing(above), parts[at + 1 :]
    names = (
        there.folders
        if rest
        else [*there.folders, *(name for name in there.objects if name.endswith(REMOTE_WEIGHTS[:5]))]
    )
    for name in names:
        if fnmatchcase(name, parts[at]):
            yield from _prefixes(above.inside("/".join([name, *rest])))


CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = ("model.safetensors", "adapter_model.safetensors")


def remote_identity(source: str, below: tuple[str, ...] = ()) -> str:
    """A text that is the same as long as configuration and weights of a remote checkpoint are: of two revisions with
    equal files too. It is made of the hub's sha256 of each file, or of ETag and size. No weights are read.
    """
    address = remote_address(source) or hub_address(source)
    folder = folder_of(address)
    facts = folder.digests() if folder.names() is not None else _ask_for_each_file(folder, address)
    facts = _files_read(facts, address)
    if not any(name not in (CONFIG, ADAPTER) for name in facts):
        raise LocaterError(f"{address}: no weights there")
    settings = remote_json(folder, ADAPTER) if ADAPTER in facts else None
    if settings is not None:  # an adapter is read on its base
        base = base_on_the_hub(checked_settings(settings, str(address)), str(address))
        if base in below or len(below) > ADAPTERS:
            raise LocaterError(f"{address}: an adapter on adapters that name each other, and no model below them")
        facts = {**facts, BASE: remote_identity(base, (*below, source))}
    text = "\n".join(f"{name} {fact}" for name, fact in sorted(facts.items()))
    return f"{address.scheme}:{hashlib.sha256(text.encode()).hexdigest()}"


def _files_read(facts: Mapping[str, str], address: Address) -> dict[str, str]:
    """Those of the files that a reader would open: configuration, and the weights in the form that comes first."""
    read = {name: fact for name, fact in facts.items() if name in (CONFIG, ADAPTER)}
    if address.names_a_file and not address.path.endswith(".index.json"):
        if address.name not in facts:
            raise LocaterError(f"{address}: no such file there")
        return {**read, address.name: facts[address.name]}
    for ends in ((".safetensors", ".safetensors.index.json"), (".bin", ".bin.index.json"), (".gguf",), (".pt", ".pth")):
        weights = {name: fact for name, fact in facts.items() if name.endswith(ends)}
        if weights:
            return {**read, **weights}
    return read


def _ask_for_each_file(folder: RemoteFolder, address: Address) -> dict[str, str]:
    """The files of a server that lists none, each asked for by its name."""
    names = [CONFIG, address.name] if address.names_a_file else [CONFIG, ADAPTER]
    if not address.names_a_file or address.path.endswith(".index.json"):
        index = address.name if address.names_a_file else INDEX
        document = remote_json(folder, index, unique=True)
        names += SINGLE if document is None else [index, *sorted(set(shards_of(document, str(address)).values()))]
    facts = {name: folder.file(name).facts() for name in dict.fromkeys(names)}
    return {name: f"{fact[1]} {fact[0]}" for name, fact in facts.items() if fact is not None}
