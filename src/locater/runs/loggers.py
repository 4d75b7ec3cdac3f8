"""Where the records of a training run go: a JSON-lines log, TensorBoard, W&B, trackio. `read_run` reads a log back."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

from locater.errors import LocaterError
from locater.runs.logged_run import Run
from locater.runs.records import Record, is_run, line_of, shape_of
from locater.runs.run_log import first_run, read_run
from locater.runs.scalars import flat
from locater.runs.trackers import TensorBoardSink, TrackioSink, WandbSink

__all__ = ["JsonlSink", "Run", "Sink", "TensorBoardSink", "TrackioSink", "WandbSink", "flat", "open_sink", "read_run"]

CHOICES = "a path that ends in .jsonl, tensorboard:FOLDER, wandb, trackio"


@runtime_checkable
class Sink(Protocol):
    """Anything that records can be written to. `close` may be called twice."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_sink(spec: str | os.PathLike[str] | Sink) -> Sink:
    """The sink of a name: a path that ends in .jsonl, `tensorboard:FOLDER`, `wandb`, `trackio`. A sink is returned as
    it is.
    """
    if not isinstance(spec, str | os.PathLike):
        if isinstance(spec, Sink):
            return spec
        raise LocaterError(
            f"a sink is {CHOICES}, or an object with write(record) and close(), not {type(spec).__name__}"
        )
    text = os.fspath(spec)
    if text.endswith(".jsonl"):
        return JsonlSink(text)
    kind, _, folder = text.partition(":")
    if kind == "tensorboard" and folder:
        return TensorBoardSink(folder)
    if text == "wandb":
        return WandbSink()
    if text == "trackio":
        return TrackioSink()
    raise LocaterError(f"no sink {text!r}: give {CHOICES}")


class JsonlSink:
    """One JSON object per line. Each record is written at once: a crash costs at most the line being written.

    An existing log is continued by a run of the same layers and heads, which adds a `run` record of its own. Any other
    run is refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._header = b""  # a `run` record that could not be written yet, to go before the next record
        try:
            self._first = first_run(self.path)
            self._file = self.path.open("ab", buffering=0)
            if self._ends_inside_line():
                self._put(b"\n")  # the incomplete line stays on its own; read_run() skips it
        except OSError as error:
            raise LocaterError(f"{self.path}: cannot be written ({error.strerror})") from None

    def _ends_inside_line(self) -> bool:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(0, size - 1))
            return size > 0 and file.read(1) != b"\n"

    def check(self, header: Record) -> None:
        """Refuse a run whose layers or heads are not those of the file: with both in it, it could not be read."""
        if self._first is not None and not same_shape(self._first, header):
            raise LocaterError(
                f"{self.path}: holds a run of {_shape(self._first)}, and this one has {_shape(header)}: "
                'give it a log of its own, such as Monitor("other.jsonl"), or move the old one away'
            )

    def write(self, record: Record) -> None:
        line = line_of(record)
        if is_run(record):
            self.check(record)
            self._header = line
        elif self._header:
            line = self._header + line
        self._put(line)
        self._header = b""

    def _put(self, line: bytes) -> None:
        remaining = memoryview(line)
        try:
            start = self._file.seek(0, os.SEEK_END)
            if os.fstat(self._file.fileno()).st_nlink == 0:  # the file was deleted: records would be lost unnoticed
                raise LocaterError(f"{self.path}: was removed while the run wrote to it")
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)  # half a line would make the next record unreadable
            raise LocaterError(f"{self.path}: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        self._file.close()


def same_shape(a: Record, b: Record) -> bool:
    try:
        return shape_of(a) == shape_of(b)
    except (KeyError, TypeError, ValueError):
        return False


def _shape(header: Record) -> str:
    try:
        heads = sorted({entry[1] for entry in shape_of(header)})
    except (KeyError, TypeError, ValueError):
        return "layers that cannot be read"
    count, source = len(header["layers"]), header.get("source", "a model")
    return f"{source} with {count} layer{'s' * (count != 1)} of {' or '.join(map(str, heads)) or 'no'} heads"
