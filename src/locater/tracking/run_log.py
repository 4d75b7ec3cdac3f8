"""A run log read back: JSON lines, one record each, as `locater.Monitor` writes them through a JsonlSink.

A record has a `kind`: `run` (what is observed), `step` (numbers of every head), `loss` (a step that was not observed),
`warning`, `end`. docs/watch.md lists their fields. A second `run` record means that the run was resumed. A number that
is not known is left out of its line; NaN and the infinities are words ("NaN"), so that each line stays JSON.
"""

from __future__ import annotations

import json
import logging
import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from locater.errors import LocaterError
from locater.missing import finite_or_none
from locater.version import SCHEMA, __version__

Record = dict[str, Any]
Points = list[tuple[int, float]]  # (step, number), steps rise
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as float() reads them
NUMBER = {int, float, type(None)}  # types of a value in a log; bool is none of them
FIELDS = {"loss": (), "step": ("heads",), "warning": ("flag", "layer", "head"), "end": ()}
OWN = "locater*.jsonl"  # as `Monitor` names logs by itself
logger = logging.getLogger("locater")
SWEEP = "results.jsonl"  # what `locater train` writes beside the folders of several runs


@dataclass(frozen=True)
class Run:
    """A log as it stands. Where a resumed run went back, what it left behind is gone: steps rise, and each is there
    once.
    """

    header: Record
    steps: list[Record]  # observed steps
    warnings: list[Record]
    ended: bool
    losses: Points  # of every step whose loss is known, observed or not; NaN and the infinities among them
    resumed: tuple[int, ...] = ()  # first step of each part after the first
    scalars: dict[str, Points] = field(default_factory=dict)  # other numbers of the run by name, such as grad_norm

    @property
    def last(self) -> int:
        """The last step that the log knows of."""
        return max([0, *(record["step"] for record in self.steps[-1:]), *(step for step, _ in self.losses[-1:])])

    def summary(self) -> str:
        """One line: what was observed, how far it got, what was warned of."""
        flags = Counter(
            flag for _, _, flag in {(held["layer"], held["head"], str(held["flag"])) for held in self.warnings}
        )
        raised = (
            ", ".join(f"{flag} at {count} head{'s' * (count > 1)}" for flag, count in flags.most_common())
            or "no warnings"
        )
        state = "ended" if self.ended else "not ended"
        return f"{len(self.header['layers'])} attention layers, {len(self.steps)} steps observed, last step {self.last}, {state}; {raised}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `locater watch --json`."""
        kept = {name: self.header.get(name) for name in ("source", "every", "layers", "columns")}
        return {
            "schema": SCHEMA, "locater": __version__, **kept, "steps": self.steps, "losses": self.losses, "scalars": self.scalars,
            "warnings": self.warnings, "ended": self.ended, "resumed": self.resumed,
        }  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(plain(self.to_dict()), allow_nan=False)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a log, or the one log in a folder. A torn last line is passed over; anything else that is no record is
    refused.
    """
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
    """The log at a path; in a folder the only one, or the newest of those that `Monitor` names, which is said. None
    while there is none.
    """
    place = Path(path)
    if not place.is_dir():
        if place.exists() and not place.is_file():
            raise LocaterError(f"{place}: not a regular file; give the log that a run writes, or its folder")
        return place if place.exists() else None
    logs = sorted(log for log in place.glob("*.jsonl") if log.name != SWEEP)
    if not logs and (place / SWEEP).is_file():
        runs = sorted(folder.name for folder in place.iterdir() if any(folder.glob("*.jsonl")))
        raise LocaterError(
            f"{place}: a sweep; name one of its runs: {', '.join(f'{place / name}' for name in runs[:4])}"
        )
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


class RunReader:
    """Takes lines as they come and knows the run so far. A torn line is a fault only if what follows it is not a
    resumed run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = self.torn = 0  # the line being read; the torn one before it
        self.header: Record | None = None
        self.steps: list[Record] = []
        self.curves: dict[str, Points] = {"loss": []}
        self.rewrites = 0  # how often something other than an append happened to steps or curves
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
        """The run so far, None before its first record. Nothing is copied: its lists grow when more is fed."""
        if self.header is None:
            return None
        scalars = {name: points for name, points in self.curves.items() if name != "loss"}
        return Run(
            self.header, self.steps, self.warnings, self.ended, self.curves["loss"], tuple(self.resumed), scalars
        )

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
            self._check_warning(record)
            self.warnings.append(record)
        elif kind != "end":
            self._take_numbers(record)
        if kind == "step":
            self._check(record, self.header)
            self._place(self.steps, record, itemgetter("step"))

    def _take_numbers(self, record: Record) -> None:
        """Loss and scalars of a line; null counts as not known, as logs of earlier versions wrote it."""
        given = record.get("loss")
        if given is None:
            record.pop("loss", None)
        elif (loss := number(given)) is None:
            self._refuse(f"has the loss {given!r}, not a number")
        else:
            record["loss"] = loss
            self._place(self.curves["loss"], (record["step"], loss), itemgetter(0))
        scalars = record.get("scalars", {})
        if not isinstance(scalars, dict):
            self._refuse("has scalars that are not numbers by name")
        record["scalars"] = {name: value for name, value in scalars.items() if value is not None}
        for name, given in record["scalars"].items():
            if name == "loss" or (value := number(given)) is None:
                self._refuse(
                    f"has the scalar {name} {given!r}, which is not a number"
                    if name != "loss"
                    else "has a scalar named loss"
                )
            record["scalars"][name] = value
            self._place(self.curves.setdefault(name, []), (record["step"], value), itemgetter(0))

    def _place(self, held: list[Any], entry: Any, step_of: Any) -> None:
        """At its step: nearly always the end. What was written of this step before is replaced."""
        step = step_of(entry)
        if not held or step_of(held[-1]) < step:
            held.append(entry)
            return
        at = bisect_left(held, step, key=step_of)
        held[at : at + (step_of(held[at]) == step)] = [entry]
        self.rewrites += 1

    def _check_warning(self, record: Record) -> None:
        places = {type(record["layer"]), type(record["head"])} <= {int, type(None)}
        numbers = [record.get(name) for name in ("value", "threshold")]
        if not places or any(x is not None and number(x) is None for x in numbers):
            self._refuse("is a warning whose layer, head or value is not a number")
        record.update(
            {name: number(x) for name, x in zip(("value", "threshold"), numbers, strict=True) if name in record}
        )

    def _begin(self, record: Record) -> None:
        if record.get("schema") != SCHEMA:
            self._refuse(f"has schema {record.get('schema')!r}; this version reads {SCHEMA}")
        try:
            shape = shape_of(record)
            named = all(heads >= 0 for _, heads, _ in shape) and all(
                isinstance(column, str) for column in record["columns"]
            )
        except (KeyError, TypeError, ValueError):
            named = False
        if not named:
            self._refuse("is a run record without layers (layer, heads, name) or columns")
        if self.header is not None:
            if shape_of(self.header) != shape:
                self._refuse("resumes the run with other layers or heads: give each run a log of its own")
            self.resuming = True
        self.header, self.ended = record, False

    def _go_back(self, step: int) -> None:
        """A resumed run starts at `step`: what the first part wrote from there on did not lead to where training is
        now.
        """
        self.resuming = False
        self.resumed.append(step)
        self.steps = [record for record in self.steps if record["step"] < step]
        self.curves = {name: [point for point in points if point[0] < step] for name, points in self.curves.items()}
        self.rewrites += 1
        self.warnings = [held for held in self.warnings if held["step"] < step]

    def _check(self, record: Record, header: Record) -> None:
        if not isinstance(record["heads"], dict):
            self._refuse("has heads or scalars that are not numbers by name")
        layers = header["layers"]
        for column, rows in record["heads"].items():
            if not isinstance(rows, list) or len(rows) != len(layers):
                self._refuse(f"has {column!r} for something else than the run's {len(layers)} layers")
            for entry, row in zip(layers, rows, strict=True):
                if row is not None and (
                    not isinstance(row, list) or len(row) != entry["heads"] or not set(map(type, row)) <= NUMBER
                ):
                    self._refuse(f"has {column!r} of layer {entry['layer']} not as {entry['heads']} numbers")

    def _refuse(self, what: str, number: int | None = None) -> NoReturn:
        raise LocaterError(f"{self.path}: line {number or self.number} {what}")


def parse(line: bytes) -> Record | None:
    """The record on a line; None where it is torn or no JSON object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_run(record: Record | None) -> bool:
    return record is not None and record.get("kind") == "run"


def shape_of(header: Record) -> list[tuple[int, int, str]]:
    """What must be the same for a run to go on in a log: number, heads and name of each layer."""
    return [(int(entry["layer"]), int(entry["heads"]), str(entry["name"])) for entry in header["layers"]]


def first_run(path: Path) -> Record | None:
    """The run record with which a log begins; None where there is no whole one yet. A file of something else is
    refused.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open("rb") as file:
        for line in (file.readline(), file.readline()):
            record, whole = parse(line), line.endswith(b"\n")
            if is_run(record) or (not whole and line[:1] in (b"", b"{")):
                return record if whole else None
            if record is not None or line[:1] != b"{":  # else a first line that a crash has torn: look at the next
                break
    raise LocaterError(f"{path}: holds something else than a run log; give the run a file of its own")


def number(x: Any) -> float | None:
    """A number as a log has it: NaN and the infinities are words; None for what is no number.

    >>> number(2), number("NaN"), number("low")
    (2.0, nan, None)
    """
    if type(x) not in (int, float):
        return WORDS.get(x) if isinstance(x, str) else None
    try:
        return float(x)
    except OverflowError:  # a whole number of more digits than any float has
        return None


def line_of(record: Record) -> bytes:
    """A record as a line. Numbers that are not known are left out; of heads they are null, which keeps their places.

    >>> line_of({"kind": "step", "step": 3, "loss": float("nan"), "scalars": {"rate": None}, "heads": {"sink": [[float("nan")]]}})
    b'{"kind":"step","step":3,"loss":"NaN","scalars":{},"heads":{"sink":[[null]]}}\\n'
    """
    held = {name: value if name == "heads" else _spelled(value) for name, value in record.items()}
    if held.get("loss", 0) is None:
        del held["loss"]
    if isinstance(held.get("scalars"), dict):
        held["scalars"] = {name: value for name, value in held["scalars"].items() if value is not None}
    return json.dumps(plain(held), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _spelled(x: Any) -> Any:
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, dict):
        return {name: _spelled(value) for name, value in x.items()}
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    return x


def plain(x: Any) -> Any:
    """What JSON can hold: arrays as lists, NaN and infinity as null.

    >>> plain({"a": (1.5, float("nan"))})
    {'a': [1.5, None]}
    """
    if isinstance(x, float):
        return finite_or_none(x)
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return plain(x.tolist()) if hasattr(x, "tolist") else x
