"""Run logs on disk: find the log in a folder and read its run line by line, with every record checked."""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from locater.errors import LocaterError
from locater.files import JSON_LIMIT
from locater.runs.records import Record, is_run, json_values, number, parse_record, shape_of
from locater.version import SCHEMA, __version__

LOG, OWN = "locater.jsonl", "locater*.jsonl"  # the names that `Monitor` chooses for logs
SWEEP = "results.jsonl"  # written by `locater train` next to the folders of several runs
logger = logging.getLogger("locater")
Points = list[tuple[int, float]]  # (step, number), steps increase


@dataclass(frozen=True)
class Run:
    """A training run, as far as its log goes. Steps increase and each occurs once: where a resumed run went back to an
    earlier step, the records that it replaced are left out.
    """

    header: Record
    steps: list[Record]  # observed steps
    warnings: list[Record]
    ended: bool
    losses: Points  # of every step whose loss is known, observed or not; may be NaN or infinite
    resumed: tuple[int, ...] = ()  # first step of each part after the first
    scalars: dict[str, Points] = field(default_factory=dict)  # other numbers of the run by name, such as grad_norm
    # reads the numbers of heads from the log, where `steps` only name their columns
    with_heads: Callable[[Sequence[Record]], Sequence[Record]] = field(
        default=lambda records: records, compare=False, repr=False
    )

    @property
    def last(self) -> int:
        """The last step in the log."""
        return max([0, *(record["step"] for record in self.steps[-1:]), *(step for step, _ in self.losses[-1:])])

    def summary(self) -> str:
        """One line: what was observed, how far the run got, which warnings it gave."""
        heads = {(warning["layer"], warning["head"], str(warning["flag"])) for warning in self.warnings}
        flags = Counter(flag for _, _, flag in heads).most_common()
        raised = ", ".join(f"{flag} at {count} head{'s' * (count > 1)}" for flag, count in flags) or "no warnings"
        layers, state = len(self.header["layers"]), "ended" if self.ended else "not ended"
        observed = f"{layers} attention layer{'s' * (layers != 1)}, {len(self.steps)} steps observed"
        return f"{observed}, last step {self.last}, {state}; {raised}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `locater watch --json`."""
        about = {name: self.header.get(name) for name in ("source", "every", "layers", "columns")}
        return {
            "schema": SCHEMA,
            "locater": __version__,
            **about,
            "steps": self.with_heads(self.steps),
            "losses": self.losses,
            "scalars": self.scalars,
            "warnings": self.warnings,
            "ended": self.ended,
            "resumed": self.resumed,
        }

    def to_json(self) -> str:
        return json.dumps(json_values(self.to_dict()), allow_nan=False)


@dataclass(frozen=True)
class TwoRuns:
    """Two runs to compare. The document is that of the first, with the second as `other`."""

    first: Run
    other: Run

    def to_json(self) -> str:
        return json.dumps(json_values({**self.first.to_dict(), "other": self.other.to_dict()}), allow_nan=False)


def read_run(path: str | os.PathLike[str], stored: bool = False) -> Run:
    """Read a log, or the log in a folder. An incomplete last line is skipped; any other line that is not a record is
    refused. With `stored` the numbers of heads stay on disk until they are asked for (`Run.with_heads`).
    """
    file = find_log(path)
    if file is None:
        raise LocaterError(f"{path}: no run log there; locater.Monitor writes one (.jsonl)")
    reader = RunReader(file, stored)
    try:
        with file.open("rb") as log:
            reader.feed(lines_of(log, file))
    except OSError as error:
        raise LocaterError(f"{file}: cannot be read ({error.strerror})") from None
    run = reader.run()
    if run is None:
        raise LocaterError(f"{file}: has no run yet: its first line is missing or incomplete")
    return run


def lines_of(log: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines one by one, with a limit on their length: a file without line ends could fill the memory."""
    while line := log.readline(JSON_LIMIT + 1):
        if len(line) > JSON_LIMIT:
            raise LocaterError(f"{path}: a line of more than {JSON_LIMIT:,} bytes, too large for a record of a run")
        yield line


def find_log(path: str | os.PathLike[str]) -> Path | None:
    """The log at a path; None if there is none yet. In a folder: the only log, or the newest with a name that `Monitor`
    chooses, and a warning says which.
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
            "%s: has %d logs: reading %s, the newest; name another to read that",
            place,
            len(logs),
            newest.name,
        )
        return newest
    if len(logs) > 1:
        raise LocaterError(
            f"{place}: has {len(logs)} logs ({', '.join(log.name for log in logs[:4])}): name one of them"
        )
    return logs[0] if logs else None


def holds_run(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the log of a run, or a folder that has one and no model."""
    place = Path(path)
    if not place.is_dir():
        return place.suffix == ".jsonl" and place.is_file()
    names = {entry.name for entry in place.iterdir()}
    model = "config.json" in names or any(name.endswith((".safetensors", ".gguf", ".bin", ".pt")) for name in names)
    return not model and any(place.glob(OWN))


def read_first_record(path: Path) -> Record | None:
    """The `run` record at the start of a log; None if it is missing or incomplete. A file that is not a log is
    refused.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open("rb") as file:
        for line in (file.readline(), file.readline()):
            record, whole = parse_record(line), line.endswith(b"\n")
            if is_run(record) or (not whole and line[:1] in (b"", b"{")):
                return record if whole else None
            if record is not None or line[:1] != b"{":  # else a crash cut the first line short: look at the next
                break
    raise LocaterError(f"{path}: is not a run log; give the run a file of its own")


NUMBER = {int, float, type(None)}  # types of a number in a log, which bool is not
# fields that a record of each kind must have, beside `step`
FIELDS = {"loss": (), "step": ("heads",), "warning": ("flag", "layer", "head"), "end": ()}


class RunReader:
    """Reads lines as they arrive; `run` is the run so far. An incomplete line is accepted at the end of a log, and
    before the first line of a resumed run.

    With `stored` the numbers of heads, nearly all of a log, are not kept in memory: `with_heads` re-reads those of
    chosen steps. The lines that are fed must then be the whole file, from its beginning.
    """

    def __init__(self, path: Path, stored: bool = False) -> None:
        self.path, self.stored = path, stored
        self.offset = 0  # of the line being read
        self.places: dict[int, tuple[int, int]] = {}  # offset and length of the line of each observed step
        self.number = self.incomplete = 0  # the number of the line being read; that of an incomplete line before it
        self.header: Record | None = None
        self.steps: list[Record] = []
        self.curves: dict[str, Points] = {"loss": []}
        self.rewrites = 0  # changes to steps or curves other than appending
        self.warnings: list[Record] = []
        self.resumed: list[int] = []
        self.ended = self.resuming = False

    def feed(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.number += 1
            self._read_line(line)
            self.offset += len(line)

    def _read_line(self, line: bytes) -> None:
        if not line.strip():
            return
        record = parse_record(line)
        if self.incomplete and not is_run(record):
            self._refuse("is not a JSON object", self.incomplete)
        self.incomplete = 0 if record is not None else self.number
        if record is not None:
            self._add_record(record)
            if self.stored and record.get("kind") == "step":
                self.places[record["step"]] = (self.offset, len(line))
                record["heads"] = dict.fromkeys(record["heads"])

    def with_heads(self, records: Sequence[Record]) -> Sequence[Record]:
        """Observed steps with the numbers of their heads, re-read from the log if they are not in memory."""
        if not self.stored:
            return records
        found: list[Record] = []
        with self.path.open("rb") as file:
            for record in records:
                offset, length = self.places[record["step"]]
                file.seek(offset)
                stored = parse_record(file.read(length)) or {}
                if stored.get("step") != record["step"] or stored.get("heads", {}).keys() != record["heads"].keys():
                    raise LocaterError(f"{self.path}: changed while it was read: start again")
                self._check_heads(stored, self.header or {})
                found.append({**record, "heads": stored["heads"]})
        return found

    def run(self) -> Run | None:
        """The run so far; None before its first record. Nothing is copied: its lists grow when more lines are fed."""
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

    def _add_record(self, record: Record) -> None:
        kind = record.get("kind")
        if kind == "run":
            self._begin_part(record)
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
            self._insert(self.steps, record, itemgetter("step"))

    def _add_numbers(self, record: Record) -> None:
        """Loss and scalars of a line. Null counts as not known: other writers may put it."""
        value = record.get("loss")
        if value is None:
            record.pop("loss", None)
        elif (loss := number(value)) is None:
            self._refuse(f"has the loss {value!r}, not a number")
        else:
            record["loss"] = loss
            self._insert(self.curves["loss"], (record["step"], loss), itemgetter(0))
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
            self._insert(self.curves.setdefault(name, []), (record["step"], scalar), itemgetter(0))

    def _insert(self, entries: list[Any], entry: Any, step_of: Any) -> None:
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

    def _begin_part(self, record: Record) -> None:
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
        """A resumed run starts at `step`: drop the earlier records from there on, since training did not continue from
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
