"""The remote files of one piece of work: byte ranges that are prefetched, their traffic, and the end of all of it.

A plan is a list of steps, each with the ranges that are read in it; the steps of a scan are the gains and biases of all
layers, then one layer after the other. Neighbours are merged and large ranges split; they are fetched in that order by
threads, within a budget of bytes, and let go when a later step begins. What is read and not planned is fetched when it
is read, so a wrong plan costs time and never a number.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.sources.remote.folders import RangedFile, read_range
from locater.sources.remote.http_client import Traffic

Read = tuple[RangedFile, int, int]  # file, first byte, byte after the last
Plan = Sequence[Sequence[Read]]
Step = Iterable[Callable[[], Any]]  # what reads tensors
THREADS = 16
BUDGET = 512 << 20  # bytes that are fetched and not yet let go
GAP = 1 << 20  # bytes between two ranges that may be read with them
WASTE = 0.1  # of the bytes that are needed, at most read in gaps
FREE_WASTE = 1 << 20  # bytes, where that is more: small checkpoints are read in a few requests
PIECE = 16 << 20  # bytes of one request


@dataclass
class ByteBuffer:
    """Where neighbouring requests put their bytes, so that a range of several of them is not copied."""

    start: int
    stop: int
    data: bytearray | None = field(default=None, repr=False)

    def part(self, start: int, stop: int) -> memoryview:
        if self.data is None:
            self.data = bytearray(self.stop - self.start)
        return memoryview(self.data)[start - self.start : stop - self.start]


@dataclass
class ByteRange:
    """Bytes of one request, from the step that reads them first to the one that reads them last."""

    file: RangedFile
    start: int
    stop: int
    first: int
    last: int
    memory: ByteBuffer | None = field(default=None, repr=False)
    came: Future[int] | None = field(default=None, repr=False)  # how many bytes
    released: bool = False


def byte_ranges(plan: Plan) -> list[ByteRange]:
    """The requests of a plan, in the order of its steps. No byte is in two of them."""
    groups: dict[tuple[int, int], list[ByteRange]] = {}
    spans: dict[tuple[int, int, int], ByteRange] = {}
    for step, reads in enumerate(plan):
        for file, start, stop in reads:
            key = (id(file), start, stop)
            if key not in spans:
                spans[key] = ByteRange(file, start, stop, step, step)
                groups.setdefault((step, id(file)), []).append(spans[key])
            spans[key].last = step
    touching = [_unite(group, 0) for group in groups.values()]
    needed = sum(block.stop - block.start for group in touching for block in group)
    gap = _widest_gap(touching, max(int(WASTE * needed), FREE_WASTE))
    blocks: list[ByteRange] = []
    for (_, file_id), group in groups.items():
        before = sorted((block for block in blocks if id(block.file) == file_id), key=lambda block: block.start)
        blocks += _unite([rest for block in group for rest in _without(block, before)], gap, before)
    return [piece for block in blocks for piece in _pieces(block)]


def _without(block: ByteRange, before: Sequence[ByteRange]) -> list[ByteRange]:
    """What of a block no earlier one has; those that have a part of it are kept as long as it."""
    rest, start = [], block.start
    for other in before:
        if other.stop <= start or other.start >= block.stop:
            continue
        other.last = max(other.last, block.last)
        if other.start > start:
            rest.append(ByteRange(block.file, start, other.start, block.first, block.last))
        start = other.stop
    if start < block.stop:
        rest.append(ByteRange(block.file, start, block.stop, block.first, block.last))
    return rest


def _unite(blocks: Sequence[ByteRange], gap: int, between: Sequence[ByteRange] = ()) -> list[ByteRange]:
    """Blocks of one file and step with those at most `gap` bytes apart made one, unless one of `between` is there."""
    united: list[ByteRange] = []
    for block in sorted(blocks, key=lambda block: (block.start, block.stop)):
        last = united[-1] if united else None
        near = last is not None and block.start - last.stop <= gap
        if last is not None and near and not any(last.stop <= x.start < block.start for x in between):
            last.stop, last.last = max(last.stop, block.stop), max(last.last, block.last)
        else:
            united.append(ByteRange(block.file, block.start, block.stop, block.first, block.last))
    return united


def _widest_gap(groups: Iterable[Sequence[ByteRange]], waste: int) -> int:
    """The width up to which all gaps together are no more than `waste` bytes; at most `GAP`."""
    gaps = sorted(
        later.start - earlier.stop
        for group in groups
        for earlier, later in pairwise(group)
        if later.start - earlier.stop <= GAP
    )
    widest = 0
    for width in dict.fromkeys(gaps):
        waste -= width * gaps.count(width)
        if waste < 0:
            break
        widest = width
    return widest


def _pieces(block: ByteRange) -> list[ByteRange]:
    starts, memory = range(block.start, block.stop, PIECE), ByteBuffer(block.start, block.stop)
    return [ByteRange(block.file, at, min(at + PIECE, block.stop), block.first, block.last, memory) for at in starts]


class Prefetcher:
    """Fetches the blocks of a plan in threads, and hands out their bytes."""

    def __init__(self, plan: Plan) -> None:
        self._blocks = byte_ranges(plan)
        self.planned = sum(block.stop - block.start for block in self._blocks)
        self._by_file: dict[int, list[ByteRange]] = {}
        for block in self._blocks:
            self._by_file.setdefault(id(block.file), []).append(block)
        for blocks in self._by_file.values():
            blocks.sort(key=lambda block: block.start)
        self._lock = threading.Lock()
        self._next = self._step = self._held = 0
        self._pool = ThreadPoolExecutor(THREADS, "locater-ranges")
        with self._lock:
            self._submit_more()

    def take(self, file: RangedFile, start: int, stop: int) -> memoryview | None:
        """The bytes of a range, once they have come; None where they are not in the plan, or were let go."""
        with self._lock:
            blocks = self._covering_ranges(file, start, stop)
            if not blocks:
                return None
            memories = [self._memory(block) for block in blocks]
            self._begin(max(block.first for block in blocks), blocks)
            futures = [self._submit(block) for block in blocks]
            self._submit_more()
        try:
            ended = any(came.result() < block.stop - block.start for block, came in zip(blocks, futures, strict=True))
        except CancelledError:  # another thread has gone on to a later step
            return None
        if ended:  # a direct read raises the error
            return None
        if all(memory is memories[0] for memory in memories):
            return memories[0].part(start, stop)
        joined = bytearray(stop - start)
        for block, memory in zip(blocks, memories, strict=True):
            a, b = max(start, block.start), min(stop, block.stop)
            joined[a - start : b - start] = memory.part(a, b)
        return memoryview(joined)

    def close(self) -> None:
        """Fetch no more. Reads that are under way end when their files are closed."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _covering_ranges(self, file: RangedFile, start: int, stop: int) -> list[ByteRange]:
        """The blocks that hold a range without a hole; none where a part is missing."""
        blocks = self._by_file.get(id(file), [])
        at = bisect.bisect_right(blocks, start, key=lambda block: block.start) - 1
        covering: list[ByteRange] = []
        while 0 <= at < len(blocks) and start < stop:
            block = blocks[at]
            if block.released or not block.start <= start < block.stop:
                return []
            covering.append(block)
            start, at = block.stop, at + 1
        return covering if start >= stop else []

    def _begin(self, step: int, but: Sequence[ByteRange]) -> None:
        """Let go of what no step from this one on reads, `but` for blocks that are being read."""
        if step <= self._step:
            return
        self._step = step
        for block in self._blocks[: self._next]:
            if block.last < step and not block.released and not any(block is other for other in but):
                block.released = True
                if block.came is not None:
                    self._held -= block.stop - block.start
                    block.came.cancel()
                block.memory = None

    def _submit_more(self) -> None:
        while self._next < len(self._blocks):
            block = self._blocks[self._next]
            if block.first > self._step and self._held and self._held + block.stop - block.start > BUDGET:
                return  # what the step under way needs is fetched at once, however large it is
            self._next += 1
            if not block.released:
                self._submit(block)

    def _submit(self, block: ByteRange) -> Future[int]:
        if block.came is None:
            self._held += block.stop - block.start
            part = self._memory(block).part(block.start, block.stop)
            block.came = self._pool.submit(block.file.fill, block.start, part)
        return block.came

    @staticmethod
    def _memory(block: ByteRange) -> ByteBuffer:
        assert block.memory is not None, "it has been let go"
        return block.memory


_CURRENT: ContextVar[Session | None] = ContextVar("session", default=None)
_RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


@dataclass
class Record:
    """Ranges that were asked for. Their tensors have a shape and no data."""

    reads: list[Read] = field(default_factory=list)

    def tensor(self, file: RangedFile, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        self.reads.append((file, start, stop))
        return self.stand_in(stop - start, dtype)

    def stand_in(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size // dtype.itemsize, dtype=dtype, device="meta")

    def taken(self) -> list[Read]:
        """What was asked for since the last call."""
        taken, self.reads = self.reads, []
        return taken


class Session:
    """Remote files that were opened together."""

    def __init__(self, traffic: Traffic | None = None) -> None:
        self.traffic = traffic or Traffic()
        self.files: list[RangedFile] = []
        self._prefetcher: Prefetcher | None = None

    def prefetch(self, plan: Plan) -> None:
        """Begin to fetch what a plan says."""
        self._prefetcher = Prefetcher(plan)
        self.traffic.add(planned=self.traffic.bytes + self._prefetcher.planned)  # headers have come already

    def bytes(self, file: RangedFile, start: int, stop: int) -> bytearray | memoryview:
        """A range of a file: one that was fetched ahead, or else one that is read now."""
        data: bytearray | memoryview | None = None
        if self._prefetcher is not None:
            data = self._prefetcher.take(file, start, stop)
        if data is None:
            data = read_range(file, start, stop)
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
        self.stop_prefetching()
        for file in self.files:
            file.close()

    def stop_prefetching(self) -> None:
        """From now on, ranges are read when they are asked for."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


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
        opened.stop_prefetching()
        if not keep_open:
            opened.close()


def current_session() -> Session:
    """The session around this call; one of its own for a source that is opened outside of any."""
    return _CURRENT.get() or Session()


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """Inside, reads of remote files fetch nothing: they are listed, and give tensors that stand in for real ones."""
    record = Record()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def recording() -> Record | None:
    return _RECORD.get()


def planned_reads(steps: Iterable[Step]) -> list[list[Read]]:
    """The ranges that the calls of each step read. Nothing is fetched. A call that looks at numbers fails here, and
    what it read before that counts.
    """
    plan: list[list[Read]] = []
    with recorded() as record:
        for step in steps:
            for call in step:
                with contextlib.suppress(Exception):
                    call()
            plan.append(record.taken())
    return plan
