"""Claims judged by training runs: arms seed by seed against each other, from the lines of a file.

Differences are taken within a seed, which fixes first weights and order of the data; `claims.py` says what they
decide. Seeds that chose a learning rate do not judge, and an arm whose best rate is an edge of its grid decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.provenance import origin_of_lines
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Arm, Row, Runs, train_missing

Line = Mapping[str, Any]
Quantity = str | Callable[[Line], float]
Judge = Callable[[Runs], Results | Mapping[str, Measurement | None]]
NEEDS = "training runs: --runs FILE of earlier ones, with --jobs N --data FOLDER to make those that it lacks"


def study_of_arms(
    title: str, claims: tuple[Claim, ...], arms: Sequence[Arm], judge: Judge, more: Sequence[Row] = ()
) -> Study:
    """A study of the runs of these arms, and of single rows."""
    return study_of_runs(title, claims, lambda runs: [*(row for arm in arms for row in arm.rows(runs)), *more], judge)


def study_of_runs(title: str, claims: tuple[Claim, ...], rows: Callable[[Runs], list[Row]], judge: Judge) -> Study:
    """A study that reads these runs, and makes those that are missing when told to."""

    def measure(setting: Setting) -> Results:
        if setting.runs is None:
            return Results({})
        runs = Runs(setting.runs, setting.more_runs)
        if setting.jobs:
            assert setting.data is not None
            train_missing(rows, runs, setting.data, setting.jobs, setting.log)
        found = judge(runs)
        results = found if isinstance(found, Results) else Results(found)
        lines = [line for row in rows(runs) if (line := runs.of(row)) is not None]
        return replace(results, origin=origin_of_lines(lines))

    return Study(title, claims, measure, NEEDS, on_runs=True, rows=rows)


def difference(
    runs: Runs, arm: Arm, against: Arm, what: Quantity, more: Mapping[str, Any] | None = None
) -> Measurement | None:
    """Of the ends of two arms, by the seeds that both have; None where one is not whole, or the quantity is not
    known.
    """
    values = judging_values(runs, (arm, against), what)
    if values is None:
        return None
    return open_at_edges(runs, (arm, against), by_seed([a - b for a, b in values], more))


def judging_values(runs: Runs, arms: Sequence[Arm], what: Quantity) -> list[tuple[float, ...]] | None:
    """Of each seed that judges, the quantity of every arm; None where an arm is not whole, or the quantity not known.
    Seeds that chose the rate of one of the arms are left out.
    """
    ends = [arm.final_lines(runs) for arm in arms]
    first = max(arm.choosing for arm in arms)
    values = [
        tuple(value_of(line, what) for line in each) for each in zip(*(held or () for held in ends), strict=False)
    ]
    judging = [tuple(x for x in each if x is not None) for each in values[first:]]  # seeds are 0, 1, ...
    return judging if judging and all(len(each) == len(arms) for each in judging) else None


def open_at_edges(runs: Runs, arms: Iterable[Arm], measured: Measurement) -> Measurement:
    """The measurement, left open where the best rate of one of these arms is an edge of its grid."""
    edges = {arm.name: edge for arm in arms if (edge := arm.edge(runs)) is not None}
    if not edges:
        return measured
    said = ", ".join(f"{name} ({rate:g})" for name, rate in edges.items())
    return replace(
        measured, spread=math.inf, sample=(), spread_of=f"unknown: the best rate is an edge of the grid: {said}"
    )


def mean_of_arm(runs: Runs, arm: Arm, what: Quantity, more: Mapping[str, Any] | None = None) -> Measurement | None:
    """The quantity itself over the seeds of an arm."""
    values = judging_values(runs, (arm,), what)
    return None if values is None else open_at_edges(runs, (arm,), by_seed([x for (x,) in values], more))


def largest_over_seeds(runs: Runs, arm: Arm, what: Quantity) -> Measurement | None:
    """Over seeds: for a claim that no head, or no key, has something, which one seed could refute."""
    values = judging_values(runs, (arm,), what)
    if values is None:
        return None
    known = [x for (x,) in values]
    found = Measurement(
        max(known), 0.0, f"none: the largest of {len(known)} seeds", {"by_seed": known}, values=len(known)
    )
    return open_at_edges(runs, (arm,), found)


def rank_correlation(
    runs: Runs, arms: Iterable[Arm], x: Quantity | Sequence[float], y: Quantity, more: Mapping[str, Any] | None = None
) -> Measurement | None:
    """Over arms, for each seed that all have; `x` may be a number for each arm. None while an arm is not whole."""
    arms = list(arms)
    ys = judging_values(runs, arms, y)
    xs = judging_values(runs, arms, x) if isinstance(x, str) or callable(x) else ys and [tuple(x)] * len(ys)
    if not xs or not ys:
        return None
    pairs = [
        (torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        for a, b in zip(xs, ys, strict=True)
    ]
    return open_at_edges(
        runs, arms, by_seed([spearman(a, b) or 0.0 for a, b in pairs], more)
    )  # 0: one side is constant


def uniform_first(length: int) -> float:
    """The first token's share of rows under uniform causal attention: the mean of 1, 1/2, ..., 1/length.

    >>> uniform_first(2), round(uniform_first(256), 4)
    (0.75, 0.0239)
    """
    return sum(1 / i for i in range(1, length + 1)) / length


def has_sink(runs: Runs, arm: Arm) -> bool:
    """Whether the first token has more than uniform attention would give it, with every seed; else there is no sink to
    take away.
    """
    found, least = arm.final_lines(runs), uniform_first(arm.base.length)
    return bool(found) and all((value_of(line, "measures.first_mass") or 0.0) > least for line in found or ())


def mark_inconclusive(
    measured: Mapping[str, Measurement | None], ids: Iterable[str], reason: str
) -> dict[str, Measurement | None]:
    """The same measurements, those of `ids` left open for a reason that no number of seeds mends.

    >>> mark_inconclusive({"a": Measurement(0.1, 0.0, ""), "b": None}, ("a", "b"), "there is no sink")["a"].spread_of
    'unknown: there is no sink'
    """
    open_ids, why = set(ids), f"unknown: {reason.removeprefix('unknown: ')}"
    return {
        key: replace(value, spread=math.inf, spread_of=why, sample=())
        if value is not None and key in open_ids
        else value
        for key, value in measured.items()
    }


def value_of(line: Line, what: Quantity) -> float | None:
    """A number of a line: `report_loss`, or `measures.sink_rate`; None where it is not known, or not a number.

    >>> value_of({"measures": {"gap": 0.5}}, "measures.gap")
    0.5
    """
    if callable(what):
        value = what(line)
        return None if math.isnan(value) else value
    found: Any = line
    for part in what.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


PAGE_MEASURES = ("entropy", "entropy_share", "row_mass", "first_mass", "sink_rate", "sink_ratio", "gap", "stable_rank", "column_least",
         "explained_away", "spike", "spike_ratio", "gate")  # fmt: skip


def final_numbers(line: Line) -> dict[str, Any]:
    """What pages show of a run."""
    held = line.get("measures") or {}
    last = (held.get("halves") or [{}])[-1]
    own = {
        "loss": line["report_loss"],
        "accuracy": line.get("accuracy"),
        **{name: (line["heads"] or {}).get(name) for name in "MSF"},
    }
    return (
        own
        | {name: held.get(name) for name in PAGE_MEASURES}
        | {"residual": last.get("residual"), "cosine": last.get("cosine")}
    )


def table_of_arms(
    runs: Runs, arms: Iterable[Arm], end: Callable[[Line], dict[str, Any]] = final_numbers
) -> list[dict[str, Any]]:
    """Arms as pages show them, with the seeds that there are: verdicts take whole arms alone."""
    found = []
    for arm in arms:
        ends = arm.lines_so_far(runs)
        if not ends:
            continue
        tried = [runs.of(arm.row(rate, 0)) for rate in arm.rates]
        selected = [None if line is None or line["status"] != "done" else line["select_loss"] for line in tried]
        found.append({
            "arm": arm.name, "rates": list(arm.rates), "select_loss": selected, "rate": arm.rate(runs), "seeds": arm.seeds,
            "ends": [end(line) for line in ends], "device": ends[0]["device"],
        })  # fmt: skip
    return found
