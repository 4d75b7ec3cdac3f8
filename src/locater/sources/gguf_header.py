"""Read the header of a GGUF file: the metadata, and the position of each tensor. As strict as llama.cpp.

Counts and lengths are compared with the size of the file before they are used, so no number in the file can cost more
memory or time than the file itself would. Tensors have to follow one another in the order of their entries, each padded
to the alignment, so that no offset can point into another tensor.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from locater.errors import LocaterError, printable
from locater.files import regular_file

HEADER_LIMIT = 100_000_000  # bytes; the longest known vocabularies take a tenth of it
MOST = 500_000  # keys, and tensors: each takes more memory than bytes
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in CODES.items()}
BOOL, TEXT, ARRAY, UINT32 = 7, 8, 9, 4
# the fewest bytes that a value of each type takes
LEAST = {TEXT: 8, ARRAY: 12} | {kind: scalar.size for kind, scalar in SCALARS.items()}
DEEPEST = 4  # levels of arrays inside arrays
AXES = 4  # at most, of a tensor
VERSIONS = (2, 3)
COUNT, KIND, AXIS = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<q")
ALIGNMENT = "general.alignment"


class TensorEntry(NamedTuple):
    """The position of a tensor in the file. `shape` lists axes from the fastest to the slowest, as the file does."""

    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    start: int
    size: int


class Array(NamedTuple):
    """The length of a setting that is an array. No setting that is used is an array, so the elements are not read."""

    length: int


@dataclass(frozen=True)
class Header:
    fields: dict[str, Any]
    tensors: dict[str, TensorEntry]
    data: np.memmap[Any, Any]  # the whole file, mapped


def read_header(path: Path) -> Header:
    """The header of a file. A damaged file is refused with the reason."""
    size = regular_file(path)
    if size < 24:
        raise LocaterError(f"{path}: not a readable GGUF file ({size} bytes)")
    try:
        data = np.memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise LocaterError(f"{path}: cannot be read ({error})") from None
    cursor = _Cursor(path, memoryview(data))  # type: ignore[arg-type]
    try:
        tensor_count, key_count = cursor.start()
        fields: dict[str, Any] = {}
        for _ in range(key_count):
            name = cursor.text()
            if name in fields:
                cursor.refuse(f"the key {name!r:.80} occurs twice")
            kind = cursor.take(KIND)
            fields[name] = cursor.value(kind, name)
            if name == ALIGNMENT and kind != UINT32:
                cursor.refuse(f"{ALIGNMENT} has a value of type {kind}")
        tensors = _tensors(cursor, tensor_count, fields)
    except struct.error:
        raise LocaterError(f"{path}: not a readable GGUF file (truncated in its header): download it again") from None
    except UnicodeDecodeError:
        raise LocaterError(
            f"{path}: not a readable GGUF file (a name or a text is not UTF-8): download it again"
        ) from None
    return Header(fields, tensors, data)


class _Cursor:
    """Reads forward through the header; reading past the end raises struct.error."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data[:HEADER_LIMIT]
        self.size = len(data)
        self.at = 0

    def refuse(self, reason: str) -> NoReturn:
        raise LocaterError(f"{self.path}: not a readable GGUF file ({reason}): download it again")

    def take(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def skip(self, size: int) -> int:
        """Move forward by `size` bytes and return where they begin."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise struct.error
        return begin

    def text(self) -> str:
        length = self.take(COUNT)
        begin = self.skip(length)
        return str(self.data[begin : begin + length], "utf-8")

    def start(self) -> tuple[int, int]:
        """Check the magic bytes and the version; return the numbers of tensors and keys."""
        if bytes(self.data[:4]) != b"GGUF":
            self.refuse("it does not begin with GGUF")
        self.at = 4
        version = self.take(KIND)
        if version & 0xFFFF == 0:
            self.refuse("it is written in the other byte order; convert it with gguf-convert-endian")
        if version not in VERSIONS:
            self.refuse(f"version {version}; versions {VERSIONS} are supported")
        tensors, keys = self.take(COUNT), self.take(COUNT)
        for count, least, kind in ((tensors, 24, "tensors"), (keys, 13, "keys")):
            if count * least > len(self.data) or count > MOST:
                self.refuse(f"{count:,} {kind} in {self.size:,} bytes")
        return tensors, keys

    def value(self, kind: int, name: str, depth: int = 0) -> Any:
        """A setting: a number, a text, or the length of an array."""
        if kind == TEXT:
            return self.text()
        if kind == BOOL:
            truth = self.take(SCALARS[BOOL])
            if truth > 1:
                self.refuse(f"the key {name!r:.80} is neither true nor false")
            return bool(truth)
        if kind in SCALARS:
            return self.take(SCALARS[kind])
        if kind != ARRAY:
            self.refuse(f"the key {name!r:.80} has a value of type {kind}")
        return self.array(name, depth)

    def array(self, name: str, depth: int) -> Array:
        if depth == DEEPEST:
            self.refuse(f"the key {name!r:.80} has arrays nested more than {DEEPEST} deep")
        kind, count = self.take(KIND), self.take(COUNT)
        if kind not in LEAST:
            self.refuse(f"the key {name!r:.80} has a value of type {kind}")
        if count * LEAST[kind] > len(self.data) - self.at:
            self.refuse(f"the key {name!r:.80} has an array of {count:,} in {self.size:,} bytes")
        if kind in SCALARS:
            self.skip(count * SCALARS[kind].size)
        elif kind == TEXT:
            self.skip_texts(count)
        else:
            for _ in range(count):
                self.array(name, depth + 1)
        return Array(count)

    def skip_texts(self, count: int) -> None:
        """Skip an array of texts by their lengths alone: vocabularies have hundreds of thousands."""
        data, at, length, end = self.data, self.at, COUNT.unpack_from, len(self.data)
        for _ in range(count):
            at += 8 + length(data, at)[0]
            if at > end:
                raise struct.error
        self.at = at


def _tensors(cursor: _Cursor, count: int, fields: dict[str, Any]) -> dict[str, TensorEntry]:
    """The entries of all tensors. Their offsets count from the end of the header, padded to the alignment."""
    entries: dict[str, tuple[tuple[int, ...], Any, int, int]] = {}
    for _ in range(count):
        name = cursor.text()
        if name in entries:
            cursor.refuse(f"the tensor {printable(name)} occurs twice")
        entries[name] = _entry(cursor, name)
    alignment = fields.get(ALIGNMENT, 32)
    if alignment < 1 or alignment & (alignment - 1):
        cursor.refuse(f"{ALIGNMENT} is {alignment}, not a power of two")

    def padded(size: int) -> int:
        return -(-size // alignment) * alignment

    begin, expected = padded(cursor.at), 0
    tensors = {}
    for name, (shape, kind, offset, size) in entries.items():
        if offset != expected:
            where = f"begins at byte {offset:,} of the data and not at {expected:,}, where the last one ends"
            cursor.refuse(f"the tensor {printable(name)} {where}")
        if begin + offset + size > cursor.size:
            cursor.refuse(
                f"truncated: the tensor {printable(name)} ends at byte {begin + offset + size:,} of {cursor.size:,}"
            )
        tensors[name] = TensorEntry(shape, kind, begin + offset, size)
        expected += padded(size)
    return tensors


def _entry(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], Any, int, int]:
    """Shape, type, offset and size in bytes of a tensor."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    axes = cursor.take(KIND)
    if axes > AXES:
        cursor.refuse(f"the tensor {printable(name)} has {axes} axes")
    shape = tuple(cursor.take(AXIS) for _ in range(axes))
    if any(axis < 1 for axis in shape):  # no tensor is empty, and a length beyond 2^63 reads as negative
        cursor.refuse(f"the tensor {printable(name)} has the shape {shape}")
    number, offset = cursor.take(KIND), cursor.take(COUNT)
    if number not in GGMLQuantizationType._value2member_map_:
        cursor.refuse(
            f"the tensor {printable(name)} is stored as type {number}, which the installed gguf package does not know"
        )
    kind = GGMLQuantizationType(number)
    block, size = GGML_QUANT_SIZES[kind]
    if (shape[0] if shape else 1) % block:
        cursor.refuse(f"the tensor {printable(name)} has the shape {list(shape)} in blocks of {block}")
    return shape, kind, offset, math.prod(shape) // block * size
