"""Files: written whole or not at all; read only where they are regular, JSON of a bounded size, and no name that stands
twice.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from locater.errors import LocaterError

JSON_LIMIT = 100_000_000  # bytes of a configuration or an index; real ones have less than ten million


def regular_file(path: Path) -> int:
    """Size of a regular file. A folder, a pipe, a socket, a device or a link that leads nowhere is refused by name:
    reading a pipe hangs, and a device never ends."""
    try:
        status = os.stat(path)
    except OSError as error:
        what = "a link that leads nowhere" if path.is_symlink() else "cannot be read"
        raise LocaterError(f"{path}: {what} ({error.strerror})") from None
    except ValueError:
        raise LocaterError(f"{str(path)!r}: no file can have this name") from None
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        what = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise LocaterError(f"{path}: {what}, not a regular file: only regular files are read")
    return status.st_size


def is_there(path: Path) -> bool:
    """Whether a regular file has this name; anything else with this name is refused."""
    return os.path.lexists(path) and regular_file(path) >= 0


def read_json(path: Path, unique: bool = False) -> Any:
    """What a JSON file holds; `unique` refuses objects with a key twice, of which the last would win without a word."""
    if regular_file(path) > JSON_LIMIT:
        raise LocaterError(f"{path}: more than {JSON_LIMIT:,} bytes, too long for what it should be")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates if unique else None)
    except RecursionError:
        raise LocaterError(f"{path}: not readable as JSON (nested too deep)") from None
    except ValueError as error:
        raise LocaterError(f"{path}: not readable as JSON ({error})") from None
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys stand once each."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
    return made


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it appears whole or not at all. Links are followed; what is no file (a pipe, a device) is
    written into.
    """
    path = Path(os.path.realpath(path))
    held = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(held)
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(held)
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
