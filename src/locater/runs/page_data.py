"""The data of the page of a run: thinned steps and curves, packed numbers, warnings by head."""

from __future__ import annotations

import base64
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from locater.findings import FLAG_NAMES, comparison
from locater.report.pages import short_name
from locater.runs.records import Record
from locater.runs.run_log import Points, Run
from locater.runs.verdict import LossCourse, verdict_of_run

VALUES = 2_050_000  # most numbers on one page: nearly always two bytes each, a third more as base64
MOST_STEPS = 2_000
MOST_POINTS = 1_500
MOST_MARKS = 50  # marks on the page for one head's warnings of one kind
WIDE = 2.0**24  # ratio of a column's largest number to its median, from which half precision would lose the median


class Curve:
    """A long curve reduced to at most MOST_POINTS points: the lowest, the highest and one NaN of every stretch.

    Points are added one by one; when there are too many stretches, neighbours are joined.

    >>> curve = Curve([(step, 1.0) for step in range(5000)] + [(5000, 9.0), (5001, math.nan)])
    >>> len(curve.points()) <= MOST_POINTS + 2, curve.points()[-2:]
    (True, [(5000, 9.0), (5001, nan)])
    """

    def __init__(self, points: Iterable[tuple[int, float]] = ()) -> None:
        self.width = 1  # points in a stretch
        self.count = 0
        self.ends: Points = []  # the first point and the last
        self.stretches: list[list[Any]] = []  # lowest, highest, not finite; each (step, number) or None
        for point in points:
            self.add(point)

    def add(self, point: tuple[int, float]) -> None:
        while self.count % self.width == 0 and len(self.stretches) >= self._most_stretches():
            self._join()
        if self.count % self.width == 0:
            self.stretches.append([None, None, None])
        _widen(self.stretches[-1], point)
        self.count += 1
        self.ends[1 if self.count > 1 else 0 :] = [point]

    def _most_stretches(self) -> int:
        return MOST_POINTS if self.width == 1 else MOST_POINTS // 3

    def _join(self) -> None:
        """Join stretches in pairs. The last may have no neighbour, and takes the next points."""
        pairs = [self.stretches[i : i + 2] for i in range(0, len(self.stretches), 2)]
        for first, *second in pairs:
            for point in (point for stretch in second for point in stretch if point is not None):
                _widen(first, point)
        self.stretches = [pair[0] for pair in pairs]
        self.width *= 2

    def points(self) -> Points:
        by_step = {point[0]: point for stretch in self.stretches for point in stretch if point is not None}
        return sorted({**by_step, **{point[0]: point for point in self.ends}}.values(), key=itemgetter(0))


def _widen(stretch: list[Any], point: tuple[int, float]) -> None:
    low, high, broken = stretch
    if not math.isfinite(point[1]):
        stretch[2] = broken or point
        return
    if low is None or point[1] < low[1]:
        stretch[0] = point
    if high is None or point[1] > high[1]:
        stretch[1] = point


def thin(run: Run, room: int = VALUES) -> tuple[list[Record], int]:
    """The observed steps to draw in `room` numbers (every n-th, the last, and those where a warning began), and n."""
    heads = sum(entry["heads"] for entry in run.header["layers"])
    most = max(2, min(MOST_STEPS, room // max(1, heads * len(columns(run)))))
    last = len(run.steps) - 1
    stride = math.ceil(len(run.steps) / most) if len(run.steps) > most else 1
    if stride == 1:
        return list(run.steps), 1
    began = sorted({group["steps"][0] for group in group_warnings(run)})[: most // 16]
    places = (bisect_left(run.steps, step, key=itemgetter("step")) for step in began)
    marked = {at for at, step in zip(places, began, strict=True) if at <= last and run.steps[at]["step"] == step}
    return [run.steps[at] for at in sorted({*range(0, last + 1, stride), last, *marked})], stride


def columns(run: Run) -> list[str]:
    """Columns in the order of the header, then those that only steps have."""
    names = dict.fromkeys(run.header["columns"])
    for record in run.steps[:1] + run.steps[-1:]:
        names |= dict.fromkeys(record["heads"])
    return list(names)


def pack(
    run: Run,
    drawn: Sequence[Record],
    stride: int,
    keep: int = 0,
    curves: dict[str, Curve] | None = None,
    course: LossCourse | None = None,
) -> dict[str, Any]:
    """What the page's script reads: all but the first `keep` steps of `drawn`, which the page already has.

    `curves` are the loss and the scalars, and `course` is that of the loss, if a `LogFollower` already has them.
    """
    new, names = run.with_heads(drawn[keep:]), columns(run)
    if curves is None:
        curves = {name: Curve(points) for name, points in {"loss": run.losses, **run.scalars}.items()}
    values = {name: _encode_column(run, new, name) for name in names if any(name in record["heads"] for record in new)}
    scalars = sorted({name for record in new for name in record["scalars"]})
    layers, warnings = run.header["layers"], group_warnings(run)
    verdict = verdict_of_run(run, course)
    return {
        "name": short_name(str(run.header.get("source", "run"))),
        "every": run.header.get("every"),
        "layers": [_layer_data(entry) for entry in layers],
        "columns": names,
        "keep": keep,
        "steps": [record["step"] for record in new],
        "values": values,
        "scalars": {
            "loss": [_round_digits(record.get("loss")) for record in new],
            **{name: [_round_digits(record["scalars"].get(name)) for record in new] for name in scalars},
        },
        "curves": {name: [[step, _round_digits(x)] for step, x in curve.points()] for name, curve in curves.items()},
        "warnings": warnings,
        "comparisons": _comparisons(warnings),
        "verdict": {"state": verdict.state, "lines": [verdict.verdict, verdict.why, verdict.next]},
        "resumed": run.resumed,
        "ended": run.ended,
        "last": run.last,
        "observed": len(run.steps),
        "stride": stride,
    }


def _layer_data(entry: Record) -> dict[str, Any]:
    kind = entry.get("kind", "self")
    return {"short": str(entry["layer"]), "name": entry["name"], "heads": entry["heads"], "kind": kind}


def _encode_column(run: Run, steps: Sequence[Record], name: str) -> list[Any]:
    """[base, scale, base64, bytes per number]: one column, by step, layer and head, with NaN for null.

    Numbers are in half precision, relative to the lowest if all are nearly the same. They are in double precision if
    they are so far apart that the small ones would become 0.
    """
    empty: list[list[None]] = [[None] * entry["heads"] for entry in run.header["layers"]]
    table = np.array(
        [
            [
                x
                for row, none in zip(record["heads"].get(name) or empty, empty, strict=True)
                for x in (none if row is None else row)
            ]
            for record in steps
        ],
        dtype=np.float64,
    )
    table[~np.isfinite(table)] = np.nan
    known = table[np.isfinite(table) & (table != 0)]
    base, scale, size = 0.0, 1.0, 2
    if known.size:
        low, high, usual = float(known.min()), float(known.max()), float(np.median(np.abs(known)))
        largest = max(abs(low), abs(high))
        if not np.any(table == 0) and high / 16 - low / 16 < largest / 256:
            base, largest = low, high - low
        if largest > WIDE * usual:
            size = 8
        elif largest > 0:
            scale = 2.0 ** max(-1022, math.frexp(largest)[1] - 15)  # the largest ends up just below 2^15
    return [base, scale, base64.b64encode(((table - base) / scale).astype(f"<f{size}").tobytes()).decode(), size]


def group_warnings(run: Run) -> list[dict[str, Any]]:
    """One entry per head and flag: the steps where it began, the last step, how often, the worst value, the message."""
    places = {entry["layer"]: place for place, entry in enumerate(run.header["layers"])}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in run.warnings:
        new: dict[str, Any] = {
            "layer": places.get(record["layer"]),
            "head": record["head"],
            "flag": str(record["flag"]),
            "steps": [],
            "count": 0,
            "threshold": _round_digits(record.get("threshold")),
            "worst": None,
            "message": str(record.get("message", "")),
        }
        group = groups.setdefault((record["layer"], record["head"], record["flag"]), new)
        if not group["count"] or (
            _observed_before(run, record["step"]) != group["last"] and len(group["steps"]) < MOST_MARKS
        ):
            group["steps"].append(record["step"])  # not raised at the previous observed step: it begins here
        group["count"] += 1
        group["last"] = record["step"]
        group["worst"] = _round_digits(_worse_of(group["worst"], record.get("value"), record.get("threshold")))
    return list(groups.values())


def _observed_before(run: Run, step: int) -> int | None:
    """The previous observed step; None for the first, and for a step that was not observed."""
    at = bisect_left(run.steps, step, key=itemgetter("step"))
    return run.steps[at - 1]["step"] if 0 < at < len(run.steps) and run.steps[at]["step"] == step else None


def _comparisons(warnings: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The meaning of comparisons such as "spread>5" among the warnings, in the form of the table of flags."""
    meanings = {}
    for flag in {group["flag"] for group in warnings} - set(FLAG_NAMES):
        about = comparison(flag)
        if about is not None:
            column, _, meaning, remedy = about
            way_out = remedy.words()
            meanings[flag] = {"meaning": meaning, "way_out": way_out[:1].upper() + way_out[1:], "needs": [column]}
    return meanings


def _worse_of(a: Any, b: float | None, threshold: float | None) -> float | None:
    """The one that is farther beyond the threshold."""
    known = [x for x in (a, b) if isinstance(x, int | float) and math.isfinite(x)]
    return max(known, key=lambda x: abs(x - (threshold or 0.0)), default=None)


def _round_digits(x: float | None) -> float | str | None:
    """Seven significant digits, as a float32 loss has; NaN and infinity, which JSON lacks, as strings."""
    if x is None:
        return None
    if math.isfinite(x):
        short = float(f"{x:.7g}")
        return short if math.isfinite(short) else x  # rounding may take the largest floats to infinity
    return "NaN" if math.isnan(x) else "infinite"
