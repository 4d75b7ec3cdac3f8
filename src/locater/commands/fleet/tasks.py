"""The work of a fleet, the same in this process, in workers and on Ray: scan one checkpoint and write its part."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from locater.commands.fleet.cache_keys import HashedWeights, Job, Task, combined_hash, reader_version
from locater.commands.fleet.parts import to_bytes
from locater.commands.fleet.store import Store, StoreError
from locater.commands.scanning import scan
from locater.errors import LocaterError, first_line
from locater.files import read_json
from locater.redacted_and_escaped_text import without_secrets
from locater.results.scan import Scan
from locater.sources.listing import identity
from locater.sources.open_source import WrappedSource
from locater.sources.weights import Weights


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job: done, or a reason why not; `fatal` is why no job can be done."""

    job: Job
    reason: str | None = None
    fatal: str | None = None


def perform_all(task: Task, folder: Path) -> Iterator[Outcome]:
    """The jobs of a task one after the other; stops where the folder cannot be written to."""
    for job in task:
        outcome = perform(job, folder)
        yield outcome
        if outcome.fatal:
            return


def perform(job: Job, folder: Path) -> Outcome:
    """Scan one checkpoint, or a piece of it, and store the result, or the reason why it failed."""
    store = Store(folder)
    try:
        if not store.description.exists():
            return Outcome(job, fatal=f"{folder}: not visible where the work is done: it has to be on shared storage")
        if store.has(job.key):  # another process was faster
            return Outcome(job)
        if job.reader != reader_version():
            return Outcome(job, fatal=f"a worker has another version of Locater ({reader_version()}, not {job.reader})")
        try:
            _scan_and_write(job, store)
        except StoreError:
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # libraries outside Python may raise what is not an Exception
            reason = reason_of(error)
            store.write_error(job, reason)
            return Outcome(job, reason)
    except StoreError as error:
        return Outcome(job, fatal=str(error))
    return Outcome(job)


def reason_of(error: BaseException) -> str:
    """One line about why a checkpoint could not be scanned."""
    if isinstance(error, LocaterError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return without_secrets(f"{error.filename or 'reading'}: {error.strerror}")
    return without_secrets(f"unexpected {type(error).__name__}: {first_line(error)}")


def _scan_and_write(job: Job, store: Store) -> None:
    if job.piece is not None and store.piece(job.key, job.piece).exists():
        _join_pieces(job, store)
        return
    settings = job.settings
    seen: list[HashedWeights] = []

    def hashing(weights: Weights) -> Weights:
        seen.append(HashedWeights(weights))
        return seen[-1]

    result = scan(
        WrappedSource(job.source, hashing),
        length=settings.length,
        raw=settings.raw,
        eigenvalues=settings.eigenvalues,
        shard=job.piece,
    )
    reads = seen[-1].reads
    if identity(job.source) != job.identity:
        raise LocaterError(f"{job.source}: changed while the fleet ran: run the same command when nothing writes to it")
    if job.piece is None:
        store.write_part(job.key, to_bytes(result, job, combined_hash(reads)))
        return
    store.write_piece(job, {**result.to_dict(), "reads": reads})
    _join_pieces(job, store)


def _join_pieces(job: Job, store: Store) -> None:
    """Write the part once all pieces exist. Several workers may do so at once, and write the same."""
    assert job.piece is not None
    count = job.piece[1]
    if not store.has_all_pieces(job):
        return  # not yet
    paths = [store.piece(job.key, (number, count)) for number in range(1, count + 1)]
    try:
        scans = [Scan.load(path) for path in paths]
        reads = [read_json(path)["reads"] for path in paths]
    except LocaterError:
        if store.has(job.key):  # another process has joined and removed them
            return
        raise
    whole = Scan.join(scans)
    store.write_part(job.key, to_bytes(whole, job, combined_hash(*reads)))
    store.forget_pieces(job.key, count)


# ---- which task comes next ----


TRIES = 3


class Schedule:
    """Waiting tasks, and suspects: jobs that were running when a worker died."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._waiting = deque(tasks)
        self._suspects: deque[Job] = deque()
        self._deaths: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._suspects)

    def next(self, running: int) -> Task | None:
        """The next task, given how many are running; None if there is none, or if it has to wait."""
        if self._waiting:
            return self._waiting.popleft()
        if self._suspects and not running:
            return (self._suspects.popleft(),)
        return None

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Put jobs that a dead worker had not started first in line."""
        if jobs:
            self._waiting.appendleft(tuple(jobs))

    def record_death(self, job: Job) -> int | None:
        """Count a death of a worker during this job. Returns the number of deaths if the job is given up, else None."""
        self._deaths[job.name] += 1
        if self._deaths[job.name] >= TRIES:
            return self._deaths[job.name]
        self._suspects.append(job)
        return None
