"""One object of a bucket, read by byte ranges and pinned to the ETag that was seen first."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.files import JSON_LIMIT
from locater.sources.remote.address import Address
from locater.sources.remote.objects import asked, import_obstore, store_of
from locater.sources.remote.retrying import Stopped, Temporary, pause
from locater.sources.remote.traffic import Traffic

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
            got = asked(self.address, partial(self._fill, start + filled, view[filled:]))
            tries = 0 if got else tries + 1
            if not got:
                pause(self.where, Temporary("the bucket sends no bytes"), tries, self._stopped)
            filled += got
        return filled

    def whole(self) -> bytes | None:
        import obstore

        self._traffic.add(requests=1)
        result = asked(self.address, lambda: self._unless_missing(obstore.get, store_of(self.address)))
        if result is None:
            return None
        if result.meta["size"] > JSON_LIMIT:
            raise LocaterError(
                f"{self.where}: more than {JSON_LIMIT:,} bytes, too large for a configuration or an index"
            )
        body = asked(self.address, lambda: bytes(result.bytes()))
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
        asked(self.address, copy)

    def facts(self) -> tuple[int, str] | None:
        import obstore

        self._traffic.add(requests=1)
        meta = asked(self.address, lambda: self._unless_missing(obstore.head, store_of(self.address)))
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
