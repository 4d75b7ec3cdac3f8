"""Safetensors files that are elsewhere: the header first, then only the bytes that are asked for."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.sources.remote.ranged import RangedFile, read
from locater.sources.remote.session import current_session, recording
from locater.sources.safetensors_file import HEADER_LIMIT, Entry, StoredTensors, parsed_header
from locater.sources.weights import joined

FIRST = 1 << 16  # bytes of the first request: most headers are shorter


class RemoteWeights(StoredTensors[RangedFile]):
    """One or several safetensors files, read by ranges; `file_of` names the file of each tensor, as for local ones."""

    def __init__(
        self, files: Sequence[RangedFile], where: str, file_of: Mapping[str, RangedFile] | None = None
    ) -> None:
        self.where = where
        self._session = current_session()
        self._heads: dict[int, bytearray] = {}  # the first bytes of each file, which may hold small tensors
        located = self._session.in_threads(self._located, files)
        self._entries = joined(zip(files, located, strict=True), where, file_of)

    def _located(self, file: RangedFile) -> dict[str, tuple[RangedFile, int, Entry]]:
        """Every tensor of a file: where it begins, and its entry in the header."""
        head = read(file, 0, FIRST)
        size = len(head) if file.size is None else file.size
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
        if not 0 < length <= min(HEADER_LIMIT, size - 8):
            raise LocaterError(f"{file.where}: not a safetensors file, or truncated in its header ({size:,} bytes)")
        if 8 + length > len(head):
            head += read(file, len(head), 8 + length)
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
        if isinstance(data, memoryview) and (2 * size < len(data.obj) or _misplaced(data, dtype)):  # type: ignore[arg-type]
            data = bytearray(data)
        return torch.frombuffer(data, dtype=dtype)


def _misplaced(data: memoryview, dtype: torch.dtype) -> bool:
    """Whether bytes begin at an address that is no multiple of the size of a number."""
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr() % dtype.itemsize != 0
