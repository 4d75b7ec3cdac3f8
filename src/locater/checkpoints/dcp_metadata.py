"""The file `.metadata` of a checkpoint of `torch.distributed.checkpoint`: which tensors there are, and where pieces of
them are stored.

It is a pickle, and loading a pickle can run any code. Here it is loaded with an unpickler that knows the dozen names
that such a file needs, and replaces them by plain records: no class or function of another package is called.
"""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch

from locater.errors import LocaterError, first_line
from locater.files import regular_file

NAME = ".metadata"
DAMAGED = "the checkpoint is damaged or was cut off while it was written: save it again"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: where it begins in the tensor, its shape, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor by the keys that lead to it in the state that was saved, and its pieces."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


class Record:
    """In place of a class of PyTorch: attributes, and nothing else."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class Metadata(Record): ...


class TensorEntry(Record): ...


class OtherEntry(Record): ...


def _text(*parts: str) -> str:
    return "/".join(parts)  # of text alone: a list of lists of lists can be short here and endless as text


def _record(*_: Any) -> Record:
    return Record()


def _no_items() -> dict[Any, Any]:
    return {}  # its items follow, and are checked one by one


_METADATA = {
    "Metadata": Metadata,
    "TensorStorageMetadata": TensorEntry,
    "BytesStorageMetadata": OtherEntry,
    "TensorProperties": Record,
    "ChunkStorageMetadata": Record,
    "MetadataIndex": Record,
    "StorageMeta": Record,
    "_MEM_FORMAT_ENCODING": _record,
}
KNOWN: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "torch.distributed.checkpoint.metadata": _METADATA,
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties": Record, "MEM_FORMAT_ENCODING": _record},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": Record},
    "torch": {"Size": tuple},
    "torch.serialization": {"_get_layout": _text},
    "pathlib": dict.fromkeys(("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"), _text),
    "collections": {"OrderedDict": _no_items},
}


class _RefusedNameError(Exception):
    """A name that such a file does not need."""


def _plain_key(key: Any) -> Any:
    """The key of a dictionary: text, a number or a record. Tuples of tuples can be short here, and endless to hash."""
    if not isinstance(key, str | int | Record):
        raise pickle.UnpicklingError(f"a dictionary has a key of type {type(key).__name__}")
    return key


# the one in Python: that in C takes gigabytes for one damaged opcode (LONG_BINPUT), before anything can be checked
class _Unpickler(pickle._Unpickler):
    stack: list[Any]  # these three are its own, and not in the published types
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_plain_key(key)] = value

    def _load_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_plain_key(key)] = value

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append({_plain_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)})

    def _load_set(self) -> None:
        raise pickle.UnpicklingError("a set, which such a file does not have")

    dispatch |= {pickle.SETITEM[0]: _load_item, pickle.SETITEMS[0]: _load_items, pickle.DICT[0]: _load_dict}
    dispatch |= dict.fromkeys((pickle.EMPTY_SET[0], pickle.ADDITEMS[0], pickle.FROZENSET[0]), _load_set)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        known = KNOWN.get(module, {}).get(name)
        if known is None:
            raise _RefusedNameError(f"{module}.{name}"[:120])
        return known


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor that a checkpoint holds, by its full name; refused where the file is not what PyTorch writes."""
    path = folder / NAME
    regular_file(path)
    try:
        with path.open("rb") as file:
            content = _Unpickler(file).load()
    except _RefusedNameError as name:
        raise LocaterError(
            f"{path}: names {str(name)!r}, which the index of a checkpoint does not need: refused, since opening it "
            "could run its code"
        ) from None
    except Exception as error:  # on bytes that are no pickle the unpickler can raise anything
        raise LocaterError(f"{path}: not the index of a checkpoint ({first_line(error)}): {DAMAGED}") from None
    try:
        return _tensors(path, content)
    except (AttributeError, TypeError, ValueError) as error:
        raise LocaterError(f"{path}: not the index of a checkpoint ({first_line(error)}): {DAMAGED}") from None


def _tensors(path: Path, content: Any) -> dict[str, StoredTensor]:
    if not isinstance(content, Metadata):
        raise LocaterError(f"{path}: holds a {type(content).__name__}, not the index of a checkpoint")
    stored: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in content.storage_data.items():  # type: ignore[attr-defined]
        if getattr(index, "offset", None) is not None:  # other states, such as counters, have none
            stored[index.fqn, _whole_numbers(index.offset)] = info
    paths = getattr(content, "planner_data", None) or {}
    tensors = {}
    for name, entry in content.state_dict_metadata.items():  # type: ignore[attr-defined]
        if isinstance(entry, TensorEntry):
            if not isinstance(name, str) or not name.isprintable():
                raise LocaterError(f"{path}: {_short(name)} is not the name of a tensor: {DAMAGED}")
            keys = tuple(_key(key) for key in paths.get(name, (name,)))
            if not all(key.isprintable() for key in keys):
                raise LocaterError(f"{path}: {name!r:.80} is not the name of a tensor: {DAMAGED}")
            tensors[name] = _tensor(path, name, keys, entry, stored)
    return tensors


def _tensor(path: Path, name: str, keys: tuple[str, ...], entry: Any, stored: Mapping[Any, Any]) -> StoredTensor:
    properties = entry.properties
    dtype = getattr(properties, "dtype", None) or properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise LocaterError(f"{path}: {name} has no dtype: {DAMAGED}")
    shape, pieces = _whole_numbers(entry.size), []
    for chunk in entry.chunks:
        offsets, sizes = _whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)
        info = stored.get((name, offsets))
        if info is None:
            raise LocaterError(f"{path}: a piece of {name} at {list(offsets)} is stored nowhere: {DAMAGED}")
        if getattr(info, "transform_descriptors", None):
            raise LocaterError(f"{path}: {name} is stored compressed or encrypted: save it again without extensions")
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(a + n > size for a, n, size in zip(offsets, sizes, shape, strict=True)):
            raise LocaterError(f"{path}: a piece of {name} is not inside of it: {DAMAGED}")
        start, length = _whole_numbers((info.offset, info.length))
        if prod(sizes) * dtype.itemsize > length:
            raise LocaterError(f"{path}: a piece of {name} is larger than the bytes that hold it: {DAMAGED}")
        pieces.append(Piece(offsets, sizes, _file_name(path, info.relative_path), start, length))
    if sum(prod(piece.sizes) for piece in pieces) != prod(shape):
        raise LocaterError(f"{path}: the pieces of {name} are not as large as it is, {list(shape)}: {DAMAGED}")
    return StoredTensor(keys, shape, dtype, tuple(pieces))


def _whole_numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(x) is int and 0 <= x < 1 << 62 for x in numbers):
        raise ValueError(f"{_short(numbers)} are not sizes")
    return numbers


def _key(key: Any) -> str:
    """A key of the state that was saved: a name, or a place in a list."""
    if not isinstance(key, str | int):
        raise ValueError(f"{_short(key)} is not a key")
    return str(key)


def _short(value: Any) -> str:
    """A value for a message. What is nested is not followed: it can be endless."""
    return reprlib.repr(value)[:80]


def _file_name(path: Path, name: Any) -> str:
    """The name of a file in the folder of the checkpoint, and nowhere else."""
    if not isinstance(name, str) or PurePosixPath(name).name != name or "\\" in name or "\0" in name:
        raise LocaterError(f"{path}: names the file {_short(name)}, which is not in its folder: refused")
    return name
