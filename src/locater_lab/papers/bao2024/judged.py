"""Claims judged by the training runs of `arms.py`: studies c, e, f and i, and the arms of study d.

Runs are those in the file of `Setting.runs`, or made when asked for. Differences are taken within a seed; a run counts
with its report loss, on text that neither trained it nor chose its learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from locater_lab.engine.arms import Line, difference, ends_table, study_of_runs
from locater_lab.engine.claims import Claim, by_seed, verdict_of
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Arm, Runs
from locater_lab.papers.bao2024.arms import (
    BOTH,
    ELSEWHERE,
    LEARNED,
    PARTS,
    PLAIN,
    RIVALS,
    SHORT,
    rows_of,
    stability_rows,
)  # fmt: skip

SURVIVED = 0.5  # nats above the plain run at the coolest of the hot rates
TUNED = "each at its best of three rates"

# The paper says both of its own experiment, which is study j; here they are asked of a larger model.
LOWER_LOSS = Claim(
    "c1", "LocAteR lowers validation perplexity", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours"
)  # fmt: skip
MORE_ENTROPY = Claim(
    "c2", "LocAteR raises attention entropy", f"change of mean attention entropy by LocAteR, {TUNED}", "at least", 0.0, by="ours"
)  # fmt: skip
PARTS_CLAIMS = (
    Claim(
        "d8", "Holding the mean alone lowers the loss",
        f"change of report loss by mean only, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "d9", "Shrinking the scale alone raises entropy",
        f"change of entropy by scale only, {TUNED}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d10", "Shrinking the scale alone does not lower the loss",
        f"change of report loss by scale only, {TUNED}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d13", "Raw tr W^2 lets the map grow without bound",
        "log10 of Frobenius^2 under it over that without", "at least", 1.0, by="ours",
    ),
    Claim(
        "d14", "With learned positions, holding the mean alone lowers the loss",
        f"change of report loss by mean only, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "d15", "With learned positions, LocAteR lowers the loss",
        f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "d16", "With learned positions, shrinking the scale alone does not lower the loss",
        f"change of report loss by scale only, {TUNED}", "at least", 0.0, by="ours",
    ),
)  # fmt: skip
RIVAL_CLAIMS = (
    Claim(
        "e1", "LocAteR does better than an initialisation with the same mean",
        f"report loss of LocAteR less that of mimetic initialisation, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e2", "LocAteR does better than QK-norm",
        f"report loss of LocAteR less that of QK-norm, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e3", "LocAteR adds to mimetic initialisation",
        f"change of report loss by LocAteR on top of it, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e4", "LocAteR adds to QK-norm",
        f"change of report loss by LocAteR on top of it, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e5", "No rival does better than LocAteR",
        f"report loss of LocAteR less that of the best rival, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e6", "LocAteR adds to more weight decay",
        f"change of report loss by LocAteR on top of a decay of 0.3, {TUNED}", "at most", 0.0, by="ours",
    ),
)  # fmt: skip
TASK_CLAIMS = (
    Claim("f1", "A masked language model gains too", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours"),
    Claim("f2", "An image classifier gains too", f"change of test accuracy by LocAteR, {TUNED}", "at least", 0.0, by="ours"),
    Claim("f3", "Sorting gains too", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours"),
)  # fmt: skip
HOT_CLAIMS = (
    Claim(
        "i1", "With LocAteR a model trains at rates at which the plain one fails",
        "highest rate survived with LocAteR over the lowest at which the plain model fails", "at least", 2.0, by="ours",
    ),
    Claim(
        "i2", "It trains there as well as with QK-norm",
        "report loss of LocAteR less that of QK-norm, at the hottest rate", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


# --- c: LocAteR against no penalty
# --------------------------------------------------------------------------------------


def against_plain(runs: Runs) -> Results:
    measured = {
        "c1": difference(runs, BOTH, PLAIN, "report_loss"),
        "c2": difference(runs, BOTH, PLAIN, "entropy"),
    }
    return Results(measured, {"arms_main": arm_rows(runs, (PLAIN, BOTH), PLAIN)})


def in_setting(claim: Claim, values: Sequence[float], setting: str) -> dict[str, Any]:
    """A second measurement of a claim, in another setting: a row for the page. The verdict is that of these seeds by
    themselves.
    """
    verdict = verdict_of(claim, by_seed(values), "")
    return {"claim": claim.id, "setting": setting, "by_seed": list(values), **mean_and_half(values),
            "p": verdict.p, "verdict": verdict.verdict}  # fmt: skip


# --- d: the parts of the penalty
# ----------------------------------------------------------------------------------------


def of_parts(runs: Runs) -> Results:
    """Mean, scale and raw tr W^2 with rotary positions; mean, scale and both with learned ones."""
    mean, scale, raw = PARTS["mean only"], PARTS["scale only"], PARTS["raw tr W^2"]
    learned = LEARNED["none"]
    measured = {
        "d8": difference(runs, mean, PLAIN, "report_loss"),
        "d9": difference(runs, scale, PLAIN, "entropy"),
        "d10": difference(runs, scale, PLAIN, "report_loss"),
        "d13": difference(runs, raw, PLAIN, lambda line: math.log10(line["heads"]["F"])),
        "d14": difference(runs, LEARNED["mean only"], learned, "report_loss"),
        "d15": difference(runs, LEARNED["LocAteR"], learned, "report_loss"),
        "d16": difference(runs, LEARNED["scale only"], learned, "report_loss"),
    }
    tables = {
        "arms_parts": arm_rows(runs, PARTS.values(), PLAIN),
        "arms_learned": arm_rows(runs, LEARNED.values(), learned),
    }
    return Results(measured, tables)


# --- e: rivals
# ----------------------------------------------------------------------------------------------------------


def of_rivals(runs: Runs) -> Results:
    """LocAteR against each of them, on top of three, and against the one with the least report loss."""
    mimetic, normed, decay = (RIVALS[name] for name in ("mimetic", "QK-norm", "weight decay 0.3"))
    rivals = [(arm, ends) for arm in RIVALS.values() if "LocAteR" not in arm.name and (ends := arm.ends(runs))]
    best = min(rivals, key=lambda pair: fmean(line["report_loss"] for line in pair[1]), default=(None, []))[0]
    measured = {
        "e1": difference(runs, BOTH, mimetic, "report_loss"),
        "e2": difference(runs, BOTH, normed, "report_loss"),
        "e3": difference(runs, RIVALS["mimetic + LocAteR"], mimetic, "report_loss"),
        "e4": difference(runs, RIVALS["QK-norm + LocAteR"], normed, "report_loss"),
        "e5": None if best is None else difference(runs, BOTH, best, "report_loss", {"best": best.name}),
        "e6": difference(runs, RIVALS["weight decay 0.3 + LocAteR"], decay, "report_loss"),
    }
    return Results(measured, {"arms_rivals": arm_rows(runs, RIVALS.values(), PLAIN)})


# --- f: other tasks
# -----------------------------------------------------------------------------------------------------


def of_tasks(runs: Runs) -> Results:
    measured, rows = {}, []
    for id, task, quantity in (("f1", "masked", "report_loss"), ("f2", "image", "accuracy"), ("f3", "sort", "report_loss")):  # fmt: skip
        plain, ours = ELSEWHERE[task]
        measured[id] = difference(runs, ours, plain, quantity)
        rows += arm_rows(runs, (plain, ours), plain)
    return Results(measured, {"arms_tasks": rows})


# --- i: hot learning rates
# ----------------------------------------------------------------------------------------------


def of_hot_rates(runs: Runs) -> Results:
    losses = hot_losses(runs)
    if not {"none", "LocAteR", "QK-norm"} <= losses.keys():
        return Results({})
    survived, limits = rates_survived(losses)
    fails = [
        min((rate for rate, values in losses["none"].items() if values[seed] >= limit), default=None)
        for seed, limit in enumerate(limits)
    ]
    ratios = [best / rate for best, rate in zip(survived["LocAteR"], fails, strict=True) if rate is not None]
    hottest = max(losses["none"])
    ahead = [a - b for a, b in zip(losses["LocAteR"][hottest], losses["QK-norm"][hottest], strict=True)]
    measured = {"i1": by_seed(ratios) if len(ratios) == len(limits) else None, "i2": by_seed(ahead)}
    rows = [
        {"arm": name, "rate": rate, "losses": values, "entropies": [_entropy(runs.of(row)) for row in rows]}
        for name, by_rate in stability_rows().items() if name in losses
        for (rate, rows), values in zip(by_rate.items(), losses[name].values(), strict=True)
    ]  # fmt: skip
    ends = {name: fmean(by_rate[hottest]) for name, by_rate in losses.items()}
    best = min(ends, key=ends.__getitem__)
    table = {
        "rows": rows,
        "survived": survived,
        "plain_fails_at": fails,
        "limits": limits,
        "steps": SHORT,
        "best_at_hottest": {"arm": best, "loss": ends[best], "LocAteR": ends["LocAteR"]},
    }
    return Results(measured, {"hot_rates": table})


def hot_losses(runs: Runs) -> dict[str, dict[float, list[float]]]:
    """Report losses at hot rates, by seed, of the arms all of whose runs are there; infinite where one diverged."""
    return {
        name: {rate: [_loss(runs.of(row)) for row in rows] for rate, rows in by_rate.items()}
        for name, by_rate in stability_rows().items()
        if all(runs.of(row) is not None for rows in by_rate.values() for row in rows)
    }


def rates_survived(losses: Mapping[str, Mapping[float, Sequence[float]]]) -> tuple[dict[str, list[float]], list[float]]:
    """The highest rate that each arm survives, by seed, and up to which loss: `SURVIVED` above the plain run at the
    coolest.

    >>> rates_survived({"none": {1.0: [3.0], 2.0: [9.0]}, "other": {1.0: [3.1], 2.0: [3.2]}})
    ({'none': [1.0], 'other': [2.0]}, [3.5])
    """
    limits = [loss + SURVIVED for loss in losses["none"][min(losses["none"])]]
    best = {
        name: [
            max((rate for rate in by_rate if by_rate[rate][seed] < limits[seed]), default=0.0)
            for seed in range(len(limits))
        ]
        for name, by_rate in losses.items()
    }
    return best, limits


# --- rows for the page
# --------------------------------------------------------------------------------------------------


def end_of(line: Line) -> dict[str, Any]:
    """A finished run as tables show it."""
    return {"loss": line["report_loss"], "entropy": line["entropy"], "M": line["heads"]["M"], "F": line["heads"]["F"]}


def arm_rows(runs: Runs, arms: Iterable[Arm], plain: Arm) -> list[dict[str, Any]]:
    """Arms with the ends of the seeds that there are, and their changes against the plain arm within a seed."""
    by_name = {arm.name: arm for arm in arms}
    rows = ends_table(runs, by_name.values(), lambda line: {**end_of(line), "accuracy": line["accuracy"]})
    for row in rows:
        row["perplexity"] = math.exp(fmean(end["loss"] for end in row["ends"]))
        row["change"] = _changes(runs, by_name[row["arm"]], plain)
    return rows


def _changes(runs: Runs, arm: Arm, plain: Arm) -> dict[str, Any]:
    """Loss and entropy less those of the plain arm, for the seeds that both have finished."""
    rates = arm.rate(runs), plain.rate(runs)
    if rates[0] is None or rates[1] is None or arm is plain:
        return {}
    lines = [
        (runs.of(arm.row(rates[0], seed)), runs.of(plain.row(rates[1], seed)))
        for seed in range(min(arm.seeds, plain.seeds))
    ]
    pairs = [(a, b) for a, b in lines if a and b and a["status"] == b["status"] == "done"]
    changes = {"loss": "report_loss", "entropy": "entropy"}
    values = {name: [a[key] - b[key] for a, b in pairs] for name, key in changes.items()}
    return {name: {"by_seed": each, **mean_and_half(each)} for name, each in values.items() if each}


def mean_and_half(values: Sequence[float]) -> dict[str, float]:
    """Mean and half-width of the 95 % interval."""
    measured = by_seed(values)
    return {"mean": measured.value, "half": measured.spread}


def _loss(line: Line | None) -> float:
    return float(line["report_loss"]) if line is not None and line["status"] == "done" else math.inf


def _entropy(line: Line | None) -> float | None:
    return float(line["entropy"]) if line is not None and line["status"] == "done" else None


LOCATER = study_of_runs("LocAteR against no penalty", (LOWER_LOSS, MORE_ENTROPY), partial(rows_of, "c"), against_plain)
RIVALS_STUDY = study_of_runs("rivals, each at its best rate", RIVAL_CLAIMS, partial(rows_of, "e"), of_rivals)
TASKS_STUDY = study_of_runs("other tasks", TASK_CLAIMS, partial(rows_of, "f"), of_tasks)
HOT_STUDY = study_of_runs("hot learning rates", HOT_CLAIMS, partial(rows_of, "i"), of_hot_rates)
