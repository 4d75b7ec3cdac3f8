"""From checkpoints to tasks: what each costs, which are split, which are done together, and in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from locater.commands.fleet.jobs import Job, Settings, Task, reader_version
from locater.commands.fleet.tasks import Outcome, reason_of
from locater.discovery import read_source
from locater.results.run_names import Listed
from locater.sources.anywhere import identity, size_of
from locater.sources.remote import session
from locater.sources.remote.address import remote_address
from locater.sources.sources import open_source

LEAST = 5.0  # seconds of work in a task: a worker takes two seconds to start
SERIAL = 10.0  # seconds of work up to which no worker is started
LARGE = 2_000_000_000  # bytes of queries and keys above which the layers of a checkpoint are dealt out
EACH, PER_BYTE = 0.07, 4e-9  # seconds for any checkpoint, and for a byte of its files (benchmarks/fleet.py)
REMOTE = 2.0  # seconds for a checkpoint of unknown size
FEW = 16  # remote checkpoints whose sizes are asked for
ASKED_AT_ONCE = 8  # identities, which take a request each for remote checkpoints


def jobs_of(
    entries: Sequence[Listed], settings: Settings, shard: tuple[int, int] | None = None
) -> tuple[list[Job], list[Outcome]]:
    """The jobs of these checkpoints, and outcomes for those that cannot even be looked at.

    `shard=(i, n)` takes every n-th checkpoint, beginning with the i-th; where there are fewer checkpoints than shards,
    every n-th piece of them.
    """
    if shard is not None and len(entries) >= shard[1]:
        entries, shard = entries[shard[0] - 1 :: shard[1]], None
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        few = len(entries) <= FEW
        looked_at = list(pool.map(lambda entry: _looked_at(entry, settings, few), entries))
    jobs = [job for found in looked_at if isinstance(found, list) for job in found]
    failed = [found for found in looked_at if isinstance(found, Outcome)]
    return (jobs, failed) if shard is None else (jobs[shard[0] - 1 :: shard[1]], failed)


def _looked_at(entry: Listed, settings: Settings, few: bool) -> list[Job] | Outcome:
    """The jobs of one checkpoint. Sizes of remote ones, another request each, are asked for where they are `few`: many
    checkpoints keep all workers busy without being split.
    """

    def job(mark: str, piece: tuple[int, int] | None = None, seconds: float = 0.0) -> Job:
        return Job(entry.source, entry.run, entry.step, mark, settings, reader_version(), piece, seconds)

    try:
        mark = identity(entry.source)
        size = size_of(entry.source) if few or remote_address(entry.source) is None else None
    except Exception as error:  # libraries of the hub and of buckets raise many kinds
        return Outcome(job(""), reason_of(error))
    seconds = REMOTE if size is None else EACH + PER_BYTE * size
    count = 1 if size is None or size <= LARGE else _pieces(entry.source, size)
    if count == 1:
        return [job(mark, None, seconds)]
    return [job(mark, (number, count), seconds / count) for number in range(1, count + 1)]


def _pieces(source: str, size: int) -> int:
    """How many pieces the layers of a checkpoint are read in; the same for everyone who looks at it."""
    try:
        with session():  # closes remote files
            weights, config = open_source(source)
            layers = read_source(weights, config).layers
    except Exception:  # whoever scans it will say what is wrong
        return 1
    elements = sum(math.prod(weights.shape(name)) for name in weights.names())
    wanted = sum(math.prod(layer.query.shape) + math.prod(layer.key.shape) for layer in layers)
    return max(1, min(len(layers), math.ceil(wanted * size / max(elements, 1) / LARGE)))


def tasks_of(jobs: Sequence[Job]) -> list[Task]:
    """Jobs in tasks of at least `LEAST` seconds each, the longest first."""
    tasks: list[Task] = []
    batch: list[Job] = []
    for job in sorted(jobs, key=lambda job: (-job.seconds, job.source, job.piece or ())):
        batch.append(job)
        if sum(other.seconds for other in batch) >= LEAST:
            tasks.append(tuple(batch))
            batch = []
    return [*tasks, tuple(batch)] if batch else tasks


def is_small(jobs: Sequence[Job]) -> bool:
    """Whether the work is so little that starting workers would take longer."""
    return sum(job.seconds for job in jobs) <= SERIAL
