"""Files that are on the disk once they are written, with their SHA-256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class SummedFile:
    """A file that is written to, and the sum of what was."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sum = file, hashlib.sha256()

    def write(self, part: bytes) -> int:
        self.sum.update(part)
        return self.file.write(part)

    def flush(self) -> None:  # torch.save asks for it
        self.file.flush()


@contextmanager
def writing(path: Path) -> Iterator[SummedFile]:
    """A new file, on the disk when this ends."""
    with path.open("wb") as file:
        summed = SummedFile(file)
        yield summed
        summed.flush()
        os.fsync(file.fileno())


def write(path: Path, *parts: bytes) -> str:
    """Returns the SHA-256 of what was written."""
    with writing(path) as file:
        for part in parts:
            file.write(part)
    return file.sum.hexdigest()


def flush_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere folders cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
