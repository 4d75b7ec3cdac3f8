"""Remote files and folders: what readers need of them, and those on the hub, in buckets and behind plain URLs."""

from __future__ import annotations

import threading
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from locater.errors import LocaterError
from locater.files import JSON_LIMIT, parse_json
from locater.sources.remote.address import Address
from locater.sources.remote.buckets import BucketListing, ask_bucket, import_obstore, listing, store_of
from locater.sources.remote.http_client import HttpClient, Stopped, Temporary, Traffic, pause
from locater.sources.remote.http_file import HttpFile, Location
from locater.sources.remote.hub import HubModel, hub_headers, hub_location, hub_model


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


def read_range(file: RangedFile, start: int, stop: int) -> bytearray:
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


def has_file(folder: RemoteFolder, name: str) -> bool:
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
        return parse_json(text.decode("utf-8"), unique)
    except RecursionError:
        raise LocaterError(f"{where}: not readable as JSON (nested too deep)") from None
    except ValueError as error:
        raise LocaterError(f"{where}: not readable as JSON ({error})") from None


# One object of a bucket, read by byte ranges and pinned to the ETag that was seen first.

CHUNK = 1 << 20  # bytes between two looks at whether the reader has been closed


class ObjectFile:
    """An object that is read in ranges. obstore retries what may be retried."""

    def __init__(self, address: Address, traffic: Traffic) -> None:
        self.address, self.where, self.name = address, str(address), address.name
        self.size: int | None = None
        self._version: str | None = None
        self._traffic = traffic
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        import_obstore(address)

    def __str__(self) -> str:
        return self.where

    def close(self) -> None:
        self._stopped.set()

    def fill(self, start: int, view: memoryview) -> int:
        """Put the bytes from `start` on into `view`; how many there were, fewer only where the object ends. What comes
        short is asked for again.
        """
        filled, tries = 0, 0
        while filled < len(view) and (self.size is None or start + filled < self.size):
            got = ask_bucket(self.address, partial(self._fill, start + filled, view[filled:]))
            tries = 0 if got else tries + 1
            if not got:
                pause(self.where, Temporary("the bucket sends no bytes"), tries, self._stopped)
            filled += got
        return filled

    def whole(self) -> bytes | None:
        import obstore

        self._traffic.add(requests=1)
        result = ask_bucket(self.address, lambda: self._unless_missing(obstore.get, store_of(self.address)))
        if result is None:
            return None
        if result.meta["size"] > JSON_LIMIT:
            raise LocaterError(
                f"{self.where}: more than {JSON_LIMIT:,} bytes, too large for a configuration or an index"
            )
        body = ask_bucket(self.address, lambda: bytes(result.bytes()))
        self._traffic.add(bytes=len(body))
        return body

    def save(self, path: Path) -> None:
        """Write all of the object to `path`."""
        import obstore

        def copy() -> None:
            result = obstore.get(store_of(self.address), self.address.path)
            with path.open("wb") as target:
                for chunk in result.stream(min_chunk_size=CHUNK):
                    if self._stopped.is_set():
                        raise Stopped
                    self._traffic.add(bytes=target.write(chunk))
            if path.stat().st_size != result.meta["size"]:
                raise LocaterError(f"{self.where}: came short: try again")

        self._traffic.add(requests=1)
        ask_bucket(self.address, copy)

    def facts(self) -> tuple[int, str] | None:
        import obstore

        self._traffic.add(requests=1)
        meta = ask_bucket(self.address, lambda: self._unless_missing(obstore.head, store_of(self.address)))
        return None if meta is None else (int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))

    def _unless_missing(self, question: Any, store: Any) -> Any:
        try:
            return question(store, self.address.path)
        except FileNotFoundError:
            return None

    def _fill(self, start: int, view: memoryview) -> int:
        import obstore

        options: dict[str, Any] = {"range": (start, start + len(view))}
        if self._version is not None and not self._version.startswith("W/"):
            options["if_match"] = self._version
        self._traffic.add(requests=1)
        result = obstore.get(store_of(self.address), self.address.path, options=options)
        if result.range[0] != start:
            raise LocaterError(f"{self.where}: bytes from {result.range[0]} came, and not from {start}: refused")
        self._pin(result.meta)
        got = 0
        for chunk in result.stream(min_chunk_size=CHUNK):
            if self._stopped.is_set():
                raise Stopped
            count = min(len(chunk), len(view) - got)
            view[got : got + count] = memoryview(chunk)[:count]
            got += count
            self._traffic.add(bytes=count)
        return got

    def _pin(self, meta: Any) -> None:
        """Remember size and ETag of the object, or compare them with those that were seen first."""
        size, version = int(meta["size"]), meta["e_tag"]
        with self._lock:
            if self.size is None:
                self.size, self._version = size, version
            if (self.size, self._version) != (size, version):
                raise LocaterError(f"{self.where}: changed while it was read: start again")


# The folders.


class HubFolder:
    """A folder of a model on the hub, at the commit that its revision was at when it was asked for first."""

    def __init__(self, address: Address, traffic: Traffic) -> None:
        self.address = address
        self._client = HttpClient(traffic)

    @cached_property
    def model(self) -> HubModel:
        return hub_model(self.address)

    def names(self) -> list[str]:
        start = f"{self.address.path}/" if self.address.path else ""
        inside = (name.removeprefix(start) for name in self.model.files if name.startswith(start))
        return [name for name in inside if "/" not in name]

    def digests(self) -> dict[str, str]:
        files = {name: self.model.files[self.address.inside(name).path] for name in self.names()}
        return {name: f"{file.digest} {file.size}" for name, file in files.items()}

    def file(self, name: str) -> HttpFile:
        address = self.address.inside(name)

        def resolve() -> Location:
            found = hub_location(address, self.model.commit)
            return Location(found.location, found.etag, found.size)

        # what a commit holds does not change, and not every host behind the hub knows If-Match
        return HttpFile(self._client, str(address), resolve, hub_headers, conditional=False)


class BucketFolder:
    """A prefix of a bucket."""

    def __init__(self, address: Address, traffic: Traffic) -> None:
        self.address = address
        self._traffic = traffic

    @cached_property
    def _listing(self) -> BucketListing:
        return listing(self.address)

    def names(self) -> list[str]:
        return list(self._listing.objects)

    def folders(self) -> list[str]:
        return self._listing.folders

    def digests(self) -> dict[str, str]:
        return {name: f"{found.digest} {found.size}" for name, found in self._listing.objects.items()}

    def file(self, name: str) -> ObjectFile:
        return ObjectFile(self.address.inside(name), self._traffic)


class HttpFolder:
    """A folder of a plain server, which does not list what is in it."""

    def __init__(self, address: Address, traffic: Traffic) -> None:
        self.address = address
        self._client = HttpClient(traffic)

    def names(self) -> None:
        return None

    def digests(self) -> dict[str, str]:
        return {}

    def file(self, name: str) -> HttpFile:
        address = self.address.inside(name)
        return HttpFile(self._client, str(address), lambda: Location(address.url))


def folder_of(address: Address, traffic: Traffic | None = None) -> RemoteFolder:
    """The folder at an address; for a weights file, the folder that it is in."""
    folder, traffic = address.folder if address.names_a_file else address, traffic or Traffic()
    if folder.scheme == "hf":
        return HubFolder(folder, traffic)
    return HttpFolder(folder, traffic) if folder.scheme == "http" else BucketFolder(folder, traffic)
