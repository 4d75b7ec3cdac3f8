"""Lines of a run log, read one by one and checked: the run as far as they go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from locater.errors import LocaterError
from locater.tracking.logged_run import Points, Run
from locater.tracking.records import Record, is_run, number, parse, shape_of
from locater.version import SCHEMA

NUMBER = {int, float, type(None)}  # types of a value in a log; bool is none of them
FIELDS = {"loss": (), "step": ("heads",), "warning": ("flag", "layer", "head"), "end": ()}


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
