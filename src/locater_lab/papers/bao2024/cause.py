"""Cause or company: does loss follow the entropy of attention, or the mean of the spectrum? Runs and claims of study l.

With learned positions LocAteR lowers the loss and raises entropy. Here entropy is brought to LocAteR's level by two
other means, a penalty on entropy itself and a fixed temperature, each at the setting that comes nearest to that level
with seed 0, whatever its loss. Holding the mean alone moves the mean at nearly the same entropy, shrinking the scale
alone moves entropy at a mean of zero. For every seed, the loss of these six arms is regressed on entropy and mean:

    loss = c + a entropy + b M        a in nats per nat, b in nats per unit of logit

M is the mean logit of a unit token with itself, read from the weights (over the temperature, where there is one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from locater_lab.engine.arms import Line, mark_inconclusive, study_of_runs
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Row, Runs
from locater_lab.papers.bao2024.arms import FIRST_SEEDS, LEARNED, MANY_SEEDS, with_controls
from locater_lab.papers.bao2024.repeats import change_of, finished, measured_by
from locater_lab.train.plan import Plan

FLOORS = {f"floor {x:g}": f"entropypenalty(floor={x:g}, weight=3)" for x in (0.4, 0.5, 0.3, 0.6)}
HEATS = {f"temperature {t:g}": f"temperature(init={t:g}, learn=False)" for t in (2.0, 4.0, 8.0)}
MATCHED = 0.15  # nats: entropy is the same
NEAR = 0.01  # nats of loss
KNOWN = ("none", "LocAteR", "mean only", "scale only")  # arms of study d
WAYS = {"entropy penalty": FLOORS, "temperature": HEATS}
SETTING = "learned positions, at the plain arm's best rate"
CLAIMS = (
    Claim(
        "l1", "Entropy raised to LocAteR's level by a penalty on entropy brings LocAteR's loss",
        f"report loss under the entropy penalty less that of LocAteR, {SETTING}", "at most", NEAR, by="ours",
    ),
    Claim(
        "l2", "Entropy raised to LocAteR's level by a temperature brings LocAteR's loss",
        f"report loss under the temperature less that of LocAteR, {SETTING}", "at most", NEAR, by="ours",
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


def base(runs: Runs) -> Plan | None:
    """The plain arm with learned positions at its best rate; None while that is not known."""
    rate = LEARNED["none"].rate(runs)
    return None if rate is None else replace(LEARNED["none"].base, rate=rate)


@cache
def known_rows(plan: Plan, arm: str) -> list[Row]:
    control = LEARNED[arm].base.control
    return [Row("l", f"learned, {arm}", replace(plan, control=control, seed=seed)) for seed in range(MANY_SEEDS)]


@cache
def way_row(plan: Plan, name: str, seed: int) -> Row:
    text = {**FLOORS, **HEATS}[name]
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


def arms(runs: Runs, plan: Plan) -> dict[str, list[Row]]:
    """The arms that are compared, by seed: those that are known so far."""
    rows = {name: known_rows(plan, name) for name in KNOWN}
    for way in WAYS:
        name = nearest(runs, plan, way)
        if name is not None:
            rows[way] = [way_row(plan, name, seed) for seed in range(MANY_SEEDS)]
    return rows


def rows_of(runs: Runs) -> list[Row]:
    plan = base(runs)
    if plan is None:
        return list(LEARNED["none"].rows(runs))
    tried = [way_row(plan, name, 0) for settings in WAYS.values() for name in settings]
    by_arm = arms(runs, plan)
    return [*tried, *(row for seed in range(MANY_SEEDS) for row in (each[seed] for each in by_arm.values()))]


# --- what they say
# -----------------------------------------------------------------------------------------------------


def mean_logit(row: Row, line: Line) -> float:
    """M of the weights over the temperature, which the weights do not have."""
    heat = next((float(name.split()[-1]) for name, text in HEATS.items() if text in row.plan.control), 1.0)
    return float(line["heads"]["M"]) / heat


def slopes(losses: Sequence[float], *variables: Sequence[float]) -> list[float]:
    """Of a least-squares plane through the points, without its constant.

    >>> [round(x, 6) for x in slopes([1.0, 3.0, 4.0, 6.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0])]
    [2.0, 3.0]
    """
    columns = torch.tensor([*variables, [1.0] * len(losses)], dtype=torch.float64).T
    solved = torch.linalg.lstsq(columns, torch.tensor(losses, dtype=torch.float64)[:, None]).solution
    return [float(x) for x in solved[:-1, 0]]


def explained(losses: Sequence[float], variable: Sequence[float]) -> float:
    """The square of the correlation; 0 where one side is constant.

    >>> round(explained([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]), 6), explained([1.0, 2.0], [0.0, 0.0])
    (1.0, 0.0)
    """
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (variable, losses))
    x, y = x - x.mean(), y - y.mean()
    size = float((x @ x) * (y @ y))
    return float(x @ y) ** 2 / size if size else 0.0


def points(runs: Runs, by_arm: dict[str, list[Row]]) -> dict[int, list[dict[str, Any]]]:
    """By seed: loss, entropy and mean of every arm. Seeds that an arm lacks are left out."""
    lines = {name: finished(runs, rows) for name, rows in by_arm.items()}
    seeds = [seed for seed in range(MANY_SEEDS) if all(seed in each for each in lines.values())]
    return {
        seed: [
            {
                "arm": name,
                "loss": lines[name][seed]["report_loss"],
                "entropy": lines[name][seed]["entropy"],
                "M": mean_logit(rows[seed], lines[name][seed]),
            }
            for name, rows in by_arm.items()
        ]
        for seed in seeds
    }


def of_cause(runs: Runs) -> Results:
    plan = base(runs)
    if plan is None:
        return Results({})
    by_arm = arms(runs, plan)
    locater = by_arm["LocAteR"]
    scale = change_of(runs, by_arm["scale only"], by_arm["none"], "report_loss")
    more_seeds = scale is not None and len(scale.sample) > FIRST_SEEDS  # than d16 has
    measured: dict[str, Measurement | None] = {"l6": scale if more_seeds else None}
    for id, way in (("l1", "entropy penalty"), ("l2", "temperature")):
        if way in by_arm:
            away = change_of(runs, by_arm[way], locater, "entropy")
            more = {"setting": nearest(runs, plan, way), "entropy_apart": None if away is None else away.value}
            measured[id] = change_of(runs, by_arm[way], locater, "report_loss", more)
            if away is not None and abs(away.value) > MATCHED:
                reason = f"its entropy is {away.value:+.2f} nats from LocAteR's, and {MATCHED:g} count as the same"
                measured |= mark_inconclusive({id: measured[id]}, (id,), reason)
    by_seed = points(runs, by_arm) if len(by_arm) == len(KNOWN) + len(WAYS) else {}
    planes = [[[point[key] for point in each] for key in ("loss", "entropy", "M")] for each in by_seed.values()]
    both = [slopes(*each) for each in planes]
    measured |= {
        "l3": measured_by([a for a, _ in both]),
        "l4": measured_by([b for _, b in both]),
        "l5": measured_by([explained(loss, M) - explained(loss, entropy) for loss, entropy, M in planes]),
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


STUDY = study_of_runs("cause or company", CLAIMS, rows_of, of_cause)
