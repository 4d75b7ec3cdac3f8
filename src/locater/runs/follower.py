"""Reads the log of a run while it grows, and tells a live page what has come since its last request."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from locater.errors import LocaterError
from locater.runs.page_data import VALUES, Curve, pack, thin
from locater.runs.records import Record
from locater.runs.run_log import find_log, lines_of
from locater.runs.run_reader import RunReader

FINGERPRINT = 4_096  # bytes at both ends of the part that was read, by which the file is recognized


class Follower:
    """Follows one log. Each look costs as much as what was appended since the last, not as the whole file."""

    def __init__(self, path: str | os.PathLike[str], room: int = VALUES) -> None:
        self.path = Path(path)
        self.room = room  # numbers that a page has room for
        self._lock = threading.Lock()
        self._revision = time.time_ns() // 1_000_000  # differs from those of an earlier server, whose pages may be open
        self._log: Path | None = None  # the log in the folder; stays the same if others appear beside it
        self._restart()

    def _restart(self) -> None:
        self._reader: RunReader | None = None
        self._offset, self._file, self._changed, self._error = 0, (0, 0), 0.0, ""
        self._fingerprint = b"", b""  # of the part that has been read
        self._sent: dict[int, list[Record]] = {}  # the steps that were drawn at the last few revisions
        self._curves: dict[str, Curve] = {}
        self._drawn: dict[int, tuple[Record, Record]] = {}  # by step: a record, and the same with its heads' numbers
        self._rewrites = 0

    def look(self) -> None:
        """Read what has been written since the last look, up to the last complete line."""
        if self._log is None or not self._log.is_file():
            self._log = find_log(self.path)
        log = self._log
        if log is None:
            return
        with log.open("rb") as file:
            status = os.fstat(file.fileno())
            if (
                (status.st_dev, status.st_ino) != self._file
                or status.st_size < self._offset
                or self._fingerprint_of(file) != self._fingerprint
            ):
                self._restart()  # another file under this name, or the same one written anew
                self._file, self._reader = (status.st_dev, status.st_ino), RunReader(log, stored=True)
            self._changed = status.st_mtime
            if self._reader is None or self._error or status.st_size == self._offset:
                return
            self._read_on(file, self._reader, log)

    def _read_on(self, file: BinaryIO, reader: RunReader, log: Path) -> None:
        before = self._offset
        file.seek(before)
        try:
            reader.feed(self._complete_lines(file, log))
        except LocaterError as error:
            self._error, self._fingerprint = str(error), self._fingerprint_of(file)
            raise
        if self._offset > before:
            self._revision += 1
            self._fingerprint = self._fingerprint_of(file)
        elif before == 0:
            _check_beginning(file, log)

    def _complete_lines(self, file: BinaryIO, log: Path) -> Iterator[bytes]:
        for line in lines_of(file, log):
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            yield line

    def _fingerprint_of(self, file: BinaryIO) -> tuple[bytes, bytes]:
        """Beginning and end of the part that has been read. Appending changes neither."""
        size = min(FINGERPRINT, self._offset)
        file.seek(0)
        head = file.read(size)
        file.seek(self._offset - size)
        return head, file.read(size)

    def waiting(self) -> str:
        """Why there is nothing to draw yet; empty when there is a run."""
        if self._reader is None:
            return f"no log in {self.path} yet" if self.path.is_dir() else f"{self.path} does not exist yet"
        if self._reader.header is not None:
            return ""
        if self._reader.torn:
            raise LocaterError(f"{self._reader.path}: not a run log: line {self._reader.torn} is not a run record")
        empty = not self._reader.path.stat().st_size
        return f"{self._reader.path} {'is empty' if empty else 'has no whole line yet'}"

    def answer(self, after: int) -> dict[str, Any]:
        """What a page that knows revision `after` lacks, and the log's `age` in seconds.

        It is `waiting` before the first record, and `error` for a file that is not a log.
        """
        with self._lock:
            try:
                self.look()
                if self._error:  # nothing below a bad line can be trusted, until the file is replaced
                    return {"error": self._error}
                if self.waiting() or self._reader is None:
                    return {"waiting": str(self.path)}
            except (LocaterError, OSError) as error:
                return {"error": str(error)}
            state = {"revision": self._revision, "age": max(0.0, round(time.time() - self._changed, 1))}
            return state if after == self._revision else {**state, **self._news(self._reader, after)}

    def _news(self, reader: RunReader, after: int) -> dict[str, Any]:
        run = reader.run()
        assert run is not None
        if reader.rewrites != self._rewrites:
            self._curves, self._rewrites = {}, reader.rewrites
        for name, points in reader.curves.items():
            curve = self._curves.setdefault(name, Curve())
            for point in points[curve.count :]:
                curve.add(point)
        drawn, stride = thin(run, self.room)
        pairs = zip(self._sent.get(after, []), drawn, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))
        self._sent = {**dict(list(self._sent.items())[-3:]), self._revision: drawn}
        self._read_heads(reader, drawn)
        drawn_run = replace(run, with_heads=lambda records: [self._drawn[record["step"]][1] for record in records])
        return pack(drawn_run, drawn, stride, same, self._curves)

    def _read_heads(self, reader: RunReader, drawn: list[Record]) -> None:
        """Keep the numbers of the steps that are drawn, and no others: pages have room for so many."""
        kept = {record["step"]: self._drawn.get(record["step"], (None, record)) for record in drawn}
        missing = [record for record in drawn if kept[record["step"]][0] is not record]
        found = reader.with_heads(missing) if missing else []  # the log may be gone
        read = dict(zip((record["step"] for record in missing), found, strict=True))
        self._drawn = {x["step"]: (x, read[x["step"]] if x["step"] in read else kept[x["step"]][1]) for x in drawn}


def _check_beginning(file: BinaryIO, log: Path) -> None:
    file.seek(0)
    start = file.read(64).lstrip()
    if start and not start.startswith(b"{"):
        raise LocaterError(f"{log}: not a run log: its first line does not begin with a JSON object")
