"""Files that are on the disk once they are written, with their SHA-256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class SummedFile:
    """A file that adds up the SHA-256 of everything written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sum = file, hashlib.sha256()

    def write(self, part: bytes) -> int:
        self.sum.update(part)
        return self.file.write(part)

    def flush(self) -> None:  # torch.save calls it
        self.file.flush()


@contextmanager
def writing(path: Path) -> Iterator[SummedFile]:
    """A new file, flushed to the disk at the end of the block."""
    with path.open("wb") as file:
        summed = SummedFile(file)
        yield summed
        summed.flush()
        os.fsync(file.fileno())


def write(path: Path, *parts: bytes) -> str:
    """Write and flush a file; returns its SHA-256."""
    with writing(path) as file:
        for part in parts:
            file.write(part)
    return file.sum.hexdigest()


def flush_folder(folder: Path) -> None:
    if os.name == "posix":  # other systems cannot open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
