"""Open a source: a live module, a folder, a weights file, a hub id or an address. Tensors are read only when needed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from locater.errors import DamagedError, LocaterError
from locater.files import CONFIG_LIMIT, is_there, read_json
from locater.sources.adapter_folder import (
    ADAPTERS,
    BASE,
    OpenBase,
    at_revision,
    base_name_of,
    base_on_the_hub,
    base_on_this_machine,
    open_adapter,
)
from locater.sources.adapter_folder import SETTINGS as ADAPTER
from locater.sources.config_rules import checked_config
from locater.sources.dcp_folder import DcpWeights, is_dcp
from locater.sources.pickle_file import open_pickles
from locater.sources.quantised import dequantised_view
from locater.sources.remote.address import hub_address, remote_address
from locater.sources.remote.hub import ask_hub
from locater.sources.remote.open_remote import open_remote
from locater.sources.safetensors_file import (
    SafetensorsWeights,
    refuse_lost,
    refuse_missing_shards,
    refuse_one_of_many,
    shards_of,
)
from locater.sources.weights import ModuleWeights, Weights

Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class WrappedSource:
    """A source whose weights are wrapped when it is opened, for callers that want to see what is read from it."""

    source: str
    wrap: Callable[[Weights], Weights]

    def __str__(self) -> str:
        return self.source


Source = nn.Module | str | os.PathLike[str] | WrappedSource


class Opener(Protocol):
    """Opens the files of one checkpoint; `file_of` names the file of each tensor where there is an index."""

    def __call__(self, files: Sequence[Path], where: str, file_of: Mapping[str, Path] | None = None) -> Weights: ...


@dataclasses.dataclass(frozen=True)
class OpeningOptions:
    """How a source is opened, and those that it leads to: downloads, what is in a cache, the base of an adapter."""

    download: bool = False
    base: str | None = None  # of an adapter, in place of the one that it names
    elsewhere: bool = False  # what is opened came from elsewhere, whatever folder it lies in now
    adapters: tuple[str, ...] = ()  # opened before, each on the next


def open_source(source: Source, download: bool = False, base: str | None = None) -> tuple[Weights, Config]:
    """The weights and the configuration of `source`; the configuration is empty where there is none.

    Of a source that is elsewhere only headers are read here, and later the bytes that are asked for; `download` takes
    all of it first. An adapter is read on `base`, or on the base model that it names.
    """
    weights: Weights
    if isinstance(source, nn.Module):
        weights, config = ModuleWeights(source), config_of(source)
    elif isinstance(source, WrappedSource):
        stored, config = open_source(source.source, download, base)
        return source.wrap(stored), config
    else:
        weights, config = _open_dequantised(source, OpeningOptions(download, base))
    if base is not None and base_name_of(weights) is None:
        raise LocaterError(f"{weights.where}: not an adapter, so it has no base: leave out --base")
    return weights, config


def _open_dequantised(source: str | os.PathLike[str], opening: OpeningOptions) -> tuple[Weights, Config]:
    weights, config = _open_stored(source, opening)
    return dequantised_view(weights, config), config


def _open_stored(source: str | os.PathLike[str], opening: OpeningOptions) -> tuple[Weights, Config]:
    """The weights as they are stored, and the configuration."""
    if not isinstance(source, str | os.PathLike):
        raise LocaterError(f"{source!r:.60} is not a model: give an nn.Module, a folder, a file or a hub id")
    if not str(source):
        raise LocaterError("the name of the model is empty: give a folder, a file or a hub id")
    path, address = Path(source), remote_address(str(source))
    if address is None and os.path.isdir(path):
        return _open_folder(path, partial(_open_base, opening))
    if address is not None or not is_there(path):
        there = dataclasses.replace(opening, elsewhere=True)
        address = address or hub_address(str(source))
        return open_remote(
            address, partial(_open_dequantised, opening=there), partial(_open_base, there), opening.download
        )
    if path.suffix == ".gguf":
        from locater.sources.gguf_file import open_gguf

        return open_gguf(path)
    return _open_file(path), _read_config(path.parent / "config.json")


def _open_base(
    opening: OpeningOptions, settings: Mapping[str, Any], where: str, folder: Path | None
) -> tuple[Weights, Config, str]:
    """The base model of an adapter, and its name: the one that the user gave, or the one that the adapter names.

    An adapter from elsewhere may name a model of the hub alone, one of this machine a folder as well.
    """
    here = where if folder is None else os.path.realpath(folder)
    adapters = (*opening.adapters, here)
    if here in opening.adapters or len(adapters) > ADAPTERS:
        raise LocaterError(f"{where}: an adapter on adapters that name each other, and no model below them")
    inner = dataclasses.replace(opening, base=None, adapters=adapters, elsewhere=False)
    if opening.base is not None:
        base = opening.base
    elif folder is None or opening.elsewhere:
        base, inner = base_on_the_hub(settings, where), dataclasses.replace(inner, elsewhere=True)
    else:
        base = _base_of_a_local_adapter(settings, folder)
    try:
        return *_open_dequantised(base, inner), str(remote_address(base) or base)
    except LocaterError as error:
        raise LocaterError(f"{where}: its base model cannot be opened: {error}") from None


def _base_of_a_local_adapter(settings: Mapping[str, Any], folder: Path) -> str:
    local = base_on_this_machine(settings, folder)
    if local is not None:
        return str(local)
    base: str = settings[BASE]
    address = remote_address(base)
    if (address is not None and address.scheme != "hf") or base.startswith(("\\\\", "//")):
        raise LocaterError(
            f"{folder}: its base model is {address or base}, an address that the adapter chose, so it is not asked: "
            "give it yourself with --base (locater.scan(..., base=...)), or write a folder or a hub id there"
        )
    return at_revision(settings)


def config_of(module: nn.Module) -> Config:
    """The configuration of a Hugging Face model as a dictionary; empty for other modules."""
    # modules() yields wrappers (DDP, compiled, peft) before the model inside them
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is None:
            continue
        if hasattr(config, "to_dict"):
            return dict(config.to_dict())
        if isinstance(config, Mapping) and "model_type" in config:
            return dict(config)
        if dataclasses.is_dataclass(config) and hasattr(config, "model_type"):
            return dataclasses.asdict(config)  # type: ignore[arg-type]
    return {}


def _open_folder(folder: Path, open_base: OpenBase) -> tuple[Weights, Config]:
    if is_there(folder / ADAPTER):
        model = next((n for n in ("model.safetensors", "pytorch_model.bin") if any(folder.glob(f"{n}*"))), None)
        if model is not None:
            raise LocaterError(f"{folder}: holds both {ADAPTER} and {model}: give each a folder of its own")
        return open_adapter(folder, open_base)
    config = _read_config(folder / "config.json")
    for stem, open_files in (("model.safetensors", SafetensorsWeights), ("pytorch_model.bin", open_pickles)):
        index = folder / f"{stem}.index.json"
        if is_there(index):
            return _open_index(index, open_files), config
        if is_there(folder / stem):
            return open_files([folder / stem], str(folder)), config
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise LocaterError(f"{folder}: cannot be read ({error.strerror})") from None
    if is_dcp(folder):
        return DcpWeights(folder), config or _read_config(folder.parent / "config.json")
    cut = next((name for name in names if name.endswith(".distcp")), None)
    if cut is not None:
        raise LocaterError(
            f"{folder}: holds {cut} and no .metadata, which is written last: the save was cut off, or a part was copied"
        )
    loose = [folder / name for name in names if name.endswith(".safetensors")]
    if loose:
        refuse_missing_shards([path.name for path in loose], str(folder))
        return SafetensorsWeights(loose, str(folder)), config
    quantised = [folder / name for name in names if name.endswith(".gguf")]
    if quantised:
        raise LocaterError(f"{folder}: contains GGUF files; name one of them: {quantised[0]}")
    inner = [name for name in names if is_there(folder / name / "config.json") or is_dcp(folder / name)]
    way_out = f": give {folder / inner[0]}" if inner else ": give the folder that has them"
    raise LocaterError(
        f"{folder}: no weights here (expected model.safetensors, its index, pytorch_model.bin, *.safetensors or "
        "a .metadata of torch.distributed.checkpoint; "
        f"there is {', '.join(name for name in names[:8] if name[0] != '.') or 'nothing'}){way_out}"
    )


def _open_index(index: Path, open_files: Opener) -> Weights:
    """The shards that an index names, each tensor from the shard that the index gives for it."""
    shard_of = shards_of(read_json(index, unique=True), str(index))
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not is_there(index.parent / shard)]
    if missing:
        raise DamagedError(
            "stale-index",
            f"{index}: names the shard {missing[0]:.80}, which is not there ({len(missing)} of {len(shards)} missing)",
        )
    paths = {shard: index.parent / shard for shard in shards}
    file_of = {name: paths[shard] for name, shard in shard_of.items()}
    weights = open_files(list(paths.values()), str(index.parent), file_of)
    refuse_lost(shard_of, weights.names(), str(index))
    return weights


def _open_file(path: Path) -> Weights:
    _refuse_a_shard(path)
    if path.suffix == ".safetensors":
        return SafetensorsWeights([path], str(path))
    if path.suffix in (".bin", ".pt", ".pth"):
        return open_pickles([path], str(path))
    if path.name.endswith(".index.json"):
        return _open_index(path, SafetensorsWeights if "safetensors" in path.name else open_pickles)
    raise LocaterError(f"{path}: not a supported weights file (.safetensors, .gguf, .bin, .pt, .pth or an index)")


def _refuse_a_shard(path: Path) -> None:
    """A single shard would be read as a model with fewer layers, and without the norms in other shards."""
    for index in path.parent.glob("*.index.json") if path.suffix != ".json" else ():
        refuse_one_of_many(read_json(index), path.name, index.name, str(path), str(path.parent))
    refuse_missing_shards([path.name], str(path))


def _read_config(path: Path) -> Config:
    return checked_config(read_json(path, most=CONFIG_LIMIT), str(path)) if is_there(path) else {}


def hub_folder(name: str, patterns: Sequence[str] = ("config.json",)) -> Path:
    """The local folder of a hub model, downloaded or cached. A name that cannot be a hub id is refused at once."""
    if remote_address(name) is not None:
        raise LocaterError(f"{name}: a model is run from a folder of this machine or from a hub id (org/model)")
    address = hub_address(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise LocaterError(f"{name}: no such file or folder; to read it from the hub, install locater[hf]") from None
    return Path(ask_hub(address, lambda: snapshot_download(name, allow_patterns=list(patterns))))
