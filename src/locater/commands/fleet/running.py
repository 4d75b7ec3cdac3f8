"""`run()`: scan all checkpoints that are not in the folder yet, in this process, in workers or on Ray."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locater.commands.fleet.jobs import Job, Settings, Task
from locater.commands.fleet.parts import DamagedPartError, header, pyarrow, relabelled
from locater.commands.fleet.planning import is_small, jobs_of, tasks_of
from locater.commands.fleet.schedule import Schedule
from locater.commands.fleet.store import NAME, Store, StoreError
from locater.commands.fleet.tasks import Outcome, perform
from locater.commands.fleet.workers import default_workers, run_in_workers
from locater.commands.scanning import Progress
from locater.errors import LocaterError
from locater.report.tables import counted
from locater.results.run_names import Listing, listing


@dataclass(frozen=True)
class Engine:
    """Where jobs are done. `workers=None` chooses: in this process where the work is small."""

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
    asked: list[str]  # sources that this call is to see to
    scanned: dict[str, None] = field(default_factory=dict)  # sources, in the order in which they were done
    failed: dict[str, str] = field(default_factory=dict)  # source: reason; earlier failures included
    notes: list[str] = field(default_factory=list)


def run(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    *,
    settings: Settings | None = None,
    run_name: str | None = None,
    step_pattern: str | None = None,
    engine: Engine | None = None,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Account:
    """Scan what is not in the folder yet. Checkpoints that failed before are tried again with `retry_failed` alone, or
    when they have changed.
    """
    pyarrow()
    settings, engine = settings or Settings(), engine or Engine()
    if not 2 <= settings.length <= 10**9:
        raise LocaterError(f"length {settings.length} is out of range: give 2 to 1,000,000,000 tokens")
    found = listing(sources, run_name, step_pattern)
    if not found.entries:
        raise LocaterError("no checkpoints: give folders, files, patterns such as 'run/step-*', or @list.csv")
    fleet = next((entry.source for entry in found.entries if os.path.isfile(os.path.join(entry.source, NAME))), None)
    if fleet is not None:  # it would stay in the folder as a checkpoint that failed
        raise LocaterError(f"{fleet}: the folder of a fleet, not a checkpoint: give it alone, or the checkpoints again")
    store = Store.create(out, settings)
    store.write_list(found.entries)
    return _run(store, found, settings, engine, retry_failed, progress)


def retry(out: str | os.PathLike[str], *, engine: Engine | None = None, progress: Progress | None = None) -> Account:
    """Try the failed checkpoints of a folder again, and those that a killed run left."""
    pyarrow()
    store = Store(out)
    settings = store.settings()
    return _run(store, Listing(store.lists()), settings, engine or Engine(), True, progress)


def _run(
    store: Store, found: Listing, settings: Settings, engine: Engine, retry_failed: bool, progress: Progress | None
) -> Account:
    jobs, unreadable = jobs_of(found.entries, settings, engine.shard)
    asked = dict.fromkeys([*(job.source for job in jobs), *(outcome.job.source for outcome in unreadable)])
    account = Account(store, list(asked), notes=list(found.notes))
    before = _Before(store, account)
    kept = [outcome for outcome in unreadable if before.has_part(outcome.job)]
    if kept:
        account.notes.append(
            f"{counted(len(kept), 'checkpoint')} cannot be looked at now; what was scanned before stays "
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
    """Keep account of what became of a job."""
    if outcome.fatal:
        raise StoreError(outcome.fatal)
    job = outcome.job
    if outcome.reason is not None:
        account.failed[job.source] = outcome.reason
    elif account.store.has(job.key):
        account.scanned[job.source] = None
    else:  # a piece, and others are not there yet
        return
    before.forget_errors(job)
    before.hide_parts(job)


class _Before:
    """What the folder held when a run began."""

    def __init__(self, store: Store, account: Account) -> None:
        self.store, self.account = store, account
        self.errors = store.errors()
        self.headers: dict[str, dict[str, Any]] = {}
        for key in store.parts():
            try:
                self.headers[key] = header(store.part(key))
            except FileNotFoundError:  # hidden by another process
                continue
            except DamagedPartError as error:
                account.notes.append(f"{error}: put aside")
                store.hide(key, "damaged")
        self.by_source: dict[str, list[str]] = {}
        for key, entry in (*self.headers.items(), *self.errors.items()):
            self.by_source.setdefault(entry["source"], []).append(key)

    def has_part(self, job: Job) -> bool:
        """Whether the source of this job has a part, as it was when it was scanned."""
        return any(key in self.headers for key in self.by_source.get(job.source, ()))

    def is_open(self, job: Job, retry_failed: bool) -> bool:
        """Whether a job is to be done. A part with other labels is written anew; an old error counts as a failure."""
        if job.key in self.headers:
            labels = self.headers[job.key]
            self.forget_errors(job)
            if (labels["run"], labels["step"]) != (job.run, job.step):
                self.store.write_part(job.key, relabelled(self.store.part(job.key), job.run, job.step))
            return False
        if job.key in self.errors and not retry_failed:
            self.account.failed[job.source] = self.errors[job.key]["reason"]
            return False
        self.store.forget_error(job.key)
        return True

    def forget_errors(self, job: Job) -> None:
        """Forget errors of a source as it was before it changed, or as another version read it."""
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
    # what killed this process once is not done in it again
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
