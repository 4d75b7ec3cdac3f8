"""Claims on the paper's own experiment, judged by the runs of `own.py`: study j at 3,000 updates, study n at 12,000.

Perplexity is exp of a loss, so the verdict on one is that on the other; losses are in nats per word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from locater_lab.engine.arms import Line, study_of_runs
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Row, Runs
from locater_lab.papers.bao2024 import own
from locater_lab.papers.bao2024.repeats import change_of, differences, finished, level_of

WHERE = "experiment on WikiText-2"
OVERFITS = 0.01  # nats by which the last select loss exceeds the least
LEAST = f"with the least select loss among those that add {own.MORE_ENTROPY:g} nats of entropy (our choice)"
PUBLISHED = f"the stored dose {LEAST}"
OURS = f"the measured or effective dose {LEAST}"
BEST = f"the dose {LEAST}"
CLAIMS = (
    Claim(
        "j1", "In the paper's own experiment, LocAteR lowers perplexity",
        f"change of report loss by {PUBLISHED}, {own.OWN.steps:,} updates", "at most", 0.0, where=WHERE,
    ),
    Claim(
        "j2", "In the paper's own experiment, LocAteR raises attention entropy",
        f"change of mean attention entropy by {PUBLISHED}, {own.OWN.steps:,} updates", "at least", 0.0, where=WHERE,
    ),
    Claim(
        "j3", "Validation perplexity is lower over training, too",
        f"change of select loss by {PUBLISHED}, mean over training (our measure)", "at most", 0.0, where=f"{WHERE}, over training",
    ),
    Claim(
        "j4", "Attention entropy is higher over training, too",
        f"change of entropy by {PUBLISHED}, mean over training (our measure)", "at least", 0.0, where=f"{WHERE}, over training",
    ),
    Claim(
        "j5", "The best checkpoint of a run is better with LocAteR",
        f"change of the least select loss over training by {PUBLISHED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "j6", f"The plain model overfits within {own.OWN.steps:,} updates",
        "its last select loss less its least", "at least", OVERFITS, by="ours",
    ),
    Claim(
        "j7", "LocAteR on what acts costs no perplexity there",
        f"change of report loss by {OURS}", "at most", own.NO_COST, by="ours",
    ),
    Claim(
        "j8", "It raises entropy there",
        f"change of entropy by {OURS}", "at least", 0.0, by="ours",
    ),
)  # fmt: skip
LONG_CLAIMS = (
    Claim(
        "n1", f"In the paper's own experiment, the plain model overfits within {own.LONG.steps:,} updates",
        "its last select loss less its least", "at least", OVERFITS, by="ours",
    ),
    Claim(
        "n2", "LocAteR lowers perplexity at the end of such a long training",
        f"change of report loss by {BEST}, {own.LONG.steps:,} updates", "at most", 0.0, by="ours",
    ),
    Claim(
        "n3", "The best checkpoint of such a long run is better with LocAteR",
        f"change of the least select loss over training by {BEST}, {own.LONG.steps:,} updates", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


def least_select(line: Line) -> float:
    """Over training, on the part of the select split that is evaluated during it."""
    return min(loss for _, loss in line["history"])


def overfitting(line: Line) -> float:
    return float(line["history"][-1][1]) - least_select(line)


def mean_select(line: Line) -> float:
    return fmean(loss for _, loss in line["history"])


def mean_entropy(line: Line) -> float:
    return fmean(entropy for _, entropy in line["entropies"]) if line.get("entropies") else math.nan


def of_own(runs: Runs) -> Results:
    rows = own.judged_rows(runs)
    tables = {"own_sweep": sweep_table(runs), "own_training": training_table(runs)}
    if not rows:
        return Results({}, tables)
    none, published, ours = rows["none"], rows.get("published", []), rows.get("ours", [])
    measured = {
        "j1": change_of(runs, published, none, "report_loss", {"dose": published[0].arm}) if published else None,
        "j2": change_of(runs, published, none, "entropy"),
        "j3": change_of(runs, published, none, mean_select),
        "j4": change_of(runs, published, none, mean_entropy),
        "j5": change_of(runs, published, none, least_select),
        "j6": level_of(runs, none, overfitting),
        "j7": change_of(runs, ours, none, "report_loss", {"dose": ours[0].arm}) if ours else None,
        "j8": change_of(runs, ours, none, "entropy"),
    }
    arms = [arm_table(runs, role, rows[role], none) for role in rows]
    tables["own_seeds"] = seeds_table(runs, rows)
    return Results(measured, {**tables, "own_arms": [arm for arm in arms if arm["ends"]]})


def of_long(runs: Runs) -> Results:
    rows = own.long_rows(runs)
    if not rows:
        return Results({})
    none, best = rows["none"], rows["best"]
    measured = {
        "n1": level_of(runs, none, overfitting),
        "n2": change_of(runs, best, none, "report_loss", {"dose": best[0].arm}),
        "n3": change_of(runs, best, none, least_select),
    }
    arms = [arm_table(runs, role, rows[role], none) for role in rows]
    curves = {each.arm: curve(line) for each, line in first_lines(runs, rows.values())}
    return Results(measured, {"long_arms": [arm for arm in arms if arm["ends"]], "long_training": curves})


# --- tables for the page
# --------------------------------------------------------------------------------------------------


def end_of(line: Line) -> dict[str, Any]:
    return {
        "loss": line["report_loss"],
        "select_loss": line["select_loss"],
        "entropy": line["entropy"],
        "least": least_select(line),
        "overfitting": overfitting(line),
        **{name: (line["heads"] or {}).get(name) for name in "MF"},
    }


def sweep_table(runs: Runs) -> list[dict[str, Any]]:
    """A row for each run of the sweep that has ended, with its changes against the plain one."""
    lines = {each.arm: runs.of(each) for each in own.sweep()}
    plain = lines[own.NONE]
    table = []
    for arm in sorted(lines, key=dose_order):
        line = lines[arm]
        if line is None:
            continue
        done = line["status"] == "done"
        known = done and plain is not None and plain["status"] == "done"
        changes = {
            key: line[name] - plain[name] if known and plain is not None else None
            for key, name in (("loss_change", "report_loss"), ("entropy_change", "entropy"))
        }
        blank = dict.fromkeys(("loss", "select_loss", "entropy", "least", "overfitting", "M", "F"))
        table.append({"arm": arm, "family": family(arm), **(end_of(line) if done else blank), **changes})
    return table


def family(arm: str) -> str:
    """What arms of the sweep are drawn with: their form, or "free" where the mean is.

    >>> [family(arm) for arm in ("measured, 0.001", "stored, 0.01", "stored, 0.01, free")]
    ['measured', 'stored', 'free']
    """
    return "free" if arm.endswith("free") else arm.split(",")[0]


def training_table(runs: Runs) -> dict[str, dict[str, Any]]:
    """Curves of seed 0: every run of the sweep that there is, doses from weak to strong, so that none is picked."""
    lines = own.ended(runs)
    plain = dict(lines[own.NONE]["history"]) if own.NONE in lines else {}
    return {
        arm: {**curve(line), "change": [[step, loss - plain[step]] for step, loss in line["history"] if step in plain]}
        for arm, line in sorted(lines.items(), key=lambda each: dose_order(each[0]))
    }


def seeds_table(runs: Runs, rows: Mapping[str, list[Row]]) -> dict[str, dict[str, Any]]:
    """Curves of the arms that judge: means over the seeds that all of them have, perplexity as exp of the mean loss."""
    lines = {each[0].arm: [runs.of(row) for row in each] for each in rows.values()}
    whole = [same for same in zip(*lines.values(), strict=True) if all(x and x["status"] == "done" for x in same)]
    if not whole:
        return {}
    losses, entropies = (
        [mean_curve([line[name] for line in arm if line]) for arm in zip(*whole, strict=True)]
        for name in ("history", "entropies")
    )
    return {
        arm: {
            "perplexity": [[step, math.exp(value)] for step, value in loss],
            "entropy": entropy,
            "change": [[step, value - plain] for (step, value), (_, plain) in zip(loss, losses[0], strict=True)],
        }
        for arm, loss, entropy in zip(lines, losses, entropies, strict=True)
    }


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The mean over curves at each step.

    >>> mean_curve([[[1, 2.0], [2, 3.0]], [[1, 4.0], [2, 5.0]]])
    [[1, 3.0], [2, 4.0]]
    """
    return [[points[0][0], fmean(value for _, value in points)] for points in zip(*curves, strict=True)]


def dose_order(arm: str) -> tuple[int, float]:
    """First no penalty, then by form and strength.

    >>> sorted(["stored, 0.01, free", "measured, 0.1", "stored, 0.001", "none", "measured, 0.01"], key=dose_order)
    ['none', 'measured, 0.01', 'measured, 0.1', 'stored, 0.001', 'stored, 0.01, free']
    """
    order = ("none", *own.FORMS, "effective", "free").index(family(arm))
    return order, 0.0 if arm == own.NONE else float(arm.split(", ")[1])


def curve(line: Line) -> dict[str, Any]:
    return {
        "perplexity": [[step, math.exp(loss)] for step, loss in line["history"]],
        "entropy": [list(pair) for pair in line.get("entropies") or ()],
    }


def first_lines(runs: Runs, groups: Iterable[list[Row]]) -> list[tuple[Row, Line]]:
    """The first finished run of each group."""
    pairs = [[(row, line) for row in rows for line in finished(runs, [row]).values()] for rows in groups]
    return [each[0] for each in pairs if each]


def arm_table(runs: Runs, role: str, rows: list[Row], plain: list[Row]) -> dict[str, Any]:
    """An arm with the ends of the seeds that there are, and its changes within a seed."""
    changes: Mapping[str, list[float]] = {
        key: list(differences(runs, rows, plain, name).values())
        for key, name in (("loss", "report_loss"), ("entropy", "entropy"))
    }
    about = {key: by_seed(values) for key, values in changes.items() if values and role != "none"}
    return {
        "arm": rows[0].arm,
        "role": role,
        "ends": [end_of(line) for line in finished(runs, rows).values()],
        "change": {
            key: {"by_seed": changes[key], "mean": x.value, "half": x.spread if math.isfinite(x.spread) else None}
            for key, x in about.items()
        },
    }


STUDY = study_of_runs("the paper's own experiment", CLAIMS, own.rows_of, of_own)
LONG_STUDY = study_of_runs("the paper's own experiment, longer", LONG_CLAIMS, own.long_rows_of, of_long)
