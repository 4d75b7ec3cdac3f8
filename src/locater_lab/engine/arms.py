"""Claims judged by training runs: arms seed by seed against each other, from the lines of a file.

Differences are taken within a seed, which fixes first weights and order of the data; `claims.py` says what they
decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
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

    def measure(setting: Setting) -> Results | Mapping[str, Measurement | None]:
        if setting.runs is None:
            return {}
        runs = Runs(setting.runs, setting.more_runs)
        if setting.jobs:
            assert setting.data is not None
            train_missing(rows, runs, setting.data, setting.jobs, setting.log)
        return judge(runs)

    return Study(title, claims, measure, NEEDS, on_runs=True, rows=rows)


def difference(
    runs: Runs, arm: Arm, against: Arm, what: Quantity, more: Mapping[str, Any] | None = None
) -> Measurement | None:
    """Of the ends of two arms, by the seeds that both have; None where one is not whole, or the quantity is not
    known.
    """
    of, base = arm.final_lines(runs), against.final_lines(runs)
    if of is None or base is None:
        return None
    values = [(value_of(a, what), value_of(b, what)) for a, b in zip(of, base, strict=False)]  # seeds are 0, 1, ...
    if any(x is None for pair in values for x in pair):
        return None
    return by_seed([a - b for a, b in values if a is not None and b is not None], more)


def mean_of_arm(runs: Runs, arm: Arm, what: Quantity, more: Mapping[str, Any] | None = None) -> Measurement | None:
    """The quantity itself over the seeds of an arm."""
    values = [value_of(line, what) for line in arm.final_lines(runs) or ()]
    return by_seed([x for x in values if x is not None], more) if values and None not in values else None


def rank_correlation(
    runs: Runs, arms: Iterable[Arm], x: Quantity | Sequence[float], y: Quantity, more: Mapping[str, Any] | None = None
) -> Measurement | None:
    """Over arms, for each seed that all have; `x` may be a number for each arm. None while an arm is not whole."""
    ends = [arm.final_lines(runs) for arm in arms]
    found = []
    for lines in zip(*(held or () for held in ends), strict=False):  # seeds are 0, 1, ...
        xs = [value_of(line, x) for line in lines] if isinstance(x, str) or callable(x) else list(x)
        ys = [value_of(line, y) for line in lines]
        if None in xs or None in ys:
            return None
        a, b = (torch.tensor(values, dtype=torch.float64) for values in (xs, ys))
        found.append(spearman(a, b) or 0.0)  # 0 where one side is constant
    return by_seed(found, more) if found else None


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
