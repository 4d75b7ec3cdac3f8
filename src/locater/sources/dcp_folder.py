"""Read checkpoints of `torch.distributed.checkpoint` (DCP), as FSDP2 and torchtitan write them, in one process.

Each rank has written its pieces of all tensors into a file of its own (`__0_0.distcp`), and `.metadata` says where each
is. A tensor is put together when it is asked for, and only from the pieces with the rows that are asked for.
"""

from __future__ import annotations

import io
import pickle
import reprlib
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch import Tensor

from locater.errors import DamagedError, LocaterError, first_line
from locater.files import is_there, regular_file
from locater.sources.pickle_file import check_archive, records_in
from locater.sources.weights import DictWeights, Rows

# The file `.metadata` of a checkpoint: which tensors there are, and where pieces of them are stored.

NAME = ".metadata"
DAMAGED = "the checkpoint is damaged or was cut off while it was written: save it again"
AXES = 64  # of a tensor; PyTorch has no more
LONGEST = 1000  # characters of a name
DEEPEST = 64  # keys that lead to a tensor
CHUNK_BYTES = 8  # that a piece takes in the index, at the least


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


class DcpRecord:
    """In place of a class of PyTorch: attributes, and nothing else."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and len(state) > DEEPEST:
            raise pickle.UnpicklingError(f"a record of {len(state):,} entries")
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class Metadata(DcpRecord): ...


class DcpTensorEntry(DcpRecord): ...


class OtherEntry(DcpRecord): ...


def _text(*parts: str) -> str:
    text = "/".join(parts)  # of text alone: a list of lists of lists can be short here and endless as text
    if len(text) > LONGEST:  # text joined to itself doubles
        raise pickle.UnpicklingError(f"a path of {len(text):,} characters")
    return text


def _size(numbers: Any = ()) -> tuple[Any, ...]:
    if not isinstance(numbers, tuple | list) or len(numbers) > AXES:
        raise pickle.UnpicklingError("a size that is not one")
    return tuple(numbers)


def _record(*_: Any) -> DcpRecord:
    return DcpRecord()


def _no_items() -> dict[Any, Any]:
    return {}  # its items follow, and are checked one by one


_METADATA = {
    "Metadata": Metadata,
    "TensorStorageMetadata": DcpTensorEntry,
    "BytesStorageMetadata": OtherEntry,
    "TensorProperties": DcpRecord,
    "ChunkStorageMetadata": DcpRecord,
    "MetadataIndex": DcpRecord,
    "StorageMeta": DcpRecord,
    "_MEM_FORMAT_ENCODING": _record,
}
KNOWN: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "torch.distributed.checkpoint.metadata": _METADATA,
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties": DcpRecord, "MEM_FORMAT_ENCODING": _record},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": DcpRecord},
    "torch": {"Size": _size},
    "torch.serialization": {"_get_layout": _text},
    "pathlib": dict.fromkeys(("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"), _text),
    "collections": {"OrderedDict": _no_items},
}


class _RefusedNameError(Exception):
    """A name that such a file does not need."""


def _plain_key(key: Any) -> Any:
    """The key of a dictionary: text, a number or a record. Tuples of tuples can be short here, and endless to hash."""
    if not isinstance(key, str | int | DcpRecord):
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

    def _load_call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple) or len(arguments) > DEEPEST:
            raise pickle.UnpicklingError("a call that such a file does not have")
        self.append(function(*arguments))

    def _load_build(self) -> None:
        """Attributes are for records alone: those of a function or a class would stay when the next file is read."""
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, DcpRecord):
            raise pickle.UnpicklingError(f"attributes of a {type(record).__name__}")
        DcpRecord.__setstate__(record, state)

    def _load_other(self) -> None:
        raise pickle.UnpicklingError("a call that such a file does not have")

    dispatch |= {pickle.REDUCE[0]: _load_call, pickle.NEWOBJ[0]: _load_call, pickle.BUILD[0]: _load_build}
    dispatch |= dict.fromkeys((pickle.NEWOBJ_EX[0], pickle.INST[0], pickle.OBJ[0]), _load_other)
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
    size = regular_file(path)
    try:
        # not from the file: a damaged length would ask for gigabytes that are not there
        content = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except _RefusedNameError as name:
        raise LocaterError(
            f"{path}: names {str(name)!r}, which the index of a checkpoint does not need: refused, since opening it "
            "could run its code"
        ) from None
    except Exception as error:  # on bytes that are no pickle the unpickler can raise anything
        raise LocaterError(f"{path}: not the index of a checkpoint ({first_line(error)}): {DAMAGED}") from None
    try:
        return _tensors(path, content, size // CHUNK_BYTES)
    except (AttributeError, TypeError, ValueError) as error:
        raise LocaterError(f"{path}: not the index of a checkpoint ({first_line(error)}): {DAMAGED}") from None


def _tensors(path: Path, content: Any, most: int) -> dict[str, StoredTensor]:
    if not isinstance(content, Metadata):
        raise LocaterError(f"{path}: holds a {type(content).__name__}, not the index of a checkpoint")
    stored: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in content.storage_data.items():  # type: ignore[attr-defined]
        if getattr(index, "offset", None) is not None:  # other states, such as counters, have none
            stored[_name(index.fqn), _whole_numbers(index.offset)] = info
    paths = getattr(content, "planner_data", None) or {}
    tensors, pieces = {}, 0
    for name, entry in content.state_dict_metadata.items():  # type: ignore[attr-defined]
        if isinstance(entry, DcpTensorEntry):
            if not isinstance(name, str) or not name.isprintable():
                raise LocaterError(f"{path}: {_short(name)} is not the name of a tensor: {DAMAGED}")
            keys = _keys(paths.get(_name(name), (name,)))
            if not all(key.isprintable() for key in keys):
                raise LocaterError(f"{path}: {name!r:.80} is not the name of a tensor: {DAMAGED}")
            pieces += len(entry.chunks)  # type: ignore[attr-defined]
            if pieces > most:  # one list of pieces in the place of many
                raise LocaterError(f"{path}: names {pieces:,} pieces in {path.stat().st_size:,} bytes: {DAMAGED}")
            tensors[name] = _tensor(path, name, keys, entry, stored)
    return tensors


def _tensor(path: Path, name: str, keys: tuple[str, ...], entry: Any, stored: Mapping[Any, Any]) -> StoredTensor:
    properties = entry.properties
    state = getattr(properties, "state", None)
    dtype = getattr(properties, "dtype", None) or (state[0] if isinstance(state, tuple) and state else None)
    if not isinstance(dtype, torch.dtype):
        raise LocaterError(f"{path}: {name} has no dtype: {DAMAGED}")
    shape, pieces = _whole_numbers(entry.size), []
    begins: set[tuple[int, ...]] = set()
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
        if prod(sizes) and offsets in begins:
            raise LocaterError(f"{path}: two pieces of {name} begin at {list(offsets)}: {DAMAGED}")
        begins.add(offsets)
        start, length = _whole_numbers((info.offset, info.length))
        if prod(sizes) * dtype.itemsize > length:
            raise LocaterError(f"{path}: a piece of {name} is larger than the bytes that hold it: {DAMAGED}")
        pieces.append(Piece(offsets, sizes, _file_name(path, info.relative_path), start, length))
    if sum(prod(piece.sizes) for piece in pieces) != prod(shape):
        raise LocaterError(f"{path}: the pieces of {name} are not as large as it is, {list(shape)}: {DAMAGED}")
    return StoredTensor(keys, shape, dtype, tuple(pieces))


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > AXES:
        raise ValueError(f"{_short(values)} are not sizes")
    numbers = tuple(values)
    if not all(type(x) is int and 0 <= x < 1 << 62 for x in numbers):
        raise ValueError(f"{_short(numbers)} are not sizes")
    return numbers


def _keys(keys: Any) -> tuple[str, ...]:
    """The keys of the state that was saved: each a name, or a place in a list."""
    if not isinstance(keys, tuple | list) or not 0 < len(keys) <= DEEPEST:
        raise ValueError(f"{_short(keys)} is not a path of keys")
    return tuple(str(key) if type(key) is int else _name(key) for key in keys)


def _name(name: Any) -> str:
    """A name. What else may stand there (tuples of tuples) must not be hashed."""
    if not isinstance(name, str) or len(name) > LONGEST:
        raise ValueError(f"{_short(name)} is not a name")
    return name


def _short(value: Any) -> str:
    """A value for a message. What is nested is not followed: it can be endless."""
    return reprlib.repr(value)[:80]


def _file_name(path: Path, name: Any) -> str:
    """The name of a file in the folder of the checkpoint, and nowhere else."""
    if (
        not isinstance(name, str)
        or len(name) > LONGEST
        or PurePosixPath(name).name != name
        or "\\" in name
        or "\0" in name
    ):
        raise LocaterError(f"{path}: names the file {_short(name)}, which is not in its folder: refused")
    return name


# The tensors of the model.

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")  # under which trainers save the model


def is_dcp(folder: Path) -> bool:
    """Whether a folder has the index of such a checkpoint."""
    return is_there(folder / NAME)


class DcpWeights:
    """The tensors of the model in a checkpoint folder, by the names that they have in the model."""

    def __init__(self, folder: Path) -> None:
        self.where, self._folder = str(folder), folder
        self._tensors = _model_tensors(read_metadata(folder), self.where)
        ends: dict[str, int] = {}  # of the pieces in each file
        taken: dict[str, int] = {}  # bytes of each file by pieces with numbers in them
        for piece in (piece for tensor in self._tensors.values() for piece in tensor.pieces):
            ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.length)
            taken[piece.file] = taken.get(piece.file, 0) + piece.length * all(piece.sizes)
        files = ends.keys()
        missing = sorted(file for file in files if not is_there(folder / file))
        if missing:
            raise LocaterError(
                f"{folder}: {missing[0]} is not there ({len(missing)} of {len(files)} files with pieces of the model "
                "are missing): copy the whole folder, with what every rank has written"
            )
        for file, end in ends.items():
            size = regular_file(folder / file)
            if size < end:
                raise DamagedError(
                    "truncated", f"{folder / file}: has fewer than the {end:,} bytes that {NAME} names: {DAMAGED}"
                )
            if size < taken[file]:  # the same bytes for many tensors: a small file would become a large model
                raise LocaterError(f"{folder / file}: pieces overlap, {taken[file]:,} of {size:,} bytes: {DAMAGED}")

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._tensors[name]
        if not tensor.shape:
            if rows is not None:
                raise LocaterError(f"{self.where}: {name} is a single number, where rows of a map belong")
            return self._piece(name, tensor, tensor.pieces[0])
        ranges = [(0, tensor.shape[0])] if rows is None else [slice(a, b).indices(tensor.shape[0])[:2] for a, b in rows]
        shape = (sum(max(0, b - a) for a, b in ranges), *tensor.shape[1:])
        out, filled = torch.empty(shape, dtype=tensor.dtype), torch.zeros(shape, dtype=torch.bool)
        for piece in tensor.pieces:
            first, end = piece.offsets[0], piece.offsets[0] + piece.sizes[0]
            if not any(max(a, first) < min(b, end) for a, b in ranges):
                continue
            values, at = self._piece(name, tensor, piece), 0
            others = tuple(slice(o, o + n) for o, n in zip(piece.offsets[1:], piece.sizes[1:], strict=True))
            for a, b in ranges:
                low, high = max(a, first), min(b, end)
                if low < high:
                    here = (slice(at + low - a, at + high - a), *others)
                    out[here], filled[here] = values[low - first : high - first], True
                at += max(0, b - a)
        if not bool(filled.all()):
            raise LocaterError(f"{self.where}: pieces of {name} overlap, and others are missing: {DAMAGED}")
        return out

    def _piece(self, name: str, tensor: StoredTensor, piece: Piece) -> Tensor:
        path = self._folder / piece.file
        with path.open("rb") as file:
            file.seek(piece.start)
            data = io.BytesIO(file.read(piece.length))
        values = _loaded(data, f"{path}: its piece of {name}")
        if tuple(values.shape) != piece.sizes or values.dtype != tensor.dtype:
            raise LocaterError(
                f"{path}: its piece of {name} is {values.dtype} {list(values.shape)}, and {NAME} says {tensor.dtype} "
                f"{list(piece.sizes)}: {DAMAGED}"
            )
        return DictWeights({name: values}, str(path)).read(name)


def _loaded(data: io.BytesIO, where: str) -> Tensor:
    """The one tensor that `torch.save` has written into these bytes."""
    try:
        with zipfile.ZipFile(data) as archive:
            records_in(data, archive, where)
            sizes = [record.file_size for record in archive.infolist() if "/data/" in record.filename]
        check_archive(data, data.getbuffer().nbytes, where)
        data.seek(0)
        values = torch.load(data, map_location="cpu", weights_only=True)
    except LocaterError:
        raise
    except pickle.UnpicklingError:
        raise LocaterError(f"{where} holds more than a tensor: refused, since opening it could run its code") from None
    except Exception as error:  # bytes that are no archive, or hold more than a tensor
        raise LocaterError(f"{where} is not a stored tensor ({first_line(error)}): {DAMAGED}") from None
    if not isinstance(values, Tensor) or sizes[:1] != [values.untyped_storage().nbytes()] or len(sizes) > 1:
        raise LocaterError(f"{where} is not one tensor with its data: {DAMAGED}")
    return values


def _model_tensors(tensors: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors of the model, without the keys under which a trainer has saved it beside its other state."""
    groups: dict[tuple[str, ...], dict[str, StoredTensor]] = {}
    for tensor in tensors.values():
        groups.setdefault(tensor.path[:-1], {})[tensor.path[-1]] = tensor
    models = [keys for keys in groups if keys and keys[-1] in MODEL_KEYS and not any("optim" in key for key in keys)]
    if not models and () in groups:
        models = [()]
    if len(models) != 1:
        found = ", ".join(".".join(keys) or "(no key)" for keys in sorted(groups)[:6]) or "none"
        problem = "no model" if not models else "several models"
        raise LocaterError(
            f"{where}: {problem} among its states ({found}): save the model alone, or as the key 'model' of the state"
        )
    return groups[models[0]]
