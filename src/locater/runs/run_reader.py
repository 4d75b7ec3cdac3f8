"""Read a run log line by line, check each record, and keep the run so far."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from locater.errors import LocaterError
from locater.runs.logged_run import Points, Run
from locater.runs.records import Record, is_run, number, parse, shape_of
from locater.version import SCHEMA

NUMBER = {int, float, type(None)}  # types of a number in a log, which bool is not
# fields that a record of each kind must have, beside `step`
FIELDS = {"loss": (), "step": ("heads",), "warning": ("flag", "layer", "head"), "end": ()}


class RunReader:
    """Takes lines as they come; `run` is the run so far. An incomplete line is accepted at the end of a log, and where
    a resumed run follows it.

    With `stored` the numbers of heads, nearly all of a log, are not kept: `with_heads` reads those of some steps again.
    The lines that are fed must then be all of the file, from its beginning.
    """

    def __init__(self, path: Path, stored: bool = False) -> None:
        self.path, self.stored = path, stored
        self.offset = 0  # of the line being read
        self.places: dict[int, tuple[int, int]] = {}  # offset and length of the line of each observed step
        self.number = self.torn = 0  # the number of the line being read; that of an incomplete line before it
        self.header: Record | None = None
        self.steps: list[Record] = []
        self.curves: dict[str, Points] = {"loss": []}
        self.rewrites = 0  # changes to steps or curves that were no append
        self.warnings: list[Record] = []
        self.resumed: list[int] = []
        self.ended = self.resuming = False

    def feed(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.number += 1
            self._take(line)
            self.offset += len(line)

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        record = parse(line)
        if self.torn and not is_run(record):
            self._refuse("is not a JSON object", self.torn)
        self.torn = 0 if record is not None else self.number
        if record is not None:
            self._add(record)
            if self.stored and record.get("kind") == "step":
                self.places[record["step"]] = (self.offset, len(line))
                record["heads"] = dict.fromkeys(record["heads"])

    def with_heads(self, records: Sequence[Record]) -> Sequence[Record]:
        """Observed steps with the numbers of their heads, from the log where they are not kept."""
        if not self.stored:
            return records
        found: list[Record] = []
        with self.path.open("rb") as file:
            for record in records:
                offset, length = self.places[record["step"]]
                file.seek(offset)
                stored = parse(file.read(length)) or {}
                if stored.get("step") != record["step"] or stored.get("heads", {}).keys() != record["heads"].keys():
                    raise LocaterError(f"{self.path}: changed while it was read: start again")
                self._check_heads(stored, self.header or {})
                found.append({**record, "heads": stored["heads"]})
        return found

    def run(self) -> Run | None:
        """The run so far, None before its first record. Nothing is copied: its lists grow when more is fed."""
        if self.header is None:
            return None
        scalars = {name: points for name, points in self.curves.items() if name != "loss"}
        return Run(
            self.header,
            self.steps,
            self.warnings,
            self.ended,
            self.curves["loss"],
            tuple(self.resumed),
            scalars,
            self.with_heads,
        )

    def _add(self, record: Record) -> None:
        kind = record.get("kind")
        if kind == "run":
            self._begin(record)
            return
        if self.header is None:
            self._refuse("comes before any run record: not a run log")
        if not isinstance(kind, str) or kind not in FIELDS:
            self._refuse(f"has the kind {kind!r:.60}; this version reads run, {', '.join(FIELDS)}")
        missing = [name for name in ("step", *FIELDS[kind]) if name not in record]
        if missing or type(record["step"]) is not int:
            self._refuse(
                f"lacks {missing[0]!r}" if missing else f"has the step {record['step']!r:.60}, not a whole number"
            )
        self.ended = kind == "end"
        if self.resuming and kind != "end":
            self._go_back(record["step"])
        if kind == "warning":
            self._check_warning(record)
            self.warnings.append(record)
        elif kind != "end":
            self._add_numbers(record)
        if kind == "step":
            self._check_heads(record, self.header)
            self._place(self.steps, record, itemgetter("step"))

    def _add_numbers(self, record: Record) -> None:
        """Loss and scalars of a line. Null counts as not known: logs of earlier versions wrote it."""
        value = record.get("loss")
        if value is None:
            record.pop("loss", None)
        elif (loss := number(value)) is None:
            self._refuse(f"has the loss {value!r}, not a number")
        else:
            record["loss"] = loss
            self._place(self.curves["loss"], (record["step"], loss), itemgetter(0))
        scalars = record.get("scalars", {})
        if not isinstance(scalars, dict):
            self._refuse("has scalars that are not numbers by name")
        record["scalars"] = {name: value for name, value in scalars.items() if value is not None}
        for name, value in record["scalars"].items():
            if name == "loss":
                self._refuse("has a scalar named loss")
            scalar = number(value)
            if scalar is None:
                self._refuse(f"has the scalar {name} {value!r}, which is not a number")
            record["scalars"][name] = scalar
            self._place(self.curves.setdefault(name, []), (record["step"], scalar), itemgetter(0))

    def _place(self, entries: list[Any], entry: Any, step_of: Any) -> None:
        """Insert an entry at its step, nearly always the end. An earlier entry of the same step is replaced."""
        step = step_of(entry)
        if not entries or step_of(entries[-1]) < step:
            entries.append(entry)
            return
        at = bisect_left(entries, step, key=step_of)
        entries[at : at + (step_of(entries[at]) == step)] = [entry]
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
        """A resumed run starts at `step`: drop the earlier records from there on, since training did not go on from
        them.
        """
        self.resuming = False
        self.resumed.append(step)
        self.steps = [record for record in self.steps if record["step"] < step]
        self.curves = {name: [point for point in points if point[0] < step] for name, points in self.curves.items()}
        self.rewrites += 1
        self.warnings = [warning for warning in self.warnings if warning["step"] < step]

    def _check_heads(self, record: Record, header: Record) -> None:
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

    def _refuse(self, fault: str, number: int | None = None) -> NoReturn:
        raise LocaterError(f"{self.path}: line {number or self.number} {fault}")
