"""Ranges fetched ahead of the reader: neighbours merged, large ones split, by threads and within a budget of bytes.

A plan is a list of steps, each with the ranges that are read in it; the steps of a scan are the gains and biases of all
layers, then one layer after the other. Blocks are fetched in that order, and let go when a later step begins. What is
read and not planned is fetched when it is read, so a wrong plan costs time and never a number.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from locater.sources.remote.ranged import RangedFile

Read = tuple[RangedFile, int, int]  # file, first byte, byte after the last
Plan = Sequence[Sequence[Read]]
THREADS = 16
BUDGET = 512 << 20  # bytes that are fetched and not yet let go
GAP = 1 << 20  # bytes between two ranges that may be read with them
WASTE = 0.1  # of the bytes that are needed, at most read in gaps
FREE_WASTE = 1 << 20  # bytes, where that is more: small checkpoints are read in a few requests
PIECE = 16 << 20  # bytes of one request


@dataclass
class Memory:
    """Where neighbouring requests put their bytes, so that a range of several of them is not copied."""

    start: int
    stop: int
    data: bytearray | None = field(default=None, repr=False)

    def part(self, start: int, stop: int) -> memoryview:
        if self.data is None:
            self.data = bytearray(self.stop - self.start)
        return memoryview(self.data)[start - self.start : stop - self.start]


@dataclass
class Block:
    """Bytes of one request, from the step that reads them first to the one that reads them last."""

    file: RangedFile
    start: int
    stop: int
    first: int
    last: int
    memory: Memory | None = field(default=None, repr=False)
    came: Future[int] | None = field(default=None, repr=False)  # how many bytes
    released: bool = False


def blocks_of(plan: Plan) -> list[Block]:
    """The requests of a plan, in the order of its steps. No byte is in two of them."""
    groups: dict[tuple[int, int], list[Block]] = {}
    spans: dict[tuple[int, int, int], Block] = {}
    for step, reads in enumerate(plan):
        for file, start, stop in reads:
            key = (id(file), start, stop)
            if key not in spans:
                spans[key] = Block(file, start, stop, step, step)
                groups.setdefault((step, id(file)), []).append(spans[key])
            spans[key].last = step
    touching = [_united(group, 0) for group in groups.values()]
    needed = sum(block.stop - block.start for group in touching for block in group)
    gap = _widest_gap(touching, max(int(WASTE * needed), FREE_WASTE))
    blocks: list[Block] = []
    for (_, file_id), group in groups.items():
        before = sorted((block for block in blocks if id(block.file) == file_id), key=lambda block: block.start)
        blocks += _united([rest for block in group for rest in _without(block, before)], gap, before)
    return [piece for block in blocks for piece in _pieces(block)]


def _without(block: Block, before: Sequence[Block]) -> list[Block]:
    """What of a block no earlier one has; those that have a part of it are kept as long as it."""
    rest, start = [], block.start
    for other in before:
        if other.stop <= start or other.start >= block.stop:
            continue
        other.last = max(other.last, block.last)
        if other.start > start:
            rest.append(Block(block.file, start, other.start, block.first, block.last))
        start = other.stop
    if start < block.stop:
        rest.append(Block(block.file, start, block.stop, block.first, block.last))
    return rest


def _united(blocks: Sequence[Block], gap: int, between: Sequence[Block] = ()) -> list[Block]:
    """Blocks of one file and step with those at most `gap` bytes apart made one, unless one of `between` is there."""
    united: list[Block] = []
    for block in sorted(blocks, key=lambda block: (block.start, block.stop)):
        last = united[-1] if united else None
        near = last is not None and block.start - last.stop <= gap
        if last is not None and near and not any(last.stop <= x.start < block.start for x in between):
            last.stop, last.last = max(last.stop, block.stop), max(last.last, block.last)
        else:
            united.append(Block(block.file, block.start, block.stop, block.first, block.last))
    return united


def _widest_gap(groups: Iterable[Sequence[Block]], waste: int) -> int:
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


def _pieces(block: Block) -> list[Block]:
    starts, memory = range(block.start, block.stop, PIECE), Memory(block.start, block.stop)
    return [Block(block.file, at, min(at + PIECE, block.stop), block.first, block.last, memory) for at in starts]


class Ahead:
    """Fetches the blocks of a plan in threads, and hands out their bytes."""

    def __init__(self, plan: Plan) -> None:
        self._blocks = blocks_of(plan)
        self.planned = sum(block.stop - block.start for block in self._blocks)
        self._by_file: dict[int, list[Block]] = {}
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
            blocks = self._covering(file, start, stop)
            if not blocks:
                return None
            memories = [self._memory(block) for block in blocks]
            self._begin(max(block.first for block in blocks), blocks)
            futures = [self._submitted(block) for block in blocks]
            self._submit_more()
        try:
            ended = any(came.result() < block.stop - block.start for block, came in zip(blocks, futures, strict=True))
        except CancelledError:  # another thread has gone on to a later step
            return None
        if ended:  # whoever reads it directly is told how
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

    def _covering(self, file: RangedFile, start: int, stop: int) -> list[Block]:
        """The blocks that hold a range without a hole; none where a part is missing."""
        blocks = self._by_file.get(id(file), [])
        at = bisect.bisect_right(blocks, start, key=lambda block: block.start) - 1
        covering: list[Block] = []
        while 0 <= at < len(blocks) and start < stop:
            block = blocks[at]
            if block.released or not block.start <= start < block.stop:
                return []
            covering.append(block)
            start, at = block.stop, at + 1
        return covering if start >= stop else []

    def _begin(self, step: int, but: Sequence[Block]) -> None:
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
                self._submitted(block)

    def _submitted(self, block: Block) -> Future[int]:
        if block.came is None:
            self._held += block.stop - block.start
            part = self._memory(block).part(block.start, block.stop)
            block.came = self._pool.submit(block.file.fill, block.start, part)
        return block.came

    @staticmethod
    def _memory(block: Block) -> Memory:
        assert block.memory is not None, "it has been let go"
        return block.memory
