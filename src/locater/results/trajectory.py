"""`trajectory()`: the numbers of every head over the checkpoints of training runs, as one JSON-shaped document.

Rows are those of scans, with where each checkpoint came from beside them. Nothing is interpolated: steps that are
missing, failed, repeated or of another shape are named, never filled in.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from locater.errors import LocaterError
from locater.report.verdict_sentences import amount
from locater.version import SCHEMA, __version__

# ---- steps: which are missing from a regular sequence, and where sources that failed would have been ----


class Place(NamedTuple):
    """Where a source that was read belongs."""

    source: str
    run: str
    step: int | None


def gaps(steps: Sequence[int]) -> list[dict[str, int]]:
    """Where checkpoints are missing: `after` and `before` are the steps around a gap, `every` the usual distance.

    A gap is a distance that is a multiple of the distance on both sides of it. Doubling steps and a schedule that
    changes have none, and where gaps are more than half as many as the usual distances, the sequence is not regular.

    >>> gaps([0, 1000, 2000, 4000, 5000])
    [{'after': 2000, 'before': 4000, 'every': 1000, 'missing': 1}]
    >>> gaps([0, 1, 2, 4, 8, 16, 32]), gaps([0, 100, 200, 300, 1300, 2300, 3300])
    ([], [])
    """
    distances = [b - a for a, b in pairwise(steps)]
    found = []
    for at, distance in enumerate(distances):
        before = next((x for x in reversed(distances[:at]) if x < distance), None)
        after = next((x for x in distances[at + 1 :] if x < distance), None)
        if before is not None and before == after and distance % before == 0:
            found.append((before, steps[at], steps[at + 1]))
    usual, irregular = Counter(distances), Counter(every for every, _, _ in found)
    return [
        {"after": after, "before": before, "every": every, "missing": (before - after) // every - 1}
        for every, after, before in found
        if usual[every] >= 2 * irregular[every]
    ]


def place_failures(errors: Mapping[str, str], places: Sequence[Place]) -> list[dict[str, Any]]:
    """Each failed source with its reason, and the run and step that its name says, where sources that were read have
    names of the same form (`a/step-300` next to `a/step-200`, which is step 200 of a); else null for both.
    """
    forms, known = _forms(places), {(place.run, place.step) for place in places}
    failed = []
    for source, reason in errors.items():
        run, step = _read_name(source, forms)
        if (run, step) in known:  # another source has this step
            run, step = None, None
        failed.append({"source": source, "run": run, "step": step, "reason": reason})
    return failed


def _forms(places: Sequence[Place]) -> list[tuple[str, re.Pattern[str]]]:
    """Patterns of names with a number that was the step, by run."""
    forms: dict[tuple[str, str], re.Pattern[str]] = {}
    for place in places:
        for number in re.finditer(r"\d+", place.source):
            if place.step is not None and int(number[0]) == place.step:
                head, tail = place.source[: number.start()], place.source[number.end() :]
                pattern = rf"{re.escape(head)}(\d+){re.escape(tail)}"
                forms.setdefault((place.run, pattern), re.compile(pattern))
    return [(run, pattern) for (run, _), pattern in forms.items()]


def _read_name(source: str, forms: Sequence[tuple[str, re.Pattern[str]]]) -> tuple[str | None, int | None]:
    """Run and step, where all forms that fit agree on them.

    >>> _read_name("a/step-300", _forms([Place("a/step-200", "a", 200)]))
    ('a', 300)
    """
    answers = {(run, int(match[1])) for run, pattern in forms if (match := pattern.fullmatch(source))}
    return answers.pop() if len(answers) == 1 else (None, None)


# ---- the document ----

Row = Mapping[str, Any]
DIGITS = 6  # significant digits of every number in the document
# columns that say which head a row is, and of what; every other column with a number is followed over steps
IDENTITY = frozenset(
    ("layer", "head", "kv_head", "kind", "width", "head_dim", "source", "run", "step", "digest", "layer_name", "length")
)


@dataclass(frozen=True)
class Checkpoint:
    """All rows of one source, in the order of the model."""

    source: str
    run: str
    step: int | None
    # equal where queries, keys and norms are equal: no other tensor was read; None where no row has one
    digest: str | None
    rows: list[Row]

    @property
    def shape(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(row.get(key) for key in ("layer", "head", "kind", "width", "head_dim")) for row in self.rows)


def trajectory(rows: Iterable[Row], errors: Mapping[str, str], *, length: int | None = None) -> dict[str, Any]:
    """Numbers, flags and faults of every head over the steps of one run or several.

    A row has the columns of a scan's row and `source`, `run`, `step`, `digest`, `layer_name`; rows of different sources
    may come in any order. `errors` are the sources that could not be read, with one line each. `length` is the number
    of tokens in view of the scans, where rows have no column `length`.

    >>> row = {"layer": 0, "head": 0, "kind": "self", "M": 1.5, "flags": ["sharp"], "faults": [], "run": "a"}
    >>> sources = [(f"a/step-{step}", step) for step in (100, 200, 400, 500)]
    >>> document = trajectory([{**row, "source": s, "step": n} for s, n in sources], {"a/step-300": "cut short"})
    >>> run = document["runs"][0]
    >>> run["values"]["M"][0], run["gaps"], document["failed"][0]["step"]
    ([[1.5]], [], 300)
    """
    rows = list(rows)
    checkpoints = _checkpoints(rows)
    columns = _columns(rows)
    failed = place_failures(errors, [Place(x.source, x.run, x.step) for x in checkpoints])
    runs: list[dict[str, Any]] = []
    shapes = []
    for name in dict.fromkeys(x.run for x in checkpoints):
        parts = _by_shape([x for x in checkpoints if x.run == name])
        titles = _part_names(name, parts)
        for failure in (x for x in failed if x["run"] == name):
            failure["run"] = titles[_nearest(parts, failure["step"])]
        for part, title in zip(parts, titles, strict=True):
            runs.append(_run_entry(part, title, columns, [x["step"] for x in failed if x["run"] == title]))
        if len(parts) > 1:
            shapes.append({"run": name, "parts": titles})
    return {
        "schema": SCHEMA,
        "locater": __version__,
        "length": _length(rows, length),
        "columns": columns,
        "runs": runs,
        "failed": failed,
        "duplicates": _duplicates(runs),
        "shapes": shapes,
    }


def _checkpoints(rows: Sequence[Row]) -> list[Checkpoint]:
    by_source: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_source.setdefault((str(row.get("run") or "run"), str(row["source"])), []).append(row)
    return [_checkpoint(run, source, own) for (run, source), own in by_source.items()]


def _checkpoint(run: str, source: str, rows: list[Row]) -> Checkpoint:
    rows = sorted(rows, key=lambda row: (row["layer"], row["head"]))
    heads: dict[int, list[int]] = {}
    for row in rows:
        heads.setdefault(row["layer"], []).append(row["head"])
    for layer, numbers in heads.items():
        if numbers != list(range(len(numbers))):
            raise LocaterError(
                f"{source}: layer {layer} has rows for heads {str(numbers)[1:60]}, and not one for each of its heads: "
                "scan this source again"
            )
    steps = {row.get("step") for row in rows}
    if len(steps) > 1:
        raise LocaterError(f"{source}: its rows name several steps ({sorted(map(str, steps))}): scan it again")
    step = steps.pop()
    digests = [row.get("digest") for row in rows]
    known = None not in digests
    digest = hashlib.sha256("\n".join(map(str, digests)).encode()).hexdigest()[:16] if known else None
    return Checkpoint(source, run, None if step is None else int(step), digest, rows)


def _columns(rows: Sequence[Row]) -> list[str]:
    """Columns with a number in any row."""
    names: dict[str, None] = {}
    for row in rows:
        for name, value in row.items():
            if name not in names and isinstance(value, Real) and not isinstance(value, bool):
                names[name] = None
    order = list(rows[0]) if rows else []
    return sorted((name for name in names if name not in IDENTITY), key=lambda x: order.index(x) if x in order else 999)


def _length(rows: Sequence[Row], given: int | None) -> int | None:
    lengths = {int(row["length"]) for row in rows if row.get("length") is not None}
    if given is not None:
        lengths.add(given)
    if len(lengths) > 1:
        raise LocaterError(
            f"rows were computed for different numbers of tokens in view ({', '.join(map(str, sorted(lengths)))}): "
            "scan all checkpoints with one --length"
        )
    return lengths.pop() if lengths else None


# ---- shapes ----


def _by_shape(checkpoints: Sequence[Checkpoint]) -> list[list[Checkpoint]]:
    """Checkpoints of one run that have the same heads; different heads are never drawn as one line."""
    parts: dict[tuple[Any, ...], list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        parts.setdefault(checkpoint.shape, []).append(checkpoint)
    return list(parts.values())


def _part_names(run: str, parts: Sequence[Sequence[Checkpoint]]) -> list[str]:
    if len(parts) == 1:
        return [run]
    names: list[str] = []
    for part in parts:
        layers = len({row["layer"] for row in part[0].rows})
        sizes = ", ".join(str(x) for x in sorted({row.get("head_dim") or 0 for row in part[0].rows}))
        name = f"{run} ({amount(layers, 'layer')}, {amount(len(part[0].rows), 'head')} of {sizes})"
        names.append(name if name not in names else f"{name} {len(names) + 1}")
    return names


def _nearest(parts: Sequence[Sequence[Checkpoint]], step: int) -> int:
    """The part with the checkpoint that is nearest to a step. A part may have no step at all (`run/final`)."""
    distances = [min((abs(x.step - step) for x in part if x.step is not None), default=math.inf) for part in parts]
    return distances.index(min(distances))


# ---- one run ----


def _run_entry(
    checkpoints: Sequence[Checkpoint], name: str, columns: Sequence[str], failed: Sequence[int]
) -> dict[str, Any]:
    drawn, aside = _order_by_step(checkpoints)
    numbered = any(x.step is not None for x in drawn)
    steps: list[int] = [x.step if x.step is not None else at for at, x in enumerate(drawn)]
    seen: dict[str, int] = {}
    entries = []
    for step, x in zip(steps, drawn, strict=True):
        same = seen.get(x.digest) if x.digest is not None else None
        entries.append({"step": step, "source": x.source, "digest": x.digest, "same_as": same})
        if x.digest is not None:
            seen.setdefault(x.digest, step)
    layers = _layers(checkpoints[0].rows)
    findings = findings_over_steps([x.rows for x in drawn], steps)
    return {
        "name": name,
        "numbered": numbered,  # without numbers, steps are counted in the order of the sources
        "layers": layers,
        "steps": entries,
        "gaps": gaps(sorted({*steps, *failed})) if numbered else [],
        "aside": aside,
        "values": {column: _table(drawn, column, [layer["heads"] for layer in layers]) for column in columns},
        "first": first_of_each_flag(findings),
        "findings": findings,
    }


def _order_by_step(checkpoints: Sequence[Checkpoint]) -> tuple[list[Checkpoint], list[dict[str, Any]]]:
    """Checkpoints by step, and those that have no place of their own among them, with the reason."""
    if all(x.step is None for x in checkpoints):
        return list(checkpoints), []
    aside: list[tuple[Checkpoint, str]] = []
    by_step: dict[int, list[Checkpoint]] = {}
    for x in checkpoints:
        if x.step is not None:
            by_step.setdefault(x.step, []).append(x)
    drawn = []
    for step in sorted(by_step):
        first, *others = by_step[step]
        if not others or all(x.digest is not None and x.digest == first.digest for x in others):
            drawn.append(first)
            aside += [(x, f"the same step, with the queries, keys and norms of {first.source}") for x in others]
        else:
            names = ", ".join(x.source for x in by_step[step][:3])
            aside += [
                (x, f"step {step} exists more than once with different weights: {names}") for x in (first, *others)
            ]
    places = {x.digest: x.step for x in drawn if x.digest is not None}
    for x in checkpoints:
        if x.step is None:
            same = f"; its queries, keys and norms are those of step {places[x.digest]}" if x.digest in places else ""
            aside.append((x, f"no step is known of it{same}"))
    return drawn, [{"source": x.source, "step": x.step, "reason": reason} for x, reason in aside]


def _layers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    layers: dict[int, dict[str, Any]] = {}
    for row in rows:
        name = str(row.get("layer_name") or f"layer {row['layer']}")
        new = {"layer": row["layer"], "name": name, "kind": row.get("kind") or "self", "heads": 0}
        layers.setdefault(row["layer"], new)["heads"] += 1
    return list(layers.values())


def _table(checkpoints: Sequence[Checkpoint], column: str, heads: Sequence[int]) -> list[list[list[float | None]]]:
    """A column by step, layer and head, rounded; None for no number."""
    numbers = np.array([[row.get(column) for row in x.rows] for x in checkpoints], dtype=np.float64)
    short = _round_digits(numbers).astype(object)
    short[~np.isfinite(numbers)] = None
    edges = np.cumsum([0, *heads]).tolist()
    return [[line[a:b] for a, b in pairwise(edges)] for line in short.tolist()]


def _round_digits(x: np.ndarray) -> np.ndarray:
    """To DIGITS significant digits.

    >>> _round_digits(np.array([0.123456789, -98765432.1, 0.0])).tolist()
    [0.123457, -98765400.0, 0.0]
    """
    size = np.where(np.isfinite(x) & (x != 0), np.abs(x), 1.0)
    places = DIGITS - 1 - np.floor(np.log10(size))
    # powers of ten above 1 are exact, those below are not: divide by them instead
    up, down = 10.0 ** np.clip(places, 0, 300), 10.0 ** np.clip(-places, 0, 300)
    return np.where(places > 300, x, np.rint(x * up / down) / up * down)


def _duplicates(runs: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups of checkpoints with equal queries, keys and norms, within runs and across them."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for x in run["steps"]:
            if x["digest"] is not None:
                place = {"run": run["name"], "step": x["step"], "source": x["source"]}
                groups.setdefault(x["digest"], []).append(place)
    return [group for group in groups.values() if len(group) > 1]


# ---- flags and faults over steps: when each is first raised, and from when to when ----


def findings_over_steps(checkpoints: Sequence[Sequence[Row]], steps: Sequence[int]) -> list[dict[str, Any]]:
    """One entry per head and flag: at which steps it is raised, and at which it is a fault.

    `checkpoints` are the rows of each. `spans` are pairs of steps, from and to, over all checkpoints between them.
    """
    raised: dict[tuple[int, int, str], tuple[list[int], list[int]]] = {}
    for at, rows in enumerate(checkpoints):
        for row in rows:
            faults = _texts(row, "faults")
            for flag in _texts(row, "flags"):
                flagged, faulty = raised.setdefault((row["layer"], row["head"], flag), ([], []))
                flagged.append(at)
                if flag in faults:
                    faulty.append(at)
    return [
        {
            "layer": layer,
            "head": head,
            "flag": flag,
            "first": steps[flagged[0]],
            "first_fault": steps[faulty[0]] if faulty else None,
            "spans": _spans(flagged, steps),
            "fault_spans": _spans(faulty, steps),
        }
        for (layer, head, flag), (flagged, faulty) in raised.items()
    ]


def _texts(row: Row, column: str) -> list[str]:
    texts = row.get(column)
    return [] if texts is None else [str(text) for text in texts]


def _spans(places: Sequence[int], steps: Sequence[int]) -> list[list[int]]:
    """Neighbouring places as pairs of steps.

    >>> _spans([0, 1, 3], [100, 200, 300, 400])
    [[100, 200], [400, 400]]
    """
    spans: list[list[int]] = []
    before = -2
    for at in places:
        if at == before + 1:
            spans[-1][1] = steps[at]
        else:
            spans.append([steps[at], steps[at]])
        before = at
    return spans


def first_of_each_flag(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each flag of a run: the first step that raises it, the head that does, and how many heads ever do."""
    first: dict[str, dict[str, Any]] = {}
    for x in findings:
        best = first.setdefault(x["flag"], {"flag": x["flag"], "step": None, "heads": 0, "fault_step": None})
        best["heads"] += 1
        if best["step"] is None or x["first"] < best["step"]:
            best |= {"step": x["first"], "layer": x["layer"], "head": x["head"]}
        if x["first_fault"] is not None and (best["fault_step"] is None or x["first_fault"] < best["fault_step"]):
            best["fault_step"] = x["first_fault"]
    return sorted(first.values(), key=lambda x: (x["step"], x["flag"]))
