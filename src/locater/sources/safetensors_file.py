"""Read safetensors files by byte range: rows of fused maps, and no tensor that is not needed.

The format is strict: a JSON header, then tensors that fill the rest of the file without gap or overlap. Every rule is
checked, so that a damaged file is refused and never read as other numbers.
"""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from locater.errors import DamagedError, LocaterError, printable
from locater.files import VALUES, refuse_duplicates, regular_file
from locater.sources.weights import Rows, join_files

DTYPES = {  # those that are read; whole numbers stand for quantised weights, which `quantised/` makes floats of
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES_BY_BITS = {  # the other dtypes of the format
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    16: "U16",
    32: "U32",
    64: "U64 C64",
}
BITS = {name: dtype.itemsize * 8 for name, dtype in DTYPES.items()}
BITS |= {name: bits for bits, names in NAMES_BY_BITS.items() for name in names.split()}
HEADER_LIMIT = 100_000_000  # bytes, the limit of the format
LARGEST = 2**63 - 1  # for the number of elements, the number of bytes and the length of an axis
FIELDS = {"dtype", "shape", "data_offsets"}
Entry = dict[str, Any]
F = TypeVar("F")  # a file: a path, or one that is elsewhere


class StoredTensors(Generic[F]):
    """Tensors of one or several safetensors files. What a file is, and how its bytes are read, say subclasses."""

    where: str
    _entries: dict[str, tuple[F, int, Entry]]

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][2]["shape"])

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        path, start, entry = self._entries[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise LocaterError(
                f"{path}: tensor {name} is stored as {entry['dtype']} (quantised?): dequantise the checkpoint first"
            )
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if rows is None:
            return self._bytes(path, start + begin, end - begin, dtype).view(shape)
        if not shape:
            raise LocaterError(f"{path}: tensor {printable(name)} is a single number, where rows of a map belong")
        stride = (end - begin) // max(shape[0], 1)
        parts = [self._bytes(path, start + begin + a * stride, (b - a) * stride, dtype) for a, b in rows]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(sum(b - a for a, b in rows), *shape[1:])

    def _bytes(self, path: F, offset: int, size: int, dtype: torch.dtype) -> Tensor:
        """`size` bytes from `offset` on, as a flat tensor."""
        raise NotImplementedError


class SafetensorsWeights(StoredTensors[Path]):
    """One or several safetensors files; `file_of` names the file of each tensor where there is an index."""

    read_by_threads = True  # several at a time

    def __init__(self, files: Sequence[Path], where: str, file_of: Mapping[str, Path] | None = None) -> None:
        self.where = where
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._entries = join_files(((path, _locate_tensors(path)) for path in files), where, file_of)

    def _bytes(self, path: Path, offset: int, size: int, dtype: torch.dtype) -> Tensor:
        """`size` bytes from `offset` on. The file is opened for each read, so threads do not share a position in it."""
        if not size:
            return torch.empty(0, dtype=dtype)
        buffer = torch.empty(size, dtype=torch.uint8)  # a bytearray would be filled with zeros first
        rest = buffer.numpy().data
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                while rest:  # a read can return less than the buffer takes; beyond 2 GB it always does
                    count = file.readinto(rest)
                    if not count:
                        raise DamagedError(
                            "truncated", f"{path}: ends before its data does: the file is truncated, download it again"
                        )
                    rest = rest[count:]
        except OSError as error:
            raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None
        with self._lock:
            self.bytes_read += size
        return buffer.view(dtype)


def _locate_tensors(path: Path) -> dict[str, tuple[Path, int, Entry]]:
    start, header = safetensors_header(path)
    return {name: (path, start, entry) for name, entry in header.items()}


def safetensors_header(path: Path) -> tuple[int, dict[str, Entry]]:
    """Offset of the data, and the entries of all tensors, checked by every rule of the format."""
    size = regular_file(path)
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 0 < length <= min(HEADER_LIMIT, size - 8):
                raise DamagedError(
                    "truncated", f"{path}: not a safetensors file, or truncated in its header ({size:,} bytes)"
                )
            text = file.read(length)
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None
    return 8 + length, parsed_header(path, text, size - 8 - length)


def parsed_header(path: object, text: bytes, room: int) -> dict[str, Entry]:
    """The entries of a header, in front of `room` bytes of data; `path` names the file in messages."""
    try:
        header = _parse_header(text)
    except RecursionError:
        raise LocaterError(
            f"{path}: its safetensors header is not readable (nested too deep): download it again"
        ) from None
    except ValueError as error:
        raise LocaterError(f"{path}: its safetensors header is not readable ({error}): download it again") from None
    _check_entries(path, header, room)
    return header


def _parse_header(text: bytes) -> dict[str, Any]:
    """The header without its metadata. Fractions, NaN and negative numbers, which Python's JSON allows, are refused."""
    if text[:1] != b"{":
        raise ValueError("it does not begin with '{'")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    if len(decoded) > VALUES and decoded.count(",") + decoded.count("[") + decoded.count("{") > VALUES:
        raise ValueError(f"more than {VALUES:,} values")
    header: dict[str, Any] = json.loads(
        decoded,
        object_pairs_hook=refuse_duplicates,
        parse_float=_refuse_number,
        parse_constant=_refuse_number,
        parse_int=_natural,
    )
    metadata = header.pop("__metadata__", None)
    strings = [*header]
    if metadata is not None:
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ contains something other than text")
        strings += [*metadata, *metadata.values()]
    if rb"\u" in text:
        "".join(strings).encode("utf-8")  # half of a surrogate pair raises UnicodeEncodeError, a ValueError
    return header


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text:.40}")


def _natural(text: str) -> int:
    if text.startswith("-"):
        raise ValueError(f"a negative number, {text:.40}")
    return int(text)


def _check_entries(path: object, header: Mapping[str, Any], room: int) -> None:
    """Refuse tensors whose bytes do not fit their shape, or that do not fill the `room` bytes of data exactly."""
    for name, entry in header.items():
        fault = _fault(entry)
        if fault:
            raise LocaterError(f"{path}: tensor {printable(name)} {fault}: the file is damaged, download it again")
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        if begin != end:
            raise LocaterError(
                f"{path}: tensor {printable(name)} begins at byte {begin} and not at {end}, where the one before it "
                "ends: the file is damaged, download it again"
            )
        end = stop
    if end > room:
        raise DamagedError("truncated", f"{path}: truncated, {room:,} bytes of data and not {end:,}: download it again")
    if end < room:
        more = room - end
        raise LocaterError(
            f"{path}: {more:,} byte{'s' * (more > 1)} more than its tensors take: it is damaged, download it again"
        )


def _fault(entry: Any) -> str | None:
    """What is wrong with a tensor's entry, or None."""
    if not isinstance(entry, dict) or not set(entry) >= FIELDS:
        return "has an entry without dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"has the dtype {dtype!r:.40}, which is not part of the format"
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        return f"has the shape {shape!r:.60} and the offsets {offsets!r:.60}, not lists of whole numbers"
    count = BITS[dtype]
    for axis in shape:  # axis by axis, so that a zero does not hide an overflow before it
        count *= axis
        if max(count, axis) > LARGEST:
            return f"has the shape {shape!r:.60}, more than a file can hold"
    begin, end = offsets
    if count != 8 * (end - begin):
        return f"has {end - begin} bytes for shape {shape!r:.60}"
    return None


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


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
        raise DamagedError(
            "stale-index",
            f"{where}: names the tensor {lost[0]}, which is not in {shard_of[lost[0]]} ({len(lost)} missing)",
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
            raise DamagedError(
                "missing-layer",
                f"{where}: {len(numbers)} of the {count} shards {stem}-*-of-{count:05}: give the folder with all",
            )


def _inside(shard: str) -> bool:
    """Whether the path of a shard stays inside the folder of its index, on every operating system."""
    parts = PureWindowsPath(shard).parts  # splits at both kinds of slash, and knows drives
    return bool(parts) and ".." not in parts and not PureWindowsPath(shard).anchor and "\0" not in shard
