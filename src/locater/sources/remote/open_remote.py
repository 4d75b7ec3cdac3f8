"""Open a checkpoint on the hub, in a bucket or behind a URL: safetensors by ranges, other formats by download."""

from __future__ import annotations

import logging
import shutil
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.files import CONFIG_LIMIT, read_json
from locater.sources.adapter_folder import FILES, AdaptedWeights, OpenBase, checked_settings
from locater.sources.adapter_folder import SETTINGS as ADAPTER
from locater.sources.config_rules import checked_config
from locater.sources.remote.address import Address
from locater.sources.remote.folders import (
    HubFolder,
    RangedFile,
    RemoteFolder,
    folder_of,
    has_file,
    read_range,
    remote_json,
)
from locater.sources.remote.hub import UnreachableError, ask_hub
from locater.sources.remote.prefetch import current_session, recording
from locater.sources.safetensors_file import (
    HEADER_LIMIT,
    Entry,
    StoredTensors,
    parsed_header,
    refuse_lost,
    refuse_missing_shards,
    refuse_one_of_many,
    shards_of,
)
from locater.sources.weights import Weights, join_files

# Whole files, for what cannot be read by ranges: pickles, GGUF, and servers without ranges.

logger = logging.getLogger("locater")
SETTINGS = ("config.json", ADAPTER)
STEMS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")


def warn_of_download(address: Address, what: str) -> None:
    """One line before something is downloaded that a user may expect to be read by ranges."""
    logger.warning("%s: %s, so all of it is downloaded", address, what)


def download_files(folder: RemoteFolder, names: Sequence[str]) -> Path:
    """A local folder with these files: in the hub's cache, or a temporary one (`remove_when_unused`)."""
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


def remove_when_unused(weights: Weights, place: Path) -> None:
    """Remove a temporary folder when its weights are not used any more."""
    if place.name.startswith("locater-") and place.parent == Path(tempfile.gettempdir()):
        weakref.finalize(weights, shutil.rmtree, place, ignore_errors=True)


def _from_hub(folder: HubFolder, names: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    address, commit = folder.address, folder.model.commit
    paths = [address.inside(name).path for name in names]
    return (
        Path(ask_hub(address, lambda: snapshot_download(address.root, revision=commit, allow_patterns=paths)))
        / address.path
    )


def checkpoint_files(folder: RemoteFolder) -> list[str]:
    """The files of a checkpoint that are read: settings, and weights in the form that comes first."""
    listed = folder.names()
    if listed is not None:
        return [name for name in listed if name in SETTINGS] + _first_form(listed)
    settings = [name for name in SETTINGS if has_file(folder, name)]
    for stem in STEMS:
        index = remote_json(folder, f"{stem}.index.json", unique=True)
        if index is not None:
            shards = shards_of(index, str(folder.address.inside(f"{stem}.index.json")))
            return [*settings, f"{stem}.index.json", *sorted(set(shards.values()))]
        if has_file(folder, stem):
            return [*settings, stem]
    return settings


def _first_form(names: Iterable[str]) -> list[str]:
    for end in (".safetensors", ".bin"):
        weights = [name for name in names if name.endswith((end, f"{end}.index.json"))]
        if any(name.endswith(end) for name in weights):
            return weights
    return []


# Safetensors files that are elsewhere: the header first, then only the bytes that are asked for.

FIRST = 1 << 16  # bytes of the first request: most headers are shorter


class RemoteWeights(StoredTensors[RangedFile]):
    """One or several safetensors files, read by ranges; `file_of` names the file of each tensor, as for local ones."""

    def __init__(
        self, files: Sequence[RangedFile], where: str, file_of: Mapping[str, RangedFile] | None = None
    ) -> None:
        self.where = where
        self._session = current_session()
        self._heads: dict[int, bytearray] = {}  # the first bytes of each file, which may hold small tensors
        located = self._session.in_threads(self._locate_tensors, files)
        self._entries = join_files(zip(files, located, strict=True), where, file_of)

    def _locate_tensors(self, file: RangedFile) -> dict[str, tuple[RangedFile, int, Entry]]:
        """Every tensor of a file: where it begins, and its entry in the header."""
        head = read_range(file, 0, FIRST)
        size = len(head) if file.size is None else file.size
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
        if not 0 < length <= min(HEADER_LIMIT, size - 8):
            raise LocaterError(f"{file.where}: not a safetensors file, or truncated in its header ({size:,} bytes)")
        if 8 + length > len(head):
            head += read_range(file, len(head), 8 + length)
        if 8 + length > len(head):
            raise LocaterError(f"{file.where}: ends inside its header: the file is truncated")
        entries = parsed_header(file, bytes(head[8 : 8 + length]), size - 8 - length)
        self._heads[id(file)] = head
        return {name: (file, 8 + length, entry) for name, entry in entries.items()}

    def _bytes(self, path: RangedFile, offset: int, size: int, dtype: torch.dtype) -> Tensor:
        if not size:
            return torch.empty(0, dtype=dtype)
        record, head, stop = recording(), self._heads[id(path)], offset + size
        if record is not None:
            known = stop <= len(head)
            return record.stand_in(size, dtype) if known else record.tensor(path, offset, stop, dtype)
        data = memoryview(head)[offset:stop] if stop <= len(head) else self._session.bytes(path, offset, stop)
        # a small part of a large block would keep all of it in memory, and a place that does not fit the dtype has no
        # view
        if isinstance(data, memoryview) and (2 * size < len(data.obj) or _is_misaligned(data, dtype)):  # type: ignore[arg-type]
            data = bytearray(data)
        return torch.frombuffer(data, dtype=dtype)


def _is_misaligned(data: memoryview, dtype: torch.dtype) -> bool:
    """Whether bytes begin at an address that is no multiple of the size of a number."""
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr() % dtype.itemsize != 0


# Models that the hub's own client has downloaded before: read from there, if they are what the hub has now.


def hub_cache_path(folder: HubFolder, file: str | None = None) -> Path | None:
    """The local folder of a model, or one of its files, where all that is read of it is in the hub's cache, at the
    commit that the hub has now. Without a network that is the commit of the last download.
    """
    try:
        commit: str | None = folder.model.commit
    except UnreachableError:
        place = _snapshot(folder, None)
        if place is None or not (_has_all_weights(place) if file is None else (place / file).is_file()):
            raise
        return place if file is None else place / file
    place = _snapshot(folder, commit)
    wanted = checkpoint_files(folder) if file is None else [file]
    if place is None or not wanted or not all((place / name).is_file() for name in wanted):
        return None
    return place if file is None else place / file


def _snapshot(folder: HubFolder, commit: str | None) -> Path | None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    address = folder.address
    model = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=address.root, repo_type="model")
    try:
        name = commit or (model / "refs" / (address.revision or "main")).read_text().strip()
    except OSError:
        name = address.revision or "main"
    place = model / "snapshots" / name / address.path
    return place if place.is_dir() else None


def _has_all_weights(place: Path) -> bool:
    """Whether a folder holds all weights that its index names, or a single file of them."""
    for stem in STEMS:
        index = place / f"{stem}.index.json"
        if index.is_file():
            shards = set(shards_of(read_json(index), str(index)).values())
            return all((place / shard).is_file() for shard in shards)
        if (place / stem).is_file():
            return True
    return any(place.glob("*.safetensors"))


# What is at an address.

Config = dict[str, Any]
Opened = tuple[Weights, Config]
Opener = Callable[[str], Opened]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
SHOWN = 8  # names that a message lists


def open_remote(address: Address, open_local: Opener, open_base: OpenBase, download: bool = False) -> Opened:
    """The weights and the configuration at an address. `open_local` opens what is on this machine, a download or
    the hub's cache, and `open_base` the base model of an adapter.
    """
    if "*" in f"{address.revision}{address.path}":
        raise LocaterError(f"{address}: stands for several checkpoints: give one of them")
    folder = folder_of(address, current_session().traffic)
    if isinstance(folder, HubFolder):
        local = hub_cache_path(folder, address.name if address.names_a_file else None)
        if local is not None:
            return open_local(str(local))
    if address.names_a_file:
        return _open_file(folder, address, open_local, download)
    if download:
        return _open_download(folder, checkpoint_files(folder), open_local)
    if (settings := remote_json(folder, ADAPTER)) is not None:
        return _open_adapter(folder, settings, open_local, open_base)
    if (document := remote_json(folder, INDEX, unique=True)) is not None:
        return _open_index(folder, INDEX, document), _config(folder)
    names = folder.names()
    if has_file(folder, SINGLE):
        return RemoteWeights([folder.file(SINGLE)], str(address)), _config(folder)
    pickle = next((name for name in PICKLES if has_file(folder, name)), None)
    if pickle is not None:
        warn_of_download(address, f"{pickle} is no safetensors file")
        return _open_download(folder, checkpoint_files(folder), open_local)
    loose = sorted(name for name in names or () if name.endswith(".safetensors"))
    if loose:
        refuse_missing_shards(loose, str(address))
        return RemoteWeights([folder.file(name) for name in loose], str(address)), _config(folder)
    return _refuse_empty(folder, names)


def _refuse_empty(folder: RemoteFolder, names: Sequence[str] | None) -> NoReturn:
    address = folder.address
    gguf = next((name for name in names or () if name.endswith(".gguf")), None)
    if gguf is not None:
        raise LocaterError(f"{address}: contains GGUF files; name one of them: {address.inside(gguf)}")
    expected = "expected model.safetensors, its index or pytorch_model.bin"
    if names is None:
        raise LocaterError(f"{address}: no weights there ({expected}): give the folder or the file that has them")
    shown = ", ".join(name for name in sorted(names)[:SHOWN] if name[0] != ".") or "nothing"
    raise LocaterError(f"{address}: no weights there ({expected}; there is {shown}): give the folder that has them")


def _open_file(folder: RemoteFolder, address: Address, open_local: Opener, download: bool) -> Opened:
    """One weights file, with the configuration beside it."""
    name, names = address.name, folder.names()
    if names is not None and name not in names:
        raise LocaterError(f"{address}: no such file there")
    if name.endswith(".index.json"):
        if not download and name.endswith(".safetensors.index.json"):
            document = remote_json(folder, name, unique=True)
            if document is None:
                raise LocaterError(f"{address}: no such file there")
            return _open_index(folder, name, document), _config(folder)
        return _open_download(folder, checkpoint_files(folder), open_local)
    for index in _indices(names):
        refuse_one_of_many(remote_json(folder, index), name, index, str(address), str(folder.address))
    refuse_missing_shards([name], str(address))
    if name.endswith(".safetensors") and not download:
        return RemoteWeights([folder.file(name)], str(address)), _config(folder)
    if not download:
        warn_of_download(address, "only safetensors are read by ranges")
    wanted = [name, "config.json"] if not name.endswith(".gguf") and has_file(folder, "config.json") else [name]
    return _open_download(folder, wanted, open_local, name)


def _indices(names: Sequence[str] | None) -> list[str]:
    return [INDEX] if names is None else [name for name in names if name.endswith(".index.json")]


def _open_index(folder: RemoteFolder, name: str, document: Any) -> Weights:
    """The shards that an index names, each tensor from the shard that the index gives for it."""
    index = str(folder.address.inside(name))
    shard_of = shards_of(document, index)
    shards, names = sorted(set(shard_of.values())), folder.names()
    missing = [shard for shard in shards if names is not None and shard not in names]
    if missing:
        raise LocaterError(
            f"{index}: names the shard {missing[0]:.80}, which is not there ({len(missing)} of {len(shards)} missing)"
        )
    files = {shard: folder.file(shard) for shard in shards}
    file_of = {tensor: files[shard] for tensor, shard in shard_of.items()}
    weights = RemoteWeights(list(files.values()), str(folder.address), file_of)
    refuse_lost(shard_of, weights.names(), index)
    return weights


def _open_adapter(folder: RemoteFolder, settings: Any, open_local: Opener, open_base: OpenBase) -> Opened:
    """An adapter, and the base model that it names."""
    where = str(folder.address)
    model = next((name for name in (SINGLE, INDEX, *PICKLES) if name in (folder.names() or ())), None)
    if model is not None:
        raise LocaterError(f"{where}: holds both {ADAPTER} and {model}: give each a folder of its own")
    settings = checked_settings(settings, where)
    name = next((name for name in FILES if has_file(folder, name)), None)
    if name is None:
        raise LocaterError(f"{where}: an adapter without weights: {FILES[0]} is missing")
    if name.endswith(".bin"):
        warn_of_download(folder.address, f"{name} is no safetensors file")
        place = download_files(folder, [ADAPTER, name])
        opened = open_local(str(place))
        remove_when_unused(opened[0], place)
        return opened
    base, config, base_name = open_base(settings, where, None)
    own = RemoteWeights([folder.file(name)], where)
    return AdaptedWeights(base, own, settings, where, base_name, config.get("model_type")), config


def _open_download(folder: RemoteFolder, names: Sequence[str], open_local: Opener, file: str | None = None) -> Opened:
    if not names:
        _refuse_empty(folder, folder.names())
    place = download_files(folder, names)
    opened = open_local(str(place if file is None else Path(place) / file))
    remove_when_unused(opened[0], place)
    return opened


def _config(folder: RemoteFolder) -> Config:
    return checked_config(
        remote_json(folder, "config.json", most=CONFIG_LIMIT), str(folder.address.inside("config.json"))
    )
