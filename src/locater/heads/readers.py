"""Open a source: a live module, a folder, a weights file or a hub id. Only the tensors asked for are read from disk."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import socket
import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.heads.weights import DictWeights, ModuleWeights, Rows, Weights

Config = dict[str, Any]
Source = nn.Module | str | os.PathLike[str]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
HEADER_LIMIT = 100_000_000  # bytes, as the format demands


def open_source(source: Source) -> tuple[Weights, Config]:
    """Weights and configuration of `source`; the configuration is empty where there is none."""
    if isinstance(source, nn.Module):
        return ModuleWeights(source), config_of(source)
    if not isinstance(source, str | os.PathLike):
        raise LocaterError(f"{source!r:.60} is no model: give an nn.Module, a folder, a file or a hub id")
    if not str(source):
        raise LocaterError("the name of the model is empty: give a folder, a file or a hub id")
    path = Path(source)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        from locater.heads.gguf_reader import open_gguf

        return open_gguf(path)
    if path.is_file():
        return _open_file(path), _read_config(path.parent / "config.json")
    return _open_folder(_from_hub(str(source)))


def config_of(module: nn.Module) -> Config:
    """The configuration that a Hugging Face model carries, as a dictionary; empty for other modules."""
    for part in module.modules():  # the first is the module itself; wrappers (DDP, compiled, peft) come before the model
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


class SafetensorsWeights:
    """One or several safetensors files, read by byte range: no tensor is mapped or loaded that nobody asked for."""

    def __init__(self, files: Sequence[Path], where: str) -> None:
        self.where = where
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in files:
            start, header = _safetensors_header(path)
            twice = next((name for name in header if name in self._entries), None)
            if twice is not None:
                raise LocaterError(f"{where}: {twice} is in {self._entries[twice][0].name} and in {path.name}: name one of the files")
            self._entries.update({name: (path, start, entry) for name, entry in header.items()})

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][2]["shape"])

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        path, start, entry = self._entries[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise LocaterError(f"{path}: tensor {name} is stored as {entry['dtype']} (quantised?): dequantise the checkpoint first")
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if rows is None:
            return self._pread(path, start + begin, end - begin, dtype).view(shape)
        stride = (end - begin) // max(shape[0], 1)
        parts = [self._pread(path, start + begin + a * stride, (b - a) * stride, dtype) for a, b in rows]
        return torch.cat(parts).view(-1, *shape[1:])

    def _pread(self, path: Path, offset: int, size: int, dtype: torch.dtype) -> Tensor:
        buffer = bytearray(size)
        with open(path, "rb", buffering=0) as file:
            got = os.preadv(file.fileno(), [buffer], offset) if size else 0
            while got < size:  # a read can return less than asked, beyond 2 GB always
                more = os.preadv(file.fileno(), [memoryview(buffer)[got:]], offset + got)
                if not more:
                    raise LocaterError(f"{path}: ends before its data does: the file is truncated, fetch it again")
                got += more
        with self._lock:
            self.bytes_read += size
        return torch.frombuffer(buffer, dtype=dtype) if size else torch.empty(0, dtype=dtype)


def _safetensors_header(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Offset of the data and the tensors' entries, checked against the size of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(HEADER_LIMIT, size - 8):
            raise LocaterError(f"{path}: not a safetensors file, or truncated in its header ({size:,} bytes)")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            for name, entry in header.items():
                size_of = DTYPES[entry["dtype"]].itemsize if entry["dtype"] in DTYPES else None
                begin, stop = entry["data_offsets"]
                if size_of is not None and stop - begin != size_of * math.prod(entry["shape"]):
                    raise LocaterError(
                        f"{path}: {name} has {stop - begin} bytes for shape {entry['shape']}: the file is damaged, fetch it again"
                    )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LocaterError(f"{path}: its safetensors header is not readable ({error}): fetch it again") from None
    if 8 + length + end > size:
        raise LocaterError(f"{path}: truncated, {size:,} bytes of {8 + length + end:,}: fetch it again")
    return 8 + length, header


def _open_folder(folder: Path) -> tuple[Weights, Config]:
    config = _read_config(folder / "config.json")
    for stem, open_files in (("model.safetensors", SafetensorsWeights), ("pytorch_model.bin", _open_pickles)):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return _open_index(index, open_files), config
        if (folder / stem).is_file():
            return open_files([folder / stem], str(folder)), config
    loose = sorted(folder.glob("*.safetensors"))
    if loose:
        return SafetensorsWeights(loose, str(folder)), config
    quantised = sorted(folder.glob("*.gguf"))
    if quantised:
        raise LocaterError(f"{folder}: holds GGUF files; name one of them: {quantised[0]}")
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise LocaterError(
        f"{folder}: no weights here (looked for model.safetensors, its index, pytorch_model.bin and *.safetensors; found {found})"
    )


def _open_index(index: Path, open_files: Any) -> Weights:
    try:
        places: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(places.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise LocaterError(f"{index}: not a readable index ({error!r}): fetch it again") from None
    missing = [s for s in shards if not (index.parent / s).is_file()]
    if missing:
        raise LocaterError(f"{index}: names the shard {missing[0]}, which is not there ({len(missing)} of {len(shards)} missing)")
    weights: Weights = open_files([index.parent / s for s in shards], str(index.parent))
    held = set(weights.names())
    lost = [name for name in places if name not in held]
    if lost:
        raise LocaterError(f"{index}: names the tensor {lost[0]}, which {places[lost[0]]} does not hold ({len(lost)} missing)")
    return weights


def _open_file(path: Path) -> Weights:
    if path.suffix == ".safetensors":
        return SafetensorsWeights([path], str(path))
    if path.suffix in (".bin", ".pt", ".pth"):
        return _open_pickles([path], str(path))
    if path.name.endswith(".index.json"):
        opener = SafetensorsWeights if "safetensors" in path.name else _open_pickles
        return _open_index(path, opener)
    raise LocaterError(f"{path}: not a kind of weights file that is read (.safetensors, .gguf, .bin, .pt, .pth or an index)")


def _open_pickles(files: Sequence[Path], where: str) -> DictWeights:
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors.update(_load_pickle(path))
    return DictWeights(tensors, where)


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before zip archives cannot be mapped
            held = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            first = file.read(1)
        if first not in (b"P", b"\x80"):  # neither an archive nor a pickle
            raise LocaterError(f"{path}: not a weights file: torch.save writes no such bytes") from None
        if "Unsupported" not in str(error) and "GLOBAL" not in str(error) and "weights_only" not in str(error).lower():
            raise LocaterError(f"{path}: not a readable weights file") from None
        raise LocaterError(
            f"{path}: holds more than weights, so opening it would run its code: refused. Save it again as safetensors"
        ) from None
    except Exception as error:  # bytes that are no pickle make the unpickler raise anything at all
        raise LocaterError(f"{path}: not a readable weights file ({first_line(error)})") from None
    if isinstance(held, Mapping) and isinstance(held.get("state_dict"), Mapping):
        held = held["state_dict"]
    if not isinstance(held, Mapping) or not any(isinstance(v, Tensor) for v in held.values()):
        raise LocaterError(f"{path}: holds a {type(held).__name__}, not a dictionary of tensors")
    return {str(k): v for k, v in held.items() if isinstance(v, Tensor)}


def _read_config(path: Path) -> Config:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LocaterError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(config, dict):
        raise LocaterError(f"{path}: holds a {type(config).__name__}, not a configuration")
    if not isinstance(config.get("model_type"), str | None):
        raise LocaterError(f"{path}: model_type is {config['model_type']!r}, not a name")
    return config


def _from_hub(name: str) -> Path:
    """Folder of a hub model, downloaded or cached: configuration and weights, nothing else."""
    for kind in ("safetensors", "bin"):
        folder = hub_folder(name, ["config.json", f"*.{kind}", f"*.{kind}.index.json"])
        if any(folder.glob(f"*.{kind}")):
            break
    return folder


def hub_folder(name: str, patterns: Sequence[str] = ("config.json",)) -> Path:
    """Files of a hub model, downloaded or cached. Refuses at once what is no hub id or cannot be reached."""
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or name.startswith((".", "~")) or name.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth")):
        raise LocaterError(f"{name}: no such file or folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise LocaterError(f"{name}: no such file or folder; to read it from the hub, install locater[hf]") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises a dozen kinds: not found, gated, offline, disk full
        if _is_network(error):
            why = "and the hub cannot be reached (is there a network?): give a folder or a file of this machine"
        else:
            why = f"and the hub did not give it: {first_line(error)}"
        raise LocaterError(f"{name}: no such file or folder, {why}") from None


def _is_network(error: BaseException | None) -> bool:
    """Whether an exception comes from a connection that did not come about."""
    while error is not None and type(error).__name__ != "OfflineModeIsEnabled":  # of HF_HUB_OFFLINE, which says so itself
        if isinstance(error, socket.gaierror | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False
