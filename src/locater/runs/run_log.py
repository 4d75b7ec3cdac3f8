"""Run logs on disk: the log in a folder, the record that it begins with, the run that it holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from locater.errors import LocaterError
from locater.files import JSON_LIMIT
from locater.runs.logged_run import Run
from locater.runs.records import Record, is_run, parse
from locater.runs.run_reader import RunReader

LOG, OWN = "locater.jsonl", "locater*.jsonl"  # the names that `Monitor` gives logs by itself
SWEEP = "results.jsonl"  # what `locater train` writes beside the folders of several runs
logger = logging.getLogger("locater")


def read_run(path: str | os.PathLike[str], stored: bool = False) -> Run:
    """Read a log, or the one log in a folder. An incomplete last line is skipped; any other line that is no record is
    refused. With `stored` the numbers of heads stay in the log, until they are asked for (`Run.with_heads`).
    """
    file = find_log(path)
    if file is None:
        raise LocaterError(f"{path}: no run log there; locater.Monitor writes one that ends in .jsonl")
    reader = RunReader(file, stored)
    try:
        with file.open("rb") as log:
            reader.feed(lines_of(log, file))
    except OSError as error:
        raise LocaterError(f"{file}: cannot be read ({error.strerror})") from None
    run = reader.run()
    if run is None:
        raise LocaterError(f"{file}: holds no run yet: its first line is missing or incomplete")
    return run


def lines_of(log: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines as they come; a file without any could fill the memory."""
    while line := log.readline(JSON_LIMIT + 1):
        if len(line) > JSON_LIMIT:
            raise LocaterError(f"{path}: a line of more than {JSON_LIMIT:,} bytes, too large for a record of a run")
        yield line


def find_log(path: str | os.PathLike[str]) -> Path | None:
    """The log at a path; None if there is none yet. In a folder it is the only log, or else the newest with a name that
    `Monitor` chose, and a warning says which.
    """
    place = Path(path)
    if not place.is_dir():
        if place.exists() and not place.is_file():
            raise LocaterError(f"{place}: not a regular file; give the log that a run writes, or its folder")
        return place if place.exists() else None
    logs = sorted(log for log in place.glob("*.jsonl") if log.name != SWEEP)
    if not logs and (place / SWEEP).is_file():
        runs = sorted(str(folder) for folder in place.iterdir() if any(folder.glob("*.jsonl")))
        raise LocaterError(f"{place}: a sweep; name one of its runs: {', '.join(runs[:4])}")
    own = [log for log in logs if log.match(OWN)]
    if len(logs) > 1 and own:
        newest = max(own, key=lambda log: (log.stat().st_mtime_ns, len(log.name), log.name))
        logger.warning(
            "%s: holds %d logs: reading %s, the newest; name another to read that", place, len(logs), newest.name
        )
        return newest
    if len(logs) > 1:
        raise LocaterError(
            f"{place}: holds {len(logs)} logs ({', '.join(log.name for log in logs[:4])}): name one of them"
        )
    return logs[0] if logs else None


def first_run(path: Path) -> Record | None:
    """The `run` record with which a log begins; None if it is missing or incomplete. A file that is no log is
    refused.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open("rb") as file:
        for line in (file.readline(), file.readline()):
            record, whole = parse(line), line.endswith(b"\n")
            if is_run(record) or (not whole and line[:1] in (b"", b"{")):
                return record if whole else None
            if record is not None or line[:1] != b"{":  # else a crash cut the first line short: look at the next
                break
    raise LocaterError(f"{path}: holds something else than a run log; give the run a file of its own")
