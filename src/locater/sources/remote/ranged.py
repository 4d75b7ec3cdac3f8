"""What the readers need of a remote file and of a remote folder, whatever protocol is behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from locater.errors import LocaterError
from locater.files import JSON_LIMIT, parsed_json
from locater.sources.remote.address import Address


class RangedFile(Protocol):
    """A file that is read by byte ranges, and refused if it changes while it is read."""

    where: str  # for messages
    name: str
    size: int | None  # known after the first read

    def fill(self, start: int, view: memoryview) -> int:
        """Put the bytes from `start` on into `view`; how many there were, fewer only where the file ends."""

    def whole(self) -> bytes | None:
        """All bytes of a small file; None where there is no such file."""

    def facts(self) -> tuple[int, str] | None:
        """Size, and what changes with the content; None where there is no such file."""

    def save(self, path: Path) -> None:
        """Write all of the file to `path`, without ranges."""

    def close(self) -> None:
        """End reads that wait in other threads."""


def read(file: RangedFile, start: int, stop: int) -> bytearray:
    """The bytes from `start` to `stop`, fewer only where the file ends."""
    buffer = bytearray(stop - start)
    with memoryview(buffer) as view:
        count = file.fill(start, view)
    return buffer if count == len(buffer) else buffer[:count]


class RemoteFolder(Protocol):
    """A folder of a checkpoint."""

    address: Address

    def names(self) -> list[str] | None:
        """Names of the files in it; None where the server does not list them."""

    def digests(self) -> dict[str, str]:
        """What changes with the content of each file, where the server lists files."""

    def file(self, name: str) -> RangedFile: ...


def has(folder: RemoteFolder, name: str) -> bool:
    """Whether a file is in a folder; asked for where the server lists none."""
    names = folder.names()
    return name in names if names is not None else folder.file(name).facts() is not None


def remote_json(folder: RemoteFolder, name: str, unique: bool = False, most: int = JSON_LIMIT) -> Any:
    """The content of a JSON file; None where there is no such file. `unique` refuses duplicate keys, `most` a larger
    one.
    """
    names = folder.names()
    if names is not None and name not in names:
        return None
    where, text = folder.address.inside(name), folder.file(name).whole()
    if text is None:
        return None
    if len(text) > most:
        raise LocaterError(f"{where}: more than {most:,} bytes, too large for a configuration or an index")
    try:
        return parsed_json(text.decode("utf-8"), unique)
    except RecursionError:
        raise LocaterError(f"{where}: not readable as JSON (nested too deep)") from None
    except ValueError as error:
        raise LocaterError(f"{where}: not readable as JSON ({error})") from None
