"""Read and write files safely: only regular files are read, JSON has a size limit and no duplicate keys, and a file is
written completely or not at all.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from locater.errors import LocaterError

JSON_LIMIT = 100_000_000  # bytes; real indices have fewer than ten million
CONFIG_LIMIT = 4_000_000  # bytes of a configuration; the largest real ones, with the names of 20,000 classes, have one
VALUES = 4_000_000  # in a document: each takes some hundred bytes of memory, whatever it takes in the file


def regular_file(path: Path) -> int:
    """Size of a regular file in bytes. Anything else is refused: reading a pipe can hang, and a device never ends."""
    try:
        status = os.stat(path)
    except OSError as error:
        reason = "a link that leads nowhere" if path.is_symlink() else "cannot be read"
        raise LocaterError(f"{path}: {reason} ({error.strerror})") from None
    except ValueError:
        raise LocaterError(f"{str(path)!r}: no file can have this name") from None
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise LocaterError(f"{path}: {kind}, not a regular file: only regular files are read")
    return status.st_size


def is_there(path: Path) -> bool:
    """Whether there is a regular file at this path. Anything else at this path is refused."""
    return os.path.lexists(path) and regular_file(path) >= 0


def read_json(path: Path, unique: bool = False, most: int = JSON_LIMIT) -> Any:
    """The content of a JSON file of at most `most` bytes. `unique` refuses duplicate keys, of which Python would
    silently keep the last.
    """
    if regular_file(path) > most:
        raise LocaterError(f"{path}: more than {most:,} bytes, too large for a configuration or an index")
    try:
        return parse_json(path.read_text(encoding="utf-8"), unique)
    except RecursionError:
        raise LocaterError(f"{path}: not readable as JSON (nested too deep)") from None
    except ValueError as error:
        raise LocaterError(f"{path}: not readable as JSON ({error})") from None
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None


def parse_json(text: str, unique: bool = False) -> Any:
    """The content of a JSON text. ValueError if it is not JSON, or has more values than real files have.

    A value takes at least one byte of text, and a hundred times as much as an object.
    """
    if len(text) > VALUES and text.count(",") + text.count("[") + text.count("{") > VALUES:
        raise ValueError(f"more than {VALUES:,} values")
    return json.loads(text, object_pairs_hook=refuse_duplicates if unique else None)


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=...)`: the object, or ValueError if a key occurs twice."""
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name!r:.200} occurs twice")
            seen.add(name)
    return document


def write_whole(path: Path, content: str | bytes, flush: bool = False) -> None:
    """Write a file completely or not at all: readers never see half of it.

    Links are followed. A pipe or a device is written to directly. `flush` waits until the data are on the disk, so that
    they also survive a machine that stops.
    """
    path = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise LocaterError(f"{path}: cannot be written ({error.strerror})") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
