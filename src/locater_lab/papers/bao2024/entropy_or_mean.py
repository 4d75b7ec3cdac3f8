"""Does loss follow the entropy of attention, or the mean of the spectrum? One thing changed at a time (studies d and
h), and the two moved apart (study l).

**Curves, at the plain arm's learning rate**: the target, the strength, the entropy. Study h, and study d as a whole,
which has the tuned arms of `training.py` and the curves.

**Cause or company (study l).** With learned positions LocAteR lowers the loss and raises entropy. Here entropy is
brought to LocAteR's level by two other means, a penalty on entropy itself and a fixed temperature, each at the setting
that comes nearest to that level with seed 0, whatever its loss. Holding the mean alone moves the mean at nearly the
same entropy, shrinking the scale alone moves entropy at a mean of zero. For every seed, the loss of these six arms is
regressed on entropy and mean:

    loss = c + a entropy + b M        a in nats per nat, b in nats per unit of logit

M is the mean logit of a unit token with itself, read from the weights (over the temperature, where there is one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from locater.numerics import spearman
from locater_lab.engine.arms import Line, mark_inconclusive, study_of_runs
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Row, Runs
from locater_lab.papers.bao2024.arms import (
    FIRST_SEEDS,
    LEARNED,
    MANY_SEEDS,
    PLAIN,
    STRENGTHS,
    TARGETS,
    change_between,
    curve_rows,
    entropy_rows,
    finished_lines,
    judging,
    measure_seeds,
    rows_of,
    with_controls,
)
from locater_lab.papers.bao2024.training import PARTS_CLAIMS, end_of_line, judge_parts
from locater_lab.train.plan import Plan

# ---- d and h: curves over the target, the strength and the entropy ----


CURVE_CLAIMS = (
    Claim(
        "d11", "The larger the mean, the lower the loss",
        "rank correlation of the target, -2 to 8, with report loss under LocAteR", "at most", -0.8, by="ours",
    ),
    Claim(
        "d12", "The sign of the mean matters: positive helps, negative hurts",
        "report loss with target 2 less that with target -2", "at most", 0.0, by="ours",
    ),
)  # fmt: skip
ENTROPY_CLAIMS = (
    Claim(
        "h1", "Raising entropy improves perplexity, the mean held",
        "change of report loss by an entropy floor of 0.75, M held at 2", "at most", 0.0, by="summary",
    ),
    Claim(
        "h2", "Lowering entropy costs perplexity, the mean held",
        "change of report loss by an entropy ceiling of 0.35, M held at 2", "at least", 0.0, by="ours",
    ),
    Claim(
        "h3", "Raising the mean improves perplexity, nothing else held",
        "change of report loss by M from 0 to 4 under mean only", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


def judge_curves(runs: Runs) -> Results:
    """Loss and entropy over targets and strengths."""
    rate = PLAIN.rate(runs)
    if rate is None:
        return Results({})
    both = curve_rows(TARGETS["both"], "both", rate)

    def order(lines: list[Line]) -> float:
        losses = torch.tensor([line["report_loss"] for line in lines])
        return spearman(torch.tensor(list(both)), losses) or 0.0

    measured = {
        "d11": _each_seed(runs, list(both.values()), order),
        "d12": _each_seed(runs, [both[2.0], both[-2.0]], _difference),
    }
    tables = {
        "targets": {name: _points(runs, curve_rows(by_target, name, rate)) for name, by_target in TARGETS.items()},
        "strengths": {
            name: _points(runs, curve_rows(by_strength, name, rate)) for name, by_strength in STRENGTHS.items()
        },
        "curve_rate": rate,
    }
    return Results(measured, tables)


def judge_entropy(runs: Runs) -> Results:
    """Entropy pushed up or down while the mean is held; the mean moved while entropy is free."""
    rate = PLAIN.rate(runs)
    if rate is None:
        return Results({})
    pushed, means = entropy_rows(rate), curve_rows(TARGETS["mean only"], "mean only", rate)
    measured = {
        "h1": _each_seed(runs, [pushed["floor 0.75"], means[2.0]], _difference),
        "h2": _each_seed(runs, [pushed["ceiling 0.35"], means[2.0]], _difference),
        "h3": _each_seed(runs, [means[4.0], means[0.0]], _difference),
    }
    ends = {name: _ends(runs, rows) for name, rows in {**pushed, "M held at 2": means[2.0]}.items()}
    tables = {
        "entropy_pushed": {name: lines for name, lines in ends.items() if lines},
        "mean_moved": _points(runs, means),
    }
    return Results(measured, tables)


def _difference(lines: list[Line]) -> float:
    return float(lines[0]["report_loss"] - lines[1]["report_loss"])


def _each_seed(runs: Runs, groups: Sequence[Sequence[Row]], of: Callable[[list[Line]], float]) -> Measurement | None:
    """A number for each seed, from one line of each group; None while a run is missing."""
    lines = [_finished_rows(runs, rows) for rows in groups]
    return by_seed([of(list(each)) for each in zip(*lines, strict=True)]) if all(lines) else None


def _finished_rows(runs: Runs, rows: Iterable[Row]) -> list[Line]:
    """Lines of these runs; none unless all are there."""
    lines = [runs.of(row) for row in rows]
    done = [line for line in lines if line is not None and line["status"] == "done"]
    return list(done) if len(done) == len(lines) else []


def _ends(runs: Runs, rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [end_of_line(line) for line in _finished_rows(runs, rows)]


def _points(runs: Runs, rows_at: Mapping[float, Sequence[Row]]) -> list[dict[str, Any]]:
    """A curve: its variable, and the ends of its seeds."""
    points = [{"x": x, "ends": _ends(runs, rows)} for x, rows in rows_at.items()]
    return [point for point in points if point["ends"]]


def judge_parts_and_curves(runs: Runs) -> Results:
    parts, curves = judge_parts(runs), judge_curves(runs)
    return Results({**parts.measured, **curves.measured}, {**parts.tables, **curves.tables})


PARTS_STUDY = study_of_runs(
    "mean against scale",
    tuple(sorted((*PARTS_CLAIMS, *CURVE_CLAIMS), key=lambda claim: int(claim.id[1:]))),
    partial(rows_of, "d"),
    judge_parts_and_curves,
)
ENTROPY_STUDY = study_of_runs("is it the entropy", ENTROPY_CLAIMS, partial(rows_of, "h"), judge_entropy)


# ---- l: cause or company ----


ENTROPY_FLOORS = {f"floor {x:g}": f"entropypenalty(floor={x:g}, weight=3)" for x in (0.4, 0.5, 0.3, 0.6)}
TEMPERATURES = {f"temperature {t:g}": f"temperature(init={t:g}, learn=False)" for t in (2.0, 4.0, 8.0)}
MATCHED = 0.15  # nats: entropy is the same
NEAR_LOSS = 0.01  # nats of loss
KNOWN = ("none", "LocAteR", "mean only", "scale only")  # arms of study d
WAYS = {"entropy penalty": ENTROPY_FLOORS, "temperature": TEMPERATURES}
SETTING = "learned positions, at the plain arm's best rate"
CAUSE_CLAIMS = (
    Claim(
        "l1", "Entropy raised to LocAteR's level by a penalty on entropy brings LocAteR's loss",
        f"report loss under the entropy penalty less that of LocAteR, {SETTING}", "at most", NEAR_LOSS, by="ours",
    ),
    Claim(
        "l2", "Entropy raised to LocAteR's level by a temperature brings LocAteR's loss",
        f"report loss under the temperature less that of LocAteR, {SETTING}", "at most", NEAR_LOSS, by="ours",
    ),
    Claim(
        "l3", "At the same mean, loss falls as entropy rises",
        f"slope of report loss on entropy, beside the mean, over six ways to train, {SETTING}", "at most", 0.0, by="ours",
    ),
    Claim(
        "l4", "At the same entropy, loss falls as the mean rises",
        f"slope of report loss on M, beside entropy, over six ways to train, {SETTING}", "at most", 0.0, by="ours",
    ),
    Claim(
        "l5", "Loss follows the mean more than it follows entropy",
        f"share of the variance of loss that M explains alone, less that of entropy alone, {SETTING}", "at least", 0.0, by="ours",
    ),
    Claim(
        "l6", "With learned positions, shrinking the scale alone does not lower the loss, with more seeds than d16",
        f"change of report loss by scale only, {SETTING}", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def plain_plan(runs: Runs) -> Plan | None:
    """The plain arm with learned positions at its best rate; None while that is not known."""
    rate = LEARNED["none"].rate(runs)
    return None if rate is None else replace(LEARNED["none"].base, rate=rate)


@cache
def known_rows(plan: Plan, arm: str) -> list[Row]:
    control = LEARNED[arm].base.control
    return [Row("l", f"learned, {arm}", replace(plan, control=control, seed=seed)) for seed in range(MANY_SEEDS)]


@cache
def way_row(plan: Plan, name: str, seed: int) -> Row:
    text = {**ENTROPY_FLOORS, **TEMPERATURES}[name]
    return Row("l", f"learned, {name}", replace(with_controls(plan, text), seed=seed))


def nearest(runs: Runs, plan: Plan, way: str) -> str | None:
    """The setting whose entropy with seed 0 is nearest to LocAteR's; None while one is missing."""
    goal = runs.of(known_rows(plan, "LocAteR")[0])
    lines = {name: runs.of(way_row(plan, name, 0)) for name in WAYS[way]}
    if goal is None or goal["status"] != "done" or any(line is None for line in lines.values()):
        return None
    away = {
        name: abs(line["entropy"] - goal["entropy"])
        for name, line in lines.items()
        if line is not None and line["status"] == "done"
    }
    return min(away, key=away.__getitem__, default=None)


def compared_arms(runs: Runs, plan: Plan) -> dict[str, list[Row]]:
    """The arms that are compared, by seed: those that are known so far."""
    rows = {name: known_rows(plan, name) for name in KNOWN}
    for way in WAYS:
        name = nearest(runs, plan, way)
        if name is not None:
            rows[way] = [way_row(plan, name, seed) for seed in range(MANY_SEEDS)]
    return rows


def cause_rows(runs: Runs) -> list[Row]:
    plan = plain_plan(runs)
    if plan is None:
        return list(LEARNED["none"].rows(runs))
    tried = [way_row(plan, name, 0) for settings in WAYS.values() for name in settings]
    by_arm = compared_arms(runs, plan)
    return [*tried, *(row for seed in range(MANY_SEEDS) for row in (each[seed] for each in by_arm.values()))]


# --- what they say ---


def mean_logit(row: Row, line: Line) -> float:
    """M of the weights over the temperature, which the weights do not have."""
    heat = next((float(name.split()[-1]) for name, text in TEMPERATURES.items() if text in row.plan.control), 1.0)
    return float(line["heads"]["M"]) / heat


def regression_slopes(losses: Sequence[float], *variables: Sequence[float]) -> list[float]:
    """Of a least-squares plane through the points, without its constant.

    >>> [round(x, 6) for x in regression_slopes([1.0, 3.0, 4.0, 6.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0])]
    [2.0, 3.0]
    """
    columns = torch.tensor([*variables, [1.0] * len(losses)], dtype=torch.float64).T
    solved = torch.linalg.lstsq(columns, torch.tensor(losses, dtype=torch.float64)[:, None]).solution
    return [float(x) for x in solved[:-1, 0]]


def explained_share(losses: Sequence[float], variable: Sequence[float]) -> float:
    """The square of the correlation; 0 where one side is constant.

    >>> round(explained_share([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]), 6), explained_share([1.0, 2.0], [0.0, 0.0])
    (1.0, 0.0)
    """
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (variable, losses))
    x, y = x - x.mean(), y - y.mean()
    size = float((x @ x) * (y @ y))
    return float(x @ y) ** 2 / size if size else 0.0


def points_by_seed(runs: Runs, by_arm: dict[str, list[Row]]) -> dict[int, list[dict[str, Any]]]:
    """By seed: loss, entropy and mean of every arm. Seeds that an arm lacks are left out."""
    lines = {name: finished_lines(runs, rows) for name, rows in by_arm.items()}
    seeds = [seed for seed in range(MANY_SEEDS) if all(seed in each for each in lines.values())]
    return {
        seed: [
            {
                "arm": name,
                "loss": lines[name][seed]["report_loss"],
                "entropy": lines[name][seed]["entropy"],
                "M": mean_logit(rows[0], lines[name][seed]),
            }
            for name, rows in by_arm.items()
        ]
        for seed in seeds
    }


def judge_cause(runs: Runs) -> Results:
    plan = plain_plan(runs)
    if plan is None:
        return Results({})
    by_arm = {name: judging(rows) for name, rows in compared_arms(runs, plan).items()}
    locater = by_arm["LocAteR"]
    scale = change_between(runs, by_arm["scale only"], by_arm["none"], "report_loss")
    more_seeds = scale is not None and len(scale.sample) > FIRST_SEEDS  # than d16 has
    measured: dict[str, Measurement | None] = {"l6": scale if more_seeds else None}
    for id, way in (("l1", "entropy penalty"), ("l2", "temperature")):
        if way in by_arm:
            away = change_between(runs, by_arm[way], locater, "entropy")
            more = {"setting": nearest(runs, plan, way), "entropy_apart": None if away is None else away.value}
            measured[id] = change_between(runs, by_arm[way], locater, "report_loss", more)
            if away is not None and abs(away.value) > MATCHED:
                reason = f"its entropy is {away.value:+.2f} nats from LocAteR's, and {MATCHED:g} count as the same"
                measured |= mark_inconclusive({id: measured[id]}, (id,), reason)
    by_seed = points_by_seed(runs, by_arm) if len(by_arm) == len(KNOWN) + len(WAYS) else {}
    planes = [[[point[key] for point in each] for key in ("loss", "entropy", "M")] for each in by_seed.values()]
    both = [regression_slopes(*each) for each in planes]
    measured |= {
        "l3": measure_seeds([a for a, _ in both]),
        "l4": measure_seeds([b for _, b in both]),
        "l5": measure_seeds([explained_share(loss, M) - explained_share(loss, entropy) for loss, entropy, M in planes]),
    }
    return Results(measured, {"cause_points": [{"seed": s, **x} for s, each in by_seed.items() for x in each],
                              "cause_tried": tried_table(runs, plan)})  # fmt: skip


def tried_table(runs: Runs, plan: Plan) -> list[dict[str, Any]]:
    """Entropy and loss of each setting that was tried with seed 0, and LocAteR's."""
    rows = {"LocAteR": known_rows(plan, "LocAteR")[0], "none": known_rows(plan, "none")[0]}
    rows |= {name: way_row(plan, name, 0) for settings in WAYS.values() for name in settings}
    lines = {name: runs.of(row) for name, row in rows.items()}
    return [
        {"arm": name, "entropy": line["entropy"], "loss": line["report_loss"], "M": mean_logit(rows[name], line)}
        for name, line in lines.items()
        if line is not None and line["status"] == "done"
    ]


CAUSE_STUDY = study_of_runs("cause or company", CAUSE_CLAIMS, cause_rows, judge_cause)
