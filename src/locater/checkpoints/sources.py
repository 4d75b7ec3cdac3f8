"""Open a source: a live module, a folder, a weights file or a hub id. Tensors are read from disk only when needed."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, Protocol

from torch import nn

from locater.checkpoints.adapter_folder import SETTINGS as ADAPTER
from locater.checkpoints.adapter_folder import open_adapter
from locater.checkpoints.dcp_folder import DcpWeights, is_dcp
from locater.checkpoints.pickle_file import open_pickles
from locater.checkpoints.quantised import seen_through
from locater.checkpoints.safetensors_file import SafetensorsWeights
from locater.checkpoints.weights import ModuleWeights, Weights
from locater.errors import LocaterError, first_line
from locater.files import is_there, read_json

Config = dict[str, Any]
Source = nn.Module | str | os.PathLike[str]


class Opener(Protocol):
    """Opens the files of one checkpoint; `file_of` names the file of each tensor where there is an index."""

    def __call__(self, files: Sequence[Path], where: str, file_of: Mapping[str, Path] | None = None) -> Weights: ...


def open_source(source: Source) -> tuple[Weights, Config]:
    """The weights and the configuration of `source`; the configuration is empty where there is none."""
    if isinstance(source, nn.Module):
        return ModuleWeights(source), config_of(source)
    weights, config = _opened(source)
    return seen_through(weights, config), config


def _opened(source: str | os.PathLike[str]) -> tuple[Weights, Config]:
    """The weights as they are stored, and the configuration."""
    if not isinstance(source, str | os.PathLike):
        raise LocaterError(f"{source!r:.60} is not a model: give an nn.Module, a folder, a file or a hub id")
    if not str(source):
        raise LocaterError("the name of the model is empty: give a folder, a file or a hub id")
    path = Path(source)
    if os.path.isdir(path):
        return _open_folder(path)
    if not is_there(path):
        return _open_folder(_from_hub(str(source)))
    if path.suffix == ".gguf":
        from locater.checkpoints.gguf_file import open_gguf

        return open_gguf(path)
    return _open_file(path), _read_config(path.parent / "config.json")


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


def _open_folder(folder: Path) -> tuple[Weights, Config]:
    if is_there(folder / ADAPTER):
        model = next((n for n in ("model.safetensors", "pytorch_model.bin") if any(folder.glob(f"{n}*"))), None)
        if model is not None:
            raise LocaterError(f"{folder}: holds both {ADAPTER} and {model}: give each a folder of its own")
        return open_adapter(folder, open_source)
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
        _refuse_missing_shards(loose, str(folder))
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
    document = read_json(index, unique=True)
    shard_of = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(x, str) for x in shard_of.values()):
        raise LocaterError(
            f"{index}: not an index (weight_map does not give the shard of each tensor): download it again"
        )
    shards = sorted(set(shard_of.values()))
    for shard in shards:
        if not _inside(shard):
            raise LocaterError(f"{index}: names the shard {shard!r:.80}, which is not in its folder: refused")
    missing = [shard for shard in shards if not is_there(index.parent / shard)]
    if missing:
        raise LocaterError(
            f"{index}: names the shard {missing[0]:.80}, which is not there ({len(missing)} of {len(shards)} missing)"
        )
    paths = {shard: index.parent / shard for shard in shards}
    file_of = {name: paths[shard] for name, shard in shard_of.items()}
    weights = open_files(list(paths.values()), str(index.parent), file_of)
    names = set(weights.names())
    lost = [name for name in shard_of if name not in names]
    if lost:
        raise LocaterError(
            f"{index}: names the tensor {lost[0]}, which is not in {shard_of[lost[0]]} ({len(lost)} missing)"
        )
    return weights


def _inside(shard: str) -> bool:
    """Whether the path of a shard stays inside the folder of its index, on every operating system."""
    parts = PureWindowsPath(shard).parts  # splits at both kinds of slash, and knows drives
    return bool(parts) and ".." not in parts and not PureWindowsPath(shard).anchor and "\0" not in shard


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
        document = read_json(index)
        shard_of = document.get("weight_map") if isinstance(document, dict) else None
        shards = {x for x in shard_of.values() if isinstance(x, str)} if isinstance(shard_of, dict) else set()
        if path.name in shards and len(shards) > 1:
            raise LocaterError(
                f"{path}: one of the {len(shards)} shards of {index.name}: give the folder {path.parent}"
            )
    _refuse_missing_shards([path], str(path))


def _refuse_missing_shards(files: Sequence[Path], where: str) -> None:
    """Files named `model-00002-of-00003` are read only together with all others of the set."""
    sets: dict[tuple[str, int], set[int]] = {}
    for path in files:
        if match := re.fullmatch(r"(.*)-(\d{1,6})-of-(\d{1,6})", path.stem, re.ASCII):
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in sets.items():
        if len(numbers) < count:
            raise LocaterError(
                f"{where}: {len(numbers)} of the {count} shards {stem}-*-of-{count:05}: give the folder with all"
            )


def _read_config(path: Path) -> Config:
    if not is_there(path):
        return {}
    config = read_json(path)
    if not isinstance(config, dict):
        raise LocaterError(f"{path}: contains a {type(config).__name__}, not a configuration")
    if not isinstance(config.get("model_type"), str | None):
        raise LocaterError(f"{path}: model_type is {config['model_type']!r:.80}, not a name")
    return config


def _from_hub(name: str) -> Path:
    """The local folder of a hub model, downloaded or cached: only its configuration and weights."""
    for kind in ("safetensors", "bin"):
        folder = hub_folder(name, ["config.json", f"*.{kind}", f"*.{kind}.index.json"])
        if any(folder.glob(f"*.{kind}")):
            break
    return folder


def hub_folder(name: str, patterns: Sequence[str] = ("config.json",)) -> Path:
    """The local folder of a hub model, downloaded or cached. A name that cannot be a hub id is refused at once."""
    parts = name.split("/")
    if (
        len(parts) > 2
        or not all(parts)
        or name.startswith((".", "~"))
        or name.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth"))
    ):
        raise LocaterError(f"{name}: no such file or folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise LocaterError(f"{name}: no such file or folder; to read it from the hub, install locater[hf]") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises a dozen types: missing, gated, offline, disk full
        if _is_network(error):
            reason = "and the hub cannot be reached (is there a network?): give a folder or a file of this machine"
        else:
            reason = f"and the hub did not return it: {first_line(error)}"
        raise LocaterError(f"{name}: no such file or folder, {reason}") from None


def _is_network(error: BaseException | None) -> bool:
    """Whether an exception was caused by a failed connection."""
    # the exception of HF_HUB_OFFLINE explains itself
    while error is not None and type(error).__name__ != "OfflineModeIsEnabled":
        if isinstance(error, socket.gaierror | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False
