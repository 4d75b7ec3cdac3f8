"""The remote files of one piece of work: their traffic, what is fetched ahead, and the end of all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.sources.remote.ahead import THREADS, Ahead, Plan, Read
from locater.sources.remote.ranged import RangedFile, read
from locater.sources.remote.traffic import Traffic

_CURRENT: ContextVar[Session | None] = ContextVar("session", default=None)
_RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


@dataclass
class Record:
    """Ranges that were asked for. Tensors of up to `small` bytes are zeros, larger ones have a shape and no data."""

    small: int
    reads: list[Read] = field(default_factory=list)

    def tensor(self, file: RangedFile, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        self.reads.append((file, start, stop))
        return self.stand_in(stop - start, dtype)

    def stand_in(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size // dtype.itemsize, dtype=dtype, device="cpu" if size <= self.small else "meta")

    def taken(self) -> list[Read]:
        """What was asked for since the last call."""
        taken, self.reads = self.reads, []
        return taken


class Session:
    """Remote files that were opened together."""

    def __init__(self, traffic: Traffic | None = None) -> None:
        self.traffic = traffic or Traffic()
        self.files: list[RangedFile] = []
        self._ahead: Ahead | None = None

    def read_ahead(self, plan: Plan) -> None:
        """Begin to fetch what a plan says."""
        self._ahead = Ahead(plan)
        self.traffic.add(planned=self.traffic.bytes + self._ahead.planned)  # headers have come already

    def bytes(self, file: RangedFile, start: int, stop: int) -> bytearray | memoryview:
        """A range of a file: one that was fetched ahead, or else one that is read now."""
        data: bytearray | memoryview | None = self._ahead.take(file, start, stop) if self._ahead is not None else None
        if data is None:
            data = read(file, start, stop)
        if len(data) != stop - start:
            raise LocaterError(f"{file.where}: ends before its data does: the file is truncated")
        return data

    def in_threads(self, function: Any, files: Sequence[RangedFile]) -> list[Any]:
        """`function` of each file, in threads. The first failure ends the others."""
        self.files += files
        pool = ThreadPoolExecutor(min(THREADS, len(files)) or 1, "locater-headers")
        try:
            return list(pool.map(function, files))
        except BaseException:
            self.close()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End all reads, and the threads that wait for them."""
        self.end_reading_ahead()
        for file in self.files:
            file.close()

    def end_reading_ahead(self) -> None:
        """From now on, ranges are read when they are asked for."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


@contextlib.contextmanager
def session(traffic: Traffic | None = None, keep_open: bool = False) -> Iterator[Session]:
    """Remote sources that are opened inside are closed at its end, however it ends. With `keep_open` they stay open
    unless it ends with an error, and only reading ahead ends.
    """
    opened = Session(traffic)
    token = _CURRENT.set(opened)
    try:
        yield opened
    except BaseException:
        keep_open = False
        raise
    finally:
        _CURRENT.reset(token)
        opened.end_reading_ahead()
        if not keep_open:
            opened.close()


def current_session() -> Session:
    """The session around this call; one of its own for a source that is opened outside of any."""
    return _CURRENT.get() or Session()


@contextlib.contextmanager
def recorded(small: int = 0) -> Iterator[Record]:
    """Inside, reads of remote files fetch nothing: they are listed, and give tensors that stand in for real ones."""
    record = Record(small)
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def recording() -> Record | None:
    return _RECORD.get()
