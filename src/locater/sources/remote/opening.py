"""Open a checkpoint on the hub, in a bucket or behind a URL: safetensors by ranges, other formats by download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from locater.errors import LocaterError
from locater.files import CONFIG_LIMIT
from locater.sources.adapter_folder import FILES, AdaptedWeights, OpenBase, checked_settings
from locater.sources.adapter_folder import SETTINGS as ADAPTER
from locater.sources.index import refuse_lost, refuse_missing_shards, refuse_one_of_many, shards_of
from locater.sources.remote.address import Address
from locater.sources.remote.downloads import announce, checkpoint_files, downloaded, remove_with
from locater.sources.remote.folders import HubFolder, folder_of
from locater.sources.remote.hub_cache import cached
from locater.sources.remote.ranged import RemoteFolder, has, remote_json
from locater.sources.remote.remote_weights import RemoteWeights
from locater.sources.remote.session import current_session
from locater.sources.settings import checked_config
from locater.sources.weights import Weights

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
        local = cached(folder, address.name if address.names_a_file else None)
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
    if has(folder, SINGLE):
        return RemoteWeights([folder.file(SINGLE)], str(address)), _config(folder)
    pickle = next((name for name in PICKLES if has(folder, name)), None)
    if pickle is not None:
        announce(address, f"{pickle} is no safetensors file")
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
    for index in _indices(folder, names):
        refuse_one_of_many(remote_json(folder, index), name, index, str(address), str(folder.address))
    refuse_missing_shards([name], str(address))
    if name.endswith(".safetensors") and not download:
        return RemoteWeights([folder.file(name)], str(address)), _config(folder)
    if not download:
        announce(address, "only safetensors are read by ranges")
    wanted = [name, "config.json"] if not name.endswith(".gguf") and has(folder, "config.json") else [name]
    return _open_download(folder, wanted, open_local, name)


def _indices(folder: RemoteFolder, names: Sequence[str] | None) -> list[str]:
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
    name = next((name for name in FILES if has(folder, name)), None)
    if name is None:
        raise LocaterError(f"{where}: an adapter without weights: {FILES[0]} is missing")
    if name.endswith(".bin"):
        announce(folder.address, f"{name} is no safetensors file")
        place = downloaded(folder, [ADAPTER, name])
        opened = open_local(str(place))
        remove_with(opened[0], place)
        return opened
    base, config, base_name = open_base(settings, where, None)
    own = RemoteWeights([folder.file(name)], where)
    return AdaptedWeights(base, own, settings, where, base_name, config.get("model_type")), config


def _open_download(folder: RemoteFolder, names: Sequence[str], open_local: Opener, file: str | None = None) -> Opened:
    if not names:
        _refuse_empty(folder, folder.names())
    place = downloaded(folder, names)
    opened = open_local(str(place if file is None else Path(place) / file))
    remove_with(opened[0], place)
    return opened


def _config(folder: RemoteFolder) -> Config:
    return checked_config(
        remote_json(folder, "config.json", most=CONFIG_LIMIT), str(folder.address.inside("config.json"))
    )
