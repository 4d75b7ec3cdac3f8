"""`run()`: scan all checkpoints that are not in the folder yet, in this process, in workers or on Ray."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import types
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from locater.commands.fleet.cache_keys import Job, ScanSettings, Task, reader_version
from locater.commands.fleet.parts import DamagedPartError, pyarrow, read_header, relabel
from locater.commands.fleet.store import NAME, Store, StoreError
from locater.commands.fleet.tasks import Outcome, Schedule, perform, reason_of
from locater.defaults import Progress
from locater.discovery import read_source
from locater.errors import LocaterError
from locater.report.verdict_sentences import amount
from locater.results.run_names import ListedCheckpoint, Listing, list_checkpoints
from locater.sources.listing import identity, size_of
from locater.sources.open_source import open_source
from locater.sources.remote import session
from locater.sources.remote.address import remote_address

# Worker processes on this machine, under a supervisor that survives the death of any of them.

MOST = 8  # workers, unless the user asks for more
NEVER_READY = 5  # consecutive workers that end before they start; four times as many if something kills them


def default_workers() -> int:
    return min(MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    left: list[Job] = field(default_factory=list)  # of its task, including the current one
    at: Job | None = None
    ready: bool = False


def run_in_workers(schedule: Schedule, folder: Path, workers: int) -> Iterator[Outcome]:
    """Do all tasks in at most `workers` processes; yields the outcome of each job."""
    supervisor = _Supervisor(schedule, folder, workers)
    try:
        yield from supervisor.outcomes()
    finally:
        supervisor.stop()


class _Supervisor:
    def __init__(self, schedule: Schedule, folder: Path, workers: int) -> None:
        self.schedule, self.folder, self.most = schedule, folder, workers
        self.store = Store(folder)
        self.workers: list[_Worker] = []
        self.never_ready = 0
        methods = multiprocessing.get_all_start_methods()
        self.context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            self.context.set_forkserver_preload([__name__])

    def outcomes(self) -> Iterator[Outcome]:
        self._dispatch()
        while self.workers:
            by_connection = {worker.connection: worker for worker in self.workers}
            for connection in wait(list(by_connection)):
                yield from self._receive(by_connection[connection])  # type: ignore[index]
            self._dispatch()

    def _dispatch(self) -> None:
        """Assign tasks to idle workers, start workers while there is work for them, and stop them at the end."""
        while len(self.schedule):
            busy = [worker for worker in self.workers if worker.left]
            idle = next((worker for worker in self.workers if not worker.left), None)
            if idle is None and len(self.workers) >= self.most:
                return
            task = self.schedule.next(len(busy))
            if task is None:
                break
            self._assign(idle or self._start(), task)
        if not any(worker.left for worker in self.workers):
            self.stop()

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        threads = max(1, (os.cpu_count() or 1) // self.most)
        process = self.context.Process(target=run_worker, args=(theirs, self.folder, threads), daemon=True)
        with _no_main():
            process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self.workers.append(worker)
        return worker

    def _assign(self, worker: _Worker, task: Task) -> None:
        worker.left = list(task)
        with contextlib.suppress(OSError):  # it has died, which shows when its next message is read
            worker.connection.send(task)

    def _receive(self, worker: _Worker) -> Iterator[Outcome]:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            yield from self._handle_death(worker)
            return
        if message == "ready":
            worker.ready, self.never_ready = True, 0
        elif isinstance(message, Job):
            worker.at = message
        else:
            worker.at = None
            worker.left = [job for job in worker.left if job.name != message.job.name]
            yield message

    def _handle_death(self, worker: _Worker) -> Iterator[Outcome]:
        """A worker has died: its job is suspect, and the rest of its task goes back to the queue."""
        worker.connection.close()
        worker.process.join(5)
        code = worker.process.exitcode
        self.workers.remove(worker)
        if not worker.ready:
            self.never_ready += 1
            if self.never_ready >= (NEVER_READY if code is None or code >= 0 else 4 * NEVER_READY):
                raise LocaterError(
                    f"workers end before they start (the last {describe_exit(code)}): is there enough memory? Try "
                    "--workers 1, or --workers 0 for none"
                )
        suspect = worker.at
        rest = [job for job in worker.left if suspect is None or job.name != suspect.name]
        self.schedule.requeue(rest)
        if suspect is None:
            return
        if self.store.has(suspect.key):  # it died after writing the part and before reporting it
            yield Outcome(suspect)
            return
        if deaths := self.schedule.record_death(suspect):
            reason = (
                f"{suspect.source}: its process {describe_exit(code)} {deaths} times, the last ones with nothing "
                "beside it: is there enough memory for it?"
            )
            self.store.write_error(suspect, reason, deaths)
            yield Outcome(suspect, reason)

    def stop(self) -> None:
        """Stop all workers. Files that they have written are complete, so they can be killed."""
        for worker in self.workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self.workers:
            worker.process.join(5)
        self.workers = []


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Processes that start inside do not import the user's script, which may have no `if __name__ == "__main__"`."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def describe_exit(code: int | None) -> str:
    """How a process ended, in words.

    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'ended with status 3')
    """
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with status {code}"


def run_worker(connection: Connection, folder: Path, threads: int) -> None:
    """The process of a worker: does tasks until the connection is closed."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    torch.set_num_threads(threads)
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_receive_tasks, args=(connection, tasks), daemon=True).start()
    try:
        connection.send("ready")
        while True:
            for job in tasks.get():
                connection.send(job)
                connection.send(perform(job, folder))
    except OSError:  # the supervisor is gone
        os._exit(1)


def _receive_tasks(connection: Connection, tasks: queue.SimpleQueue[Task]) -> None:
    """Receive tasks. When the supervisor is gone, end this process, whatever it is doing."""
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


# From checkpoints to tasks: what each costs, which are split, which are done together, and in which order.

LEAST = 5.0  # seconds of work in a task: a worker takes two seconds to start
SERIAL = 10.0  # seconds of work up to which no worker is started
LARGE = 2_000_000_000  # bytes of queries and keys above which a checkpoint is split by layers
EACH, PER_BYTE = 0.07, 4e-9  # seconds for any checkpoint, and for a byte of its files (benchmarks/fleet.py)
REMOTE = 2.0  # seconds for a checkpoint of unknown size
FEW = 16  # remote checkpoints whose sizes are asked for
ASKED_AT_ONCE = 8  # identities, which take a request each for remote checkpoints


def jobs_of(
    entries: Sequence[ListedCheckpoint], settings: ScanSettings, shard: tuple[int, int] | None = None
) -> tuple[list[Job], list[Outcome]]:
    """The jobs of these checkpoints, and outcomes for those that cannot even be inspected.

    `shard=(i, n)` takes every n-th checkpoint, beginning with the i-th; where there are fewer checkpoints than shards,
    every n-th piece of them.
    """
    if shard is not None and len(entries) >= shard[1]:
        entries, shard = entries[shard[0] - 1 :: shard[1]], None
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        few = len(entries) <= FEW
        looked_at = list(pool.map(lambda entry: _inspect(entry, settings, few), entries))
    jobs = [job for found in looked_at if isinstance(found, list) for job in found]
    failed = [found for found in looked_at if isinstance(found, Outcome)]
    return (jobs, failed) if shard is None else (jobs[shard[0] - 1 :: shard[1]], failed)


def _inspect(entry: ListedCheckpoint, settings: ScanSettings, few: bool) -> list[Job] | Outcome:
    """The jobs of one checkpoint. Sizes of remote ones, which take another request each, are asked for if they are
    `few`: many checkpoints keep all workers busy without being split.
    """

    def job(mark: str, piece: tuple[int, int] | None = None, seconds: float = 0.0) -> Job:
        return Job(entry.source, entry.run, entry.step, mark, settings, reader_version(), piece, seconds)

    try:
        mark = identity(entry.source)
        size = size_of(entry.source) if few or remote_address(entry.source) is None else None
    except Exception as error:  # the libraries for the hub and for buckets raise many kinds
        return Outcome(job(""), reason_of(error))
    seconds = REMOTE if size is None else EACH + PER_BYTE * size
    count = 1 if size is None or size <= LARGE else _pieces(entry.source, size)
    if count == 1:
        return [job(mark, None, seconds)]
    return [job(mark, (number, count), seconds / count) for number in range(1, count + 1)]


def _pieces(source: str, size: int) -> int:
    """How many pieces the layers of a checkpoint are read in; the same in every process that inspects it."""
    try:
        with session():  # closes remote files
            weights, config = open_source(source)
            layers = read_source(weights, config).layers
    except Exception:  # the scan will say what is wrong with it
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
    """Whether starting workers would take longer than the work."""
    return sum(job.seconds for job in jobs) <= SERIAL


# The run.


@dataclass(frozen=True)
class Engine:
    """Where jobs are done. `workers=None` decides by the work: in this process if it is small."""

    workers: int | None = None
    ray: str | None = None  # "auto" or the address of a cluster
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise LocaterError(f"{self.workers} workers: give 0 or more")
        if self.ray is not None and self.shard is not None:
            raise LocaterError("--ray and --shard exclude each other: Ray deals out the work by itself")
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise LocaterError(f"--shard {self.shard[0]}/{self.shard[1]}: the first number counts from 1 to the second")


@dataclass
class Account:
    """What one call of `run` did."""

    store: Store
    asked: list[str]  # sources that this call was given
    scanned: dict[str, None] = field(default_factory=dict)  # sources, in the order in which they were done
    failed: dict[str, str] = field(default_factory=dict)  # source: reason; earlier failures included
    notes: list[str] = field(default_factory=list)


def run(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    *,
    settings: ScanSettings | None = None,
    run_name: str | None = None,
    step_pattern: str | None = None,
    engine: Engine | None = None,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Account:
    """Scan what is not in the folder yet. Checkpoints that failed before are retried only with `retry_failed`, or when
    they have changed.
    """
    pyarrow()
    settings, engine = settings or ScanSettings(), engine or Engine()
    if not 2 <= settings.length <= 10**9:
        raise LocaterError(f"length {settings.length} is out of range: give 2 to 1,000,000,000 tokens")
    found = list_checkpoints(sources, run_name, step_pattern)
    if not found.entries:
        raise LocaterError("no checkpoints: give folders, files, patterns such as 'run/step-*', or @list.csv")
    fleet = next((entry.source for entry in found.entries if os.path.isfile(os.path.join(entry.source, NAME))), None)
    if fleet is not None:  # it would stay in the folder as a checkpoint that failed
        raise LocaterError(f"{fleet}: the folder of a fleet, not a checkpoint: give it alone, or give checkpoints")
    store = Store.create(out, settings)
    store.write_list(found.entries)
    return _run(store, found, settings, engine, retry_failed, progress)


def retry(out: str | os.PathLike[str], *, engine: Engine | None = None, progress: Progress | None = None) -> Account:
    """Retry the failed checkpoints of a folder, and those that a killed run left undone."""
    pyarrow()
    store = Store(out)
    settings = store.settings()
    return _run(store, Listing(store.lists()), settings, engine or Engine(), True, progress)


def _run(
    store: Store, found: Listing, settings: ScanSettings, engine: Engine, retry_failed: bool, progress: Progress | None
) -> Account:
    jobs, unreadable = jobs_of(found.entries, settings, engine.shard)
    asked = dict.fromkeys([*(job.source for job in jobs), *(outcome.job.source for outcome in unreadable)])
    account = Account(store, list(asked), notes=list(found.notes))
    before = _Before(store, account)
    kept = [outcome for outcome in unreadable if before.has_part(outcome.job)]
    if kept:
        account.notes.append(
            f"{amount(len(kept), 'checkpoint')} cannot be inspected now; what was scanned before stays "
            f"(first {kept[0].reason})"
        )
    for outcome in unreadable:
        if outcome not in kept:
            store.write_error(outcome.job, str(outcome.reason))
            before.forget_errors(outcome.job)
            account.failed[outcome.job.source] = str(outcome.reason)
    waiting = [job for job in jobs if before.is_open(job, retry_failed)]
    with contextlib.closing(_outcomes(waiting, store, engine)) as outcomes:  # ends workers, however this ends
        for outcome in progress(outcomes, len(waiting)) if progress and waiting else outcomes:
            _note(outcome, before, account)
    # pieces that two machines finished at the same time, neither of which saw the other's
    last = {job.source: job for job in waiting if job.piece is not None and job.source not in account.failed}
    for job in last.values():
        if not store.has(job.key) and store.has_all_pieces(job):
            _note(perform(job, store.folder), before, account)
    return account


def _note(outcome: Outcome, before: _Before, account: Account) -> None:
    """Record the outcome of a job."""
    if outcome.fatal:
        raise StoreError(outcome.fatal)
    job = outcome.job
    if outcome.reason is not None:
        account.failed[job.source] = outcome.reason
    elif account.store.has(job.key):
        account.scanned[job.source] = None
    else:  # a piece, while others are still missing
        return
    before.forget_errors(job)
    before.hide_parts(job)


class _Before:
    """What was in the folder when a run began."""

    def __init__(self, store: Store, account: Account) -> None:
        self.store, self.account = store, account
        self.errors = store.errors()
        self.headers: dict[str, dict[str, Any]] = {}
        for key in store.parts():
            try:
                self.headers[key] = read_header(store.part(key))
            except FileNotFoundError:  # hidden by another process
                continue
            except DamagedPartError as error:
                account.notes.append(f"{error}: set aside")
                store.hide(key, "damaged")
        self.by_source: dict[str, list[str]] = {}
        for key, entry in (*self.headers.items(), *self.errors.items()):
            self.by_source.setdefault(entry["source"], []).append(key)

    def has_part(self, job: Job) -> bool:
        """Whether the source of this job has a part, perhaps of an earlier state."""
        return any(key in self.headers for key in self.by_source.get(job.source, ()))

    def is_open(self, job: Job, retry_failed: bool) -> bool:
        """Whether a job is to be done. A part with other labels is rewritten; an old error counts as a failure."""
        if job.key in self.headers:
            labels = self.headers[job.key]
            self.forget_errors(job)
            if (labels["run"], labels["step"]) != (job.run, job.step):
                self.store.write_part(job.key, relabel(self.store.part(job.key), job.run, job.step))
            return False
        if job.key in self.errors and not retry_failed:
            self.account.failed[job.source] = self.errors[job.key]["reason"]
            return False
        self.store.forget_error(job.key)
        return True

    def forget_errors(self, job: Job) -> None:
        """Forget errors of a source from before it changed, or from another version."""
        for key in self.by_source.get(job.source, ()):
            if key != job.key:
                self.store.forget_error(key)

    def hide_parts(self, job: Job) -> None:
        """The same for its parts."""
        for key in self.by_source.get(job.source, ()):
            if key != job.key:
                self.store.hide(key, "superseded")


def _outcomes(waiting: list[Job], store: Store, engine: Engine) -> Generator[Outcome]:
    if not waiting:
        return
    tasks = tasks_of(waiting)
    if engine.ray is not None:
        from locater.commands.fleet.on_ray import run_on_ray

        yield from run_on_ray(tasks, store.folder, engine.ray, engine.workers)
        return
    # what once killed this process is not done in it again
    cut_off = any(store.was_cut_off(job) for job in waiting)
    if engine.workers == 0 or (engine.workers is None and is_small(waiting) and not cut_off):
        yield from _in_this_process(tasks, store)
    else:
        yield from run_in_workers(Schedule(tasks), store.folder, engine.workers or default_workers())


def _in_this_process(tasks: Iterable[Task], store: Store) -> Iterator[Outcome]:
    for job in (job for task in tasks for job in task):
        with store.started(job):
            outcome = perform(job, Path(store.folder))
        yield outcome
