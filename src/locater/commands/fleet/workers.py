"""Worker processes on this machine, under a supervisor that survives the death of any of them.

Workers are forked from a server process that has imported everything, so a dead one is replaced in milliseconds. Each
says which job it is at, so that after a death exactly one job is suspect. A worker whose supervisor is gone ends at
once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from locater.commands.fleet.jobs import Job, Task
from locater.commands.fleet.schedule import Schedule
from locater.commands.fleet.store import Store
from locater.commands.fleet.tasks import Outcome, perform
from locater.errors import LocaterError

MOST = 8  # workers, unless the user asks for more
NEVER_READY = 5  # workers in a row that end before they begin; four times as many where someone kills them


def default_workers() -> int:
    return min(MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    left: list[Job] = field(default_factory=list)  # of its task, the one it is at included
    at: Job | None = None
    ready: bool = False


def run_in_workers(schedule: Schedule, folder: Path, workers: int) -> Iterator[Outcome]:
    """Do all tasks in at most so many processes; yields what became of each job."""
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
        self._deal()
        while self.workers:
            by_connection = {worker.connection: worker for worker in self.workers}
            for connection in wait(list(by_connection)):
                yield from self._hear(by_connection[connection])  # type: ignore[index]
            self._deal()

    def _deal(self) -> None:
        """Give tasks to idle workers, start workers while there is work for them, and end idle ones at the end."""
        while len(self.schedule):
            busy = [worker for worker in self.workers if worker.left]
            idle = next((worker for worker in self.workers if not worker.left), None)
            if idle is None and len(self.workers) >= self.most:
                return
            task = self.schedule.next(len(busy))
            if task is None:
                break
            self._give(idle or self._start(), task)
        if not any(worker.left for worker in self.workers):
            self.stop()

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        threads = max(1, (os.cpu_count() or 1) // self.most)
        process = self.context.Process(target=work, args=(theirs, self.folder, threads), daemon=True)
        with _no_main():
            process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self.workers.append(worker)
        return worker

    def _give(self, worker: _Worker, task: Task) -> None:
        worker.left = list(task)
        with contextlib.suppress(OSError):  # it has died; this is noticed when it is listened to
            worker.connection.send(task)

    def _hear(self, worker: _Worker) -> Iterator[Outcome]:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            yield from self._bury(worker)
            return
        if message == "ready":
            worker.ready, self.never_ready = True, 0
        elif isinstance(message, Job):
            worker.at = message
        else:
            worker.at = None
            worker.left = [job for job in worker.left if job.name != message.job.name]
            yield message

    def _bury(self, worker: _Worker) -> Iterator[Outcome]:
        """A worker has died: its job is suspect, the rest of its task waits again."""
        worker.connection.close()
        worker.process.join(5)
        code = worker.process.exitcode
        self.workers.remove(worker)
        if not worker.ready:
            self.never_ready += 1
            if self.never_ready >= (NEVER_READY if code is None or code >= 0 else 4 * NEVER_READY):
                raise LocaterError(
                    f"workers end before they begin (the last {ending(code)}): is there enough memory? Try "
                    "--workers 1, or --workers 0 for none"
                )
        suspect = worker.at
        rest = [job for job in worker.left if suspect is None or job.name != suspect.name]
        self.schedule.again(rest)
        if suspect is None:
            return
        if self.store.has(suspect.key):  # it died between writing the part and saying so
            yield Outcome(suspect)
            return
        if deaths := self.schedule.died(suspect):
            reason = (
                f"{suspect.source}: its process {ending(code)} {deaths} times, the last ones with nothing "
                "beside it: is there enough memory for it?"
            )
            self.store.write_error(suspect, reason, deaths)
            yield Outcome(suspect, reason)

    def stop(self) -> None:
        """End all workers. What they have written is whole, so they can be killed."""
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


def ending(code: int | None) -> str:
    """How a process ended, in words.

    >>> ending(-9), ending(3)
    ('was killed by SIGKILL', 'ended with status 3')
    """
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with status {code}"


def work(connection: Connection, folder: Path, threads: int) -> None:
    """The process of a worker: does tasks until the other end is closed."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    torch.set_num_threads(threads)
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    try:
        connection.send("ready")
        while True:
            for job in tasks.get():
                connection.send(job)
                connection.send(perform(job, folder))
    except OSError:  # the supervisor is gone
        os._exit(1)


def _listen(connection: Connection, tasks: queue.SimpleQueue[Task]) -> None:
    """Take in tasks. When the supervisor is gone, end this process, whatever it is doing."""
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)
