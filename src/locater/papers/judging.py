"""Claims judged by training runs: arms seed by seed against each other, from the lines of a file.

Differences are taken within a seed, which fixes first weights and order of the data. A measurement is the middle of the seeds' range
and its spread half of that range, so that a verdict asks all seeds to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from locater.papers.claim import Claim, Measured, seeds_range
from locater.papers.paper import Setting, Study
from locater.papers.runs import Arm, Row, Runs, complete

Line = Mapping[str, Any]
Judge = Callable[[Runs], Mapping[str, Measured | None]]
NEEDS = "training runs: --runs FILE of earlier ones, with --jobs N --data FOLDER to make those that it lacks"


def trained(title: str, claims: tuple[Claim, ...], arms: Sequence[Arm], judge: Judge, more: Sequence[Row] = ()) -> Study:
    """A study that reads the runs of these arms (and of single rows), and makes those that are missing when told to."""

    def rows(runs: Runs) -> list[Row]:
        return [*(row for arm in arms for row in arm.rows(runs)), *more]

    def measured(setting: Setting) -> Mapping[str, Measured]:
        if setting.runs is None:
            return {}
        runs = Runs(setting.runs)
        if setting.jobs:
            assert setting.data is not None
            complete(rows, runs, setting.data, setting.jobs, setting.tell)
        return known(judge(runs))

    return Study(title, claims, measured, NEEDS, on_runs=True, rows=rows)


def known(found: Mapping[str, Measured | None]) -> dict[str, Measured]:
    return {key: value for key, value in found.items() if value is not None}


def change(
    runs: Runs, arm: Arm, against: Arm, what: str | Callable[[Line], float], more: Mapping[str, Any] | None = None
) -> Measured | None:
    """Of the ends of two arms, by the seeds that both have; None where one is not whole, or the quantity is not known."""
    of, base = arm.ends(runs), against.ends(runs)
    if of is None or base is None:
        return None
    values = [(value_of(a, what), value_of(b, what)) for a, b in zip(of, base, strict=False)]  # seeds are 0, 1, ...
    if any(x is None for pair in values for x in pair):
        return None
    return seeds_range([a - b for a, b in values if a is not None and b is not None], more)


def level(runs: Runs, arm: Arm, what: str | Callable[[Line], float], more: Mapping[str, Any] | None = None) -> Measured | None:
    """The quantity itself over the seeds of an arm."""
    values = [value_of(line, what) for line in arm.ends(runs) or ()]
    return seeds_range([x for x in values if x is not None], more) if values and None not in values else None


def value_of(line: Line, what: str | Callable[[Line], float]) -> float | None:
    """A number of a line: `report_loss`, or `measures.sink_rate`; None where it is not known.

    >>> value_of({"measures": {"gap": 0.5}}, "measures.gap")
    0.5
    """
    if callable(what):
        return what(line)
    found: Any = line
    for part in what.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


SHOWN = ("entropy", "entropy_share", "row_mass", "first_mass", "sink_rate", "sink_ratio", "gap", "stable_rank", "column_least",
         "explained_away", "spike", "spike_ratio", "gate")  # fmt: skip


def ends_table(runs: Runs, arms: Iterable[Arm]) -> list[dict[str, Any]]:
    """Arms as pages show them, with the seeds that there are: verdicts take whole arms alone."""
    found = []
    for arm in arms:
        ends = arm.so_far(runs)
        if not ends:
            continue
        tried = [runs.of(arm.row(rate, 0)) for rate in arm.rates]
        selected = [None if line is None or line["status"] != "done" else line["select_loss"] for line in tried]
        found.append({
            "arm": arm.name, "rates": list(arm.rates), "select_loss": selected, "rate": arm.rate(runs), "seeds": arm.seeds,
            "ends": [_end(line) for line in ends], "device": ends[0]["device"],
        })  # fmt: skip
    return found


def _end(line: Line) -> dict[str, Any]:
    held = line.get("measures") or {}
    last = (held.get("halves") or [{}])[-1]
    own = {"loss": line["report_loss"], "accuracy": line.get("accuracy"), **{name: (line["heads"] or {}).get(name) for name in "MSF"}}
    return own | {name: held.get(name) for name in SHOWN} | {"residual": last.get("residual"), "cosine": last.get("cosine")}
