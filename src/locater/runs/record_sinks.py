"""The sinks of one run: opened with its header, written to, closed. A sink that fails costs records, not the run."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from locater.runs.loggers import JsonlSink, Sink, open_sink, same_shape
from locater.runs.run_log import LOG, first_run


class RecordSinks:
    """`specs` are the sinks as a user names them; none stands for `locater.jsonl` in the run's folder.

    `report(message, about)` is called when something goes wrong; `about` is the sink, so that each is reported once.
    """

    def __init__(self, specs: Sequence[str | os.PathLike[str] | Sink], report: Callable[..., None]) -> None:
        self._specs, self._report = specs, report
        self._sinks: list[Sink] = []

    def __bool__(self) -> bool:
        """Whether any sink is open."""
        return bool(self._sinks)

    def where(self) -> str:
        """Which logs are written, and what shows them; nothing where there is none."""
        paths = [str(sink.path) for sink in self._sinks if isinstance(sink, JsonlSink)]
        return f"; the log is {paths[0]} (locater watch {shlex.quote(paths[0])})" if paths else ""

    def open(self, folder: Path, header: dict[str, Any]) -> None:
        """Open every sink. A log that holds another model's run is refused if the user named it, avoided otherwise."""
        if not self._specs:
            with contextlib.suppress(OSError):  # a folder that cannot be made is reported by the sink
                folder.mkdir(parents=True, exist_ok=True)
        try:
            for spec in self._specs or (self._default_log(folder, header),):
                self._sinks.append(open_sink(spec))
                if isinstance(self._sinks[-1], JsonlSink):
                    self._sinks[-1].check(header)
        except BaseException:
            self.close()
            raise

    def _default_log(self, folder: Path, header: dict[str, Any]) -> Path:
        """`locater.jsonl`; where that holds a run of another shape, `locater-2.jsonl` and so on."""
        taken = ""
        for count in itertools.count(1):
            path = folder / (LOG if count == 1 else f"{Path(LOG).stem}-{count}.jsonl")
            previous = first_run(path)
            if previous is None or same_shape(previous, header):
                break
            taken = taken or path.name
        if taken:
            self._report(f"{folder / taken} holds a run of another model: this run is written to {path}")
        return path

    def write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            try:
                sink.write(record)
            except Exception as error:  # a full disk or a lost connection; the next record is tried again
                self._report(f"the run goes on without records: {type(sink).__name__}: {error}", about=sink)

    def close(self) -> None:
        """May be called twice."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._report(f"{type(sink).__name__}: {error}")
        self._sinks = []
