"""The folder of a run: one plan, one process at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from locater.data.tokenizer import FILE
from locater.errors import LocaterError
from locater.files import write_whole
from locater.tracking.run_log import read_run
from locater.train.plan import Plan

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PLAN, RESULT, LOG, LOCK = "plan.json", "result.json", "locater.jsonl", ".lock"


def run_folder(plan: Plan) -> Path:
    """The run's folder, which need not be there yet; refused where it holds another run, or cannot be made. Nothing is
    written.
    """
    folder = Path(plan.out)
    if (folder / PLAN).is_file():
        other = plan.difference(Plan.load(folder / PLAN))
        if other is not None and not _took_no_step(folder):
            raise LocaterError(f"{folder}: holds another run ({other}): give another --out, or remove it")
    elif any(folder.glob("step-*")) or (folder / RESULT).is_file():
        raise LocaterError(f"{folder}: holds checkpoints but no {PLAN}: give another --out")
    if not (folder / RESULT).is_file():
        _check_free(folder)
    return folder


def _check_free(folder: Path) -> None:
    """Tell now, rather than after the text is read, that a folder cannot be written to or that another process trains
    in it.
    """
    there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "cannot be written to" if there.is_dir() else "is no folder"
        raise LocaterError(f"{folder}: cannot be made ({there} {why}): give another --out")
    if (folder / LOCK).is_file():
        with alone(folder):
            pass


@contextmanager
def claimed(plan: Plan) -> Iterator[None]:
    """The run's folder made and this plan's alone; what a start of another plan left in it, that came to no step, is
    removed.
    """
    folder = Path(plan.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocaterError(f"{folder}: cannot be made ({error.strerror}): give another --out") from None
    with alone(folder):
        path = folder / PLAN
        other = plan.difference(Plan.load(path)) if path.is_file() else None
        if other is not None and not _took_no_step(folder):  # begun by another process since the first look
            raise LocaterError(f"{folder}: holds another run ({other}): give another --out, or remove it")
        if other is not None:
            for name in (LOG, FILE):
                (folder / name).unlink(missing_ok=True)
        if other is not None or not path.is_file():
            write_whole(path, plan.to_json() + "\n")
        yield


def _took_no_step(folder: Path) -> bool:
    """Whether a run was started here and left nothing: no checkpoint, no weights, no result, no step in the log."""
    if (
        not (folder / LOCK).is_file()
        or any(folder.glob("step-*"))
        or any((folder / name).exists() for name in (RESULT, "model"))
    ):
        return False
    try:
        return not (folder / LOG).is_file() or not read_run(folder / LOG).losses
    except LocaterError:  # no log of ours, so nothing to take over
        return False


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A run's folder for this process alone; what a crash left half-done in it is cleared away."""
    try:
        opened = (folder / LOCK).open("w")
    except OSError as error:
        raise LocaterError(f"{folder}: cannot be written to ({error.strerror}): give another --out") from None
    with opened as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
            except BlockingIOError:
                raise LocaterError(
                    f"{folder}: another process is training in it: wait for it, or give another --out"
                ) from None
        for half in (*folder.glob(".*.tmp"), *folder.glob(".*.old")):
            shutil.rmtree(half, ignore_errors=True)
        yield
