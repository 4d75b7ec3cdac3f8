"""The checkpoints of a fleet: patterns and lists, and the run and step in their names."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from locater.errors import LocaterError, printable
from locater.files import regular_file
from locater.sources.listing import WEIGHTS, expand, full_name

STEP = re.compile(r"(?<![a-z])(?:global[-_]?)?(step|iteration|iter|checkpoint|ckpt)s?[-_=]?(\d{1,18})(?!\d)", re.I)
JOINTS = "/@-_.= "  # between the name of a run and its step
SOURCE_COLUMNS = ("source", "checkpoint", "path", "url", "checkpoint directory")  # of a list, any case
GENERIC = ("model", "pytorch_model", "adapter_model", "consolidated")  # files that are named by their folder


@dataclass(frozen=True)
class ListedCheckpoint:
    """One checkpoint of a fleet. `run` and `step` are None if they are not known."""

    source: str
    run: str | None = None
    step: int | None = None


@dataclass
class Listing:
    """The checkpoints of a fleet, and what a user should know about how they were found."""

    entries: list[ListedCheckpoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def list_checkpoints(arguments: Sequence[str], run: str | None = None, step_pattern: str | None = None) -> Listing:
    """The checkpoints that patterns, names and lists (`@list.csv`) stand for, each once, in their order."""
    pattern = None if step_pattern is None else _compile_pattern(step_pattern)
    found, skipped = Listing(), []
    by_source: dict[str, ListedCheckpoint] = {}
    for argument in arguments:
        if not argument:
            raise LocaterError("an empty name among the sources: give folders, files, patterns or @list.csv")
        if argument.startswith("@"):
            entries = _read_list(Path(argument[1:]), run, pattern)
        else:
            matched = expand(argument)
            entries = [label_source(source, run, pattern) for source in matched.sources]
            skipped += matched.skipped
        for entry in entries:
            if not entry.source.isprintable():
                raise LocaterError(f"{entry.source!r:.200}: a name that cannot be printed: rename it")
            if by_source.setdefault(entry.source, entry) != entry:
                raise LocaterError(f"{entry.source}: listed twice, with different runs or steps: list it once")
    found.entries = list(by_source.values())
    if skipped:
        names = ", ".join(os.path.basename(path.rstrip("/")) or path for path in skipped[:4])
        more = f" and {len(skipped) - 4} more" if len(skipped) > 4 else ""
        found.notes.append(f"left out, because they hold no weights: {names}{more}")
    unknown = [entry.source for entry in found.entries if entry.step is None]
    if unknown:
        found.notes.append(
            f"{len(unknown)} of {len(found.entries)} names have no step (first {unknown[0]}): "
            "their step is null; --step-pattern REGEX reads it"
        )
    return found


def label_source(source: str, run: str | None = None, pattern: re.Pattern[str] | None = None) -> ListedCheckpoint:
    """A source with the run and the step in its name.

    >>> label_source("/data/run/step-00001000")
    ListedCheckpoint(source='/data/run/step-00001000', run='/data/run', step=1000)
    >>> label_source("hf://org/model@step3000-tokens13B").step, label_source("/models/bert-2").step
    (3000, None)
    """
    if pattern is not None:
        match = pattern.search(source)
        if match is None:
            return ListedCheckpoint(source, run)
        start, step = match.start(), _number(match)
        if step is None:
            return ListedCheckpoint(source, run)
    else:
        place = _step_in_name(source)
        if place is None:
            return ListedCheckpoint(source, run)
        start, step = place
    return ListedCheckpoint(source, run if run is not None else source[:start].rstrip(JOINTS) or None, step)


def _step_in_name(source: str) -> tuple[int, int] | None:
    """Where the last part of a name has a step, and the step. None if there are two different steps."""
    end = len(source.rstrip("/"))
    begin = source.rfind("/", 0, end) + 1
    stem, suffix = os.path.splitext(source[begin:end])
    if suffix in WEIGHTS and stem.split("-")[0].split(".")[0] in GENERIC:  # run/step-100/model.safetensors
        end = max(begin - 1, 0)
        begin = source.rfind("/", 0, end) + 1
    matches = list(STEP.finditer(source, begin, end))
    matches = [m for m in matches if m[1].lower() == "step"] or matches  # stage1-step1000, checkpoint-3-step-500
    if len({int(m[2]) for m in matches}) != 1:
        return None
    return matches[0].start(), int(matches[0][2])


def _compile_pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise LocaterError(f"--step-pattern {text!r}: not a regular expression ({error})") from None
    if pattern.groups != 1 and "step" not in pattern.groupindex:
        raise LocaterError(
            f"--step-pattern {text!r}: has {pattern.groups} groups: put the digits of the step into one, "
            r"such as 'ckpt_(\d+)', or name it (?P<step>...)"
        )
    return pattern


def _number(match: re.Match[str]) -> int | None:
    digits = match["step"] if "step" in match.re.groupindex else match[1]
    if digits is None:
        return None
    if not re.fullmatch(r"\d{1,18}", digits, re.ASCII):
        raise LocaterError(f"--step-pattern {match.re.pattern!r}: {digits!r:.40} in {match.string} is not a number")
    return int(digits)


def _read_list(path: Path, run: str | None, pattern: re.Pattern[str] | None) -> Iterable[ListedCheckpoint]:
    """The rows of a CSV file: a column of sources, and perhaps columns `run` and `step`."""
    regular_file(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file, strict=True) if any(cell.strip() for cell in row)]
    except (csv.Error, UnicodeDecodeError) as error:
        raise LocaterError(f"{path}: not readable as a CSV list ({error})") from None
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None
    if not rows:
        raise LocaterError(f"{path}: an empty list")
    names = [cell.strip().lower() for cell in rows[0]]
    column = next((names.index(name) for name in SOURCE_COLUMNS if name in names), None)
    if column is None:
        if len(names) > 1:
            raise LocaterError(
                f"{path}: has the columns {', '.join(map(printable, names[:6]))}, none of them named source: "
                "rename the column of checkpoints to source"
            )
        names, column, body = ["source"], 0, list(enumerate(rows, 1))  # one column without a heading
    else:
        body = list(enumerate(rows[1:], 2))
    if not body:
        raise LocaterError(f"{path}: has headings and no rows")
    return [_read_row(path, number, names, column, row, run, pattern) for number, row in body]


def _read_row(
    path: Path,
    number: int,
    names: list[str],
    column: int,
    row: list[str],
    run: str | None,
    pattern: re.Pattern[str] | None,
) -> ListedCheckpoint:
    if len(row) != len(names):
        raise LocaterError(f"{path}: row {number} has {len(row)} cells, the heading {len(names)}")
    cells = {name: cell.strip() for name, cell in zip(names, row, strict=True)}
    given = row[column].strip()
    if not given:
        raise LocaterError(f"{path}: row {number} names no source")
    source = full_name(given)
    entry = label_source(source, run, pattern)
    step = cells.get("step") or None
    if step is not None and not re.fullmatch(r"\d{1,18}", step, re.ASCII):
        raise LocaterError(f"{path}: row {number} has the step {step!r:.40}, which is not a whole number")
    return ListedCheckpoint(
        source, run if run is not None else cells.get("run") or entry.run, entry.step if step is None else int(step)
    )
