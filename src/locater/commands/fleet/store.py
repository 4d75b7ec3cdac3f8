"""The folder of a fleet: a Parquet part or a small error file per checkpoint, and lists of requested checkpoints.

    fleet.json                how its checkpoints are scanned
    list-DIGEST.json          checkpoints that a command asked for
    KEY.parquet               the rows of one checkpoint; complete, or not there
    KEY.error.json            why a checkpoint has no part
    .KEY.2-of-8.json          some layers of a very large checkpoint, until all are there
    .KEY.started              a job in the process of the command itself; stays if that is killed
    .KEY.superseded           the part of a checkpoint before it changed, or as another version read it
    .KEY.damaged              a part that was not complete

Files are written under hidden names and then renamed. So any number of processes can write to one folder: if two write
the same file, its content is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from locater.commands.fleet.cache_keys import Job, ScanSettings
from locater.errors import LocaterError
from locater.files import read_json, write_whole
from locater.results.run_names import ListedCheckpoint
from locater.version import SCHEMA, __version__

NAME, PART, ERROR = "fleet.json", ".parquet", ".error.json"
UNFINISHED = re.compile(r"\.fleet\.\d+\.\d+|\..+\.(parquet|json|started)\.[^.]+")  # the last part is a random name
LEFT_OVER = 24 * 3600  # seconds after which an unfinished file belongs to no living process


class StoreError(LocaterError):
    """The folder cannot be written to. This is not the fault of a checkpoint, so everything stops."""


class Store:
    """The folder of a fleet."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(folder))

    @classmethod
    def create(cls, folder: str | os.PathLike[str], settings: ScanSettings) -> Store:
        """A new folder, or an existing one with the same settings."""
        store = cls(folder)
        try:
            store.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be made a folder ({error.strerror})") from None
        if not store.description.exists():
            others = [name for name in os.listdir(store.folder) if not name.startswith(".")]
            if others:
                raise StoreError(f"{folder}: not empty and not a fleet (it has {others[0]}): give a new folder")
            store._write_once(settings)
        elif not os.access(store.folder, os.W_OK):
            raise StoreError(f"{folder}: no permission to write there")
        made = store.settings()
        if made != settings:
            raise StoreError(
                f"{folder}: was created with {made.words()}, and this command has {settings.words()}: "
                "give the same options, or another folder"
            )
        store._sweep()
        return store

    @property
    def description(self) -> Path:
        return self.folder / NAME

    def settings(self) -> ScanSettings:
        """How the checkpoints of this folder are scanned."""
        if not self.description.is_file():
            raise LocaterError(f"{self.folder}: not the folder of a fleet (it has no fleet.json)")
        document = read_json(self.description)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise LocaterError(f"{self.description}: not of a fleet that this version reads")
        try:
            return ScanSettings(**document["settings"])
        except (KeyError, TypeError):
            raise LocaterError(f"{self.description}: damaged: give a new folder") from None

    def _write_once(self, settings: ScanSettings) -> None:
        """Write the settings. If two fleets start at the same time, the first decides."""
        text = json.dumps({"schema": SCHEMA, "locater": __version__, "settings": asdict(settings)}, indent=1)
        hidden = self.folder / f".fleet.{os.getpid()}.{time.time_ns()}"
        self._write(hidden, text)
        try:
            os.link(hidden, self.description)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(hidden, self.description)
            return
        hidden.unlink()

    def _write(self, path: Path, content: str | bytes) -> None:
        try:
            write_whole(path, content, flush=True)
        except LocaterError as error:
            reason = str(error).removeprefix(f"{path}: ")
            raise StoreError(
                f"{self.folder}: {reason}: what was scanned before stays; make room and run the same command"
            ) from None

    def _sweep(self) -> None:
        """Remove half-written files of killed processes, once no living process can own them."""
        for entry in os.scandir(self.folder):
            if UNFINISHED.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > LEFT_OVER:
                        os.unlink(entry.path)

    # parts

    def part(self, key: str) -> Path:
        return self.folder / f"{key}{PART}"

    def has(self, key: str) -> bool:
        return self.part(key).exists()

    def parts(self) -> dict[str, int]:
        """Keys of the parts, and when each was written, in nanoseconds."""
        found = {}
        for entry in os.scandir(self.folder):
            if entry.name.endswith(PART) and not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    found[entry.name.removesuffix(PART)] = entry.stat().st_mtime_ns
        return found

    def write_part(self, key: str, content: bytes) -> None:
        self._write(self.part(key), content)
        self.forget_error(key)
        self._mark(key).unlink(missing_ok=True)

    def hide(self, key: str, why: str) -> None:
        """Hide a part from every query: one that is damaged, or that belongs to a checkpoint before it changed."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.part(key), self.folder / f".{key}.{why}")

    # pieces of very large checkpoints

    def piece(self, key: str, piece: tuple[int, int]) -> Path:
        return self.folder / f".{key}.{piece[0]}-of-{piece[1]}.json"

    def write_piece(self, job: Job, document: dict[str, Any]) -> None:
        assert job.piece is not None
        self._write(self.piece(job.key, job.piece), json.dumps(document, allow_nan=False))

    def has_all_pieces(self, job: Job) -> bool:
        """Whether all pieces of the checkpoint of this job are there."""
        count = job.piece[1] if job.piece is not None else 0
        return all(self.piece(job.key, (number, count)).exists() for number in range(1, count + 1))

    def forget_pieces(self, key: str, count: int) -> None:
        for number in range(1, count + 1):
            self.piece(key, (number, count)).unlink(missing_ok=True)

    # errors

    def error(self, key: str) -> Path:
        return self.folder / f"{key}{ERROR}"

    def write_error(self, job: Job, reason: str, tries: int = 1) -> None:
        entry = {"source": job.source, "run": job.run, "step": job.step, "identity": job.identity}
        document = {"schema": SCHEMA, "locater": __version__, **entry, "reason": reason, "tries": tries}
        self._write(self.error(job.key), json.dumps(document, indent=1) + "\n")
        self._mark(job.key).unlink(missing_ok=True)

    def forget_error(self, key: str) -> None:
        self.error(key).unlink(missing_ok=True)

    def errors(self) -> dict[str, dict[str, Any]]:
        """By key: source, run, step, reason and tries of checkpoints that could not be scanned."""
        found = {}
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(ERROR) and not name.startswith("."):
                with contextlib.suppress(LocaterError):  # deleted meanwhile: it was scanned after all
                    document = read_json(self.folder / name)
                    if isinstance(document, dict) and _fits(document, source=str, reason=str):
                        found[name.removesuffix(ERROR)] = document
        return found

    # requested checkpoints

    def write_list(self, entries: Iterable[ListedCheckpoint]) -> None:
        text = json.dumps({"schema": SCHEMA, "sources": [asdict(entry) for entry in entries]}, indent=1)
        name = f"list-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
        if not (self.folder / name).exists():
            self._write(self.folder / name, text)

    def lists(self) -> list[ListedCheckpoint]:
        """All checkpoints that any command requested. If two gave one of them different labels, the later counts."""
        names = [entry for entry in os.scandir(self.folder) if entry.name.startswith("list-")]
        found: dict[str, ListedCheckpoint] = {}
        for entry in sorted(names, key=lambda entry: (entry.stat().st_mtime_ns, entry.name)):
            try:
                for item in read_json(Path(entry.path))["sources"]:
                    if not _fits(item, source=str):
                        raise TypeError
                    found[item["source"]] = ListedCheckpoint(item["source"], item["run"], item["step"])
            except (KeyError, TypeError):
                raise LocaterError(f"{entry.path}: damaged: remove it, and give its command again") from None
        return list(found.values())

    # jobs in the process of the command itself

    def _mark(self, key: str) -> Path:
        return self.folder / f".{key}.started"

    @contextlib.contextmanager
    def started(self, job: Job) -> Iterator[None]:
        """Mark a job while this process does it. If the process is killed meanwhile, the mark stays."""
        mark = self._mark(job.key)
        self._write(mark, str(os.getpid()))
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    def was_cut_off(self, job: Job) -> bool:
        return self._mark(job.key).exists()


def _fits(entry: dict[str, Any], **kinds: type) -> bool:
    """Whether an entry of a file describes a checkpoint: it has these keys, and a run and a step or null."""
    given = all(isinstance(entry.get(name), kind) for name, kind in kinds.items())
    return given and isinstance(entry.get("run"), str | None) and isinstance(entry.get("step"), int | None)
