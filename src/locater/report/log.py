"""A run log read back: JSON lines, one record each, as `locater.Monitor` writes them through a JsonlSink.

A record has a `kind`: `run` (what is observed), `step` (numbers of every head), `loss` (a step that was not observed),
`warning`, `end`. docs/watch.md lists their fields. A second `run` record means that the run was resumed.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from locater.errors import LocaterError
from locater.result import SCHEMA
from locater.version import __version__

Record = dict[str, Any]
NUMBER = {int, float, type(None)}  # types of a value in a log; bool is none of them
FIELDS = {"loss": (), "step": ("heads",), "warning": ("flag", "layer", "head"), "end": ()}
SWEEP = "results.jsonl"  # what `locater train` writes beside the folders of several runs


@dataclass(frozen=True)
class Run:
    """A log as it stands. Where a resumed run went back, what it left behind is gone: steps rise, and each is there once."""

    header: Record
    steps: list[Record]  # observed steps
    warnings: list[Record]
    ended: bool
    losses: list[tuple[int, float | None]]  # of every step that has a loss, observed or not
    resumed: tuple[int, ...] = ()  # first step of each part after the first

    @property
    def last(self) -> int:
        """The last step that the log knows of."""
        return max([0, *(record["step"] for record in self.steps[-1:]), *(step for step, _ in self.losses[-1:])])

    def summary(self) -> str:
        """One line: what was observed, how far it got, what was warned of."""
        flags = Counter(flag for _, _, flag in {(held["layer"], held["head"], str(held["flag"])) for held in self.warnings})
        raised = ", ".join(f"{flag} at {count} head{'s' * (count > 1)}" for flag, count in flags.most_common()) or "no warnings"
        state = "ended" if self.ended else "not ended"
        return f"{len(self.header['layers'])} attention layers, {len(self.steps)} steps observed, last step {self.last}, {state}; {raised}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `locater watch --json`."""
        kept = {name: self.header.get(name) for name in ("source", "every", "layers", "columns")}
        return {
            "schema": SCHEMA, "locater": __version__, **kept, "steps": self.steps, "losses": self.losses,
            "warnings": self.warnings, "ended": self.ended, "resumed": self.resumed,
        }  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(plain(self.to_dict()), allow_nan=False)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a log, or the one log in a folder. A torn last line is passed over; anything else that is no record is refused."""
    file = find_log(path)
    if file is None:
        raise LocaterError(f"{path}: no run log there; locater.Monitor writes one that ends in .jsonl")
    reader = RunReader(file)
    try:
        with file.open("rb") as lines:
            reader.feed(lines)
    except OSError as error:
        raise LocaterError(f"{file}: cannot be read ({error.strerror})") from None
    run = reader.run()
    if run is None:
        raise LocaterError(f"{file}: holds no run yet: its first line is missing or torn")
    return run


def find_log(path: str | os.PathLike[str]) -> Path | None:
    """The log at a path, or the only one in a folder; None while there is none."""
    place = Path(path)
    if not place.is_dir():
        return place if place.exists() else None
    logs = sorted(log for log in place.glob("*.jsonl") if log.name != SWEEP)
    if not logs and (place / SWEEP).is_file():
        runs = sorted(folder.name for folder in place.iterdir() if any(folder.glob("*.jsonl")))
        raise LocaterError(f"{place}: a sweep; name one of its runs: {', '.join(f'{place / name}' for name in runs[:4])}")
    if len(logs) > 1:
        raise LocaterError(f"{place}: holds {len(logs)} logs ({', '.join(log.name for log in logs[:4])}): name one of them")
    return logs[0] if logs else None


class RunReader:
    """Takes lines as they come and knows the run so far. A torn line is a fault only if what follows it is not a resumed run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = self.torn = 0  # the line being read; the torn one before it
        self.header: Record | None = None
        self.steps: dict[int, Record] = {}
        self.losses: dict[int, float | None] = {}
        self.warnings: list[Record] = []
        self.resumed: list[int] = []
        self.ended = self.resuming = False

    def feed(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.number += 1
            if not line.strip():
                continue
            record = parse(line)
            if self.torn and not is_run(record):
                self._refuse("is not a JSON object", self.torn)
            self.torn = 0 if record is not None else self.number
            if record is not None:
                self._take(record)

    def run(self) -> Run | None:
        """The run so far; None before its first record."""
        if self.header is None:
            return None
        steps = [self.steps[step] for step in sorted(self.steps)]
        return Run(self.header, steps, list(self.warnings), self.ended, sorted(self.losses.items()), tuple(self.resumed))

    def _take(self, record: Record) -> None:
        kind = record.get("kind")
        if kind == "run":
            self._begin(record)
            return
        if self.header is None:
            self._refuse("comes before any run record: not a run log")
        if not isinstance(kind, str) or kind not in FIELDS:
            self._refuse(f"has the kind {kind!r}; this version reads run, {', '.join(FIELDS)}")
        missing = [name for name in ("step", *FIELDS[kind]) if name not in record]
        if missing or type(record["step"]) is not int:
            self._refuse(f"lacks {missing[0]!r}" if missing else f"has the step {record['step']!r}, not a whole number")
        self.ended = kind == "end"
        if self.resuming and kind != "end":
            self._go_back(record["step"])
        if kind == "warning":
            if not {type(record["layer"]), type(record["head"])} <= {int, type(None)} or type(record.get("value")) not in NUMBER:
                self._refuse("is a warning whose layer, head or value is not a number")
            self.warnings.append(record)
        if kind == "step":
            self._check(record, self.header)
            self.steps[record["step"]] = record
        if kind in ("step", "loss") and "loss" in record:
            if type(record["loss"]) not in NUMBER:
                self._refuse(f"has the loss {record['loss']!r}, not a number")
            self.losses[record["step"]] = record["loss"]

    def _begin(self, record: Record) -> None:
        if record.get("schema") != SCHEMA:
            self._refuse(f"has schema {record.get('schema')!r}; this version reads {SCHEMA}")
        try:
            shape = [(int(entry["layer"]), int(entry["heads"]), str(entry["name"])) for entry in record["layers"]]
            named = all(isinstance(column, str) for column in record["columns"])
        except (KeyError, TypeError, ValueError):
            named = False
        if not named:
            self._refuse("is a run record without layers (layer, heads, name) or columns")
        if self.header is not None:
            if [(entry["layer"], entry["heads"], entry["name"]) for entry in self.header["layers"]] != shape:
                self._refuse("resumes the run with other layers or heads: give each run a log of its own")
            self.resuming = True
        self.header, self.ended = record, False

    def _go_back(self, step: int) -> None:
        """A resumed run starts at `step`: what the first part wrote from there on did not lead to where training is now."""
        self.resuming = False
        self.resumed.append(step)
        self.steps = {at: held for at, held in self.steps.items() if at < step}
        self.losses = {at: held for at, held in self.losses.items() if at < step}
        self.warnings = [held for held in self.warnings if held["step"] < step]

    def _check(self, record: Record, header: Record) -> None:
        scalars = record.setdefault("scalars", {})
        if not isinstance(record["heads"], dict) or not isinstance(scalars, dict) or not set(map(type, scalars.values())) <= NUMBER:
            self._refuse("has heads or scalars that are not numbers by name")
        layers = header["layers"]
        for column, rows in record["heads"].items():
            if not isinstance(rows, list) or len(rows) != len(layers):
                self._refuse(f"has {column!r} for something else than the run's {len(layers)} layers")
            for entry, row in zip(layers, rows, strict=True):
                if row is not None and (not isinstance(row, list) or len(row) != entry["heads"] or not set(map(type, row)) <= NUMBER):
                    self._refuse(f"has {column!r} of layer {entry['layer']} not as {entry['heads']} numbers")

    def _refuse(self, what: str, number: int | None = None) -> NoReturn:
        raise LocaterError(f"{self.path}: line {number or self.number} {what}")


def parse(line: bytes) -> Record | None:
    """The record on a line; None where it is torn or no JSON object."""
    try:
        found = json.loads(line, parse_constant=lambda name: None)  # NaN and Infinity count as not measured
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_run(record: Record | None) -> bool:
    return record is not None and record.get("kind") == "run"


def plain(x: Any) -> Any:
    """What JSON can hold: arrays as lists, NaN and infinity as null.

    >>> plain({"a": (1.5, float("nan"))})
    {'a': [1.5, None]}
    """
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return plain(x.tolist()) if hasattr(x, "tolist") else x
