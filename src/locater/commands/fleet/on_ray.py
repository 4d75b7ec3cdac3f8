"""A fleet on a Ray cluster: the same tasks and parts as in workers, with a limit on tasks at the same time.

Ray is asked for one processor per task and nothing else: a request that no node can meet would wait for ever in
silence. Deaths are counted here, not by Ray, so that a job is given up after the same number of them as in workers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from locater.commands.fleet.cache_keys import Job, Task, reader_version
from locater.commands.fleet.store import Store
from locater.commands.fleet.tasks import Outcome, Schedule, perform_all
from locater.errors import LocaterError, first_line
from locater.files import read_json

MOST = 8  # tasks at the same time, unless the user asks for more
CONNECT = 10  # seconds for the first answer of the cluster
FIRST_TASK = 180  # seconds for a first, empty task: a node may have to start, and import
VISIBLE = 30  # seconds until a file written by another machine is visible here


def run_on_ray(tasks: Sequence[Task], folder: Path, address: str, most: int | None) -> Iterator[Outcome]:
    """Do all tasks on the cluster at this address; yields the outcome of each job."""
    ray = connect(address)
    try:
        schedule, store = Schedule(tasks), Store(folder)
        remote = ray.remote(num_cpus=1, max_retries=0)(_perform_task)
        _probe(ray, folder, address)
        running: dict[Any, Task] = {}
        while len(schedule) or running:
            while len(running) < (most or MOST) and (task := schedule.next(len(running))) is not None:
                running[remote.remote(task, folder)] = task
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                yield from _collect(ray, reference, running.pop(reference), schedule, store)
    finally:
        ray.shutdown()


def connect(address: str) -> Any:
    """Ray, connected to a running cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")  # what matters is raised as an exception
    try:
        import ray
    except ImportError:
        raise LocaterError("Ray is not installed: pip install 'locater[ray]'") from None
    if ray.is_initialized():
        raise LocaterError("this process is already connected to Ray: call ray.shutdown() first")
    _refuse_silence(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except Exception as error:  # ConnectionError, ValueError or RuntimeError, depending on the kind of address
        raise LocaterError(
            f"--ray {address}: no connection to a cluster ({first_line(error)}): start one with `ray start --head`, or "
            "leave --ray out (a cluster that asks for a token needs RAY_AUTH_MODE=token and ~/.ray/auth_token)"
        ) from None
    processors = ray.cluster_resources().get("CPU", 0)
    if processors < 1:
        ray.shutdown()
        raise LocaterError(
            f"--ray {address}: the cluster has no processors for tasks (CPU: {processors:g}); add a node"
        )
    return ray


def _refuse_silence(address: str) -> None:
    """Refuse an address that does not answer: Ray would retry for minutes, with warnings of its own."""
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if not known:  # where Ray itself looks for a cluster of this machine
        current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        known = current.read_text().strip() if current.is_file() else ""
    host, colon, port = known.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), CONNECT).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise LocaterError(
            f"--ray {address}: nothing answers at {known} ({reason}): start a cluster with `ray start --head`, "
            "or leave --ray out"
        ) from None


def _probe(ray: Any, folder: Path, address: str) -> None:
    """Run one small task, to check that the cluster works, has this version of Locater, and sees the folder."""
    reference = ray.remote(num_cpus=1, max_retries=3)(_check_worker).remote(folder)
    done, _ = ray.wait([reference], timeout=FIRST_TASK)
    if not done:
        free = ray.available_resources().get("CPU", 0)
        raise LocaterError(
            f"--ray {address}: no task was done within {FIRST_TASK} s ({free:g} processors are free): "
            "is the cluster busy with other work?"
        )
    try:
        version, seen = ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise LocaterError(
            f"--ray {address}: its workers cannot run Locater ({first_line(cause)}): install the same version there"
        ) from None
    if version != reader_version():
        raise LocaterError(f"--ray {address}: its workers have Locater {version}, this is {reader_version()}")
    if not seen:
        raise LocaterError(f"{folder}: the workers of {address} do not see it: it has to be on shared storage")


def _check_worker(folder: Path) -> tuple[str, bool]:
    return reader_version(), Store(folder).description.exists()


def _perform_task(task: Task, folder: Path) -> list[Outcome]:
    import torch

    torch.set_num_threads(1)
    return list(perform_all(task, folder))


def _collect(ray: Any, reference: Any, task: Task, schedule: Schedule, store: Store) -> Iterator[Outcome]:
    try:
        outcomes: list[Outcome] = ray.get(reference)
    except ray.exceptions.RayError as error:
        yield from _handle_death(task, first_line(error), schedule, store)
        return
    for outcome in outcomes:
        job = outcome.job
        if (
            outcome.reason is None
            and outcome.fatal is None
            and job.piece is None
            and not _wait_until_visible(store, job)
        ):
            outcome = Outcome(
                job,
                fatal=f"{store.folder}: {job.source} was written by a worker and is not seen here: "
                "the folder has to be on storage that all machines share",
            )
        yield outcome


def _wait_until_visible(store: Store, job: Job) -> bool:
    """Whether a part appears; network storage may take a while to show it."""
    end = time.monotonic() + VISIBLE
    while not store.has(job.key):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _handle_death(task: Task, reason: str, schedule: Schedule, store: Store) -> Iterator[Outcome]:
    """A worker died in one of these jobs, and which one is not known: those without a part are done one by one."""
    for job in task:
        if store.has(job.key):
            yield Outcome(job)
        elif store.error(job.key).exists():
            yield Outcome(job, read_json(store.error(job.key))["reason"])
        elif deaths := schedule.record_death(job):
            why = f"{job.source}: its process on the cluster died {deaths} times ({reason})"
            store.write_error(job, why, deaths)
            yield Outcome(job, why)
