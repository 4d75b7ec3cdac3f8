"""Runs compared seed by seed, by the seeds that both sides have finished: a sitting that was cut short leaves some.

Which seeds there are depends on the clock and not on what they say, so that the interval of those that there are holds
its level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from locater_lab.engine.arms import Line, What, value_of
from locater_lab.engine.claims import Measurement, by_seed
from locater_lab.engine.runs import Row, Runs

FEWEST = 3  # seeds that a claim is judged by
Repeats = Mapping[int, Row]  # the same arm by seed


def finished(runs: Runs, rows: Iterable[Row]) -> dict[int, Line]:
    """Lines by seed, of the runs that came to their end."""
    lines = {row.plan.seed: runs.of(row) for row in rows}
    return {seed: line for seed, line in lines.items() if line is not None and line["status"] == "done"}


def level_of(runs: Runs, rows: Iterable[Row], what: What) -> Measurement | None:
    """The quantity itself; None with fewer than `FEWEST` seeds."""
    values = [value_of(line, what) for line in finished(runs, rows).values()]
    return measured_by([x for x in values if x is not None])


def change_of(
    runs: Runs, rows: Iterable[Row], against: Iterable[Row], what: What, more: Mapping[str, Any] | None = None
) -> Measurement | None:
    """Differences within a seed; None with fewer than `FEWEST` pairs."""
    return measured_by(list(differences(runs, rows, against, what).values()), more)


def differences(runs: Runs, rows: Iterable[Row], against: Iterable[Row], what: What) -> dict[int, float]:
    """By seed, where both runs have finished and know the quantity."""
    ours, base = finished(runs, rows), finished(runs, against)
    values = {seed: (value_of(ours[seed], what), value_of(base[seed], what)) for seed in sorted(ours.keys() & base)}
    return {seed: a - b for seed, (a, b) in values.items() if a is not None and b is not None}


def measured_by(values: list[float], more: Mapping[str, Any] | None = None) -> Measurement | None:
    """Mean and interval over seeds; None with fewer than `FEWEST`.

    >>> measured_by([1.0, 2.0]), measured_by([1.0, 2.0, 3.0]).value
    (None, 2.0)
    """
    return by_seed(values, more) if len(values) >= FEWEST else None
