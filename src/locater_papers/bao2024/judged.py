"""Claims c to f, h and i, judged by the training runs of `arms.py`: those in the file of `Setting.runs`, or made when
asked for.

Differences are those of `papers.judging`: within a seed, and a verdict asks all seeds to agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from locater.numerics import spearman
from locater_papers.bao2024.arms import (
    BOTH,
    ELSEWHERE,
    LEARNED,
    PARTS,
    PLAIN,
    RIVALS,
    SHORT,
    STRENGTHS,
    TARGETS,
    curve,
    entropy_rows,
    rows_of,
    stability_rows,
)  # fmt: skip
from locater_papers.engine.arms import Line, change, ends_table, known, of_runs
from locater_papers.engine.claims import Claim, Measured, by_seed
from locater_papers.engine.runs import Arm, Row, Runs

SURVIVED = 0.5  # nats above the plain run at the coolest of the hot rates
TUNED = "each at its best of three rates"

CLAIMS = {
    "c": (
        Claim("c1", "LocAteR lowers validation perplexity", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0),
        Claim("c2", "LocAteR raises attention entropy", f"change of mean attention entropy by LocAteR, {TUNED}", "at least", 0.0),
    ),
    "d": (
        Claim("d8", "Holding the mean alone lowers the loss (prototype: -0.015)", f"change of report loss by mean only, {TUNED}",
              "at most", 0.0, by="ours"),
        Claim("d9", "Shrinking the scale alone raises entropy (prototype: +0.3)", f"change of entropy by scale only, {TUNED}",
              "at least", 0.0, by="ours"),
        Claim("d10", "Shrinking the scale alone does not lower the loss (prototype: +0.015)",
              f"change of report loss by scale only, {TUNED}", "at least", 0.0, by="ours"),
        Claim("d11", "The larger the mean, the lower the loss (prototype: from -1 to 4)",
              "rank correlation of the target, -2 to 8, with report loss under LocAteR", "at most", -0.8, by="ours"),
        Claim("d12", "The sign of the mean matters: positive helps, negative hurts",
              "report loss with target 2 less that with target -2", "at most", 0.0, by="ours"),
        Claim("d13", "Raw tr W^2 lets the map grow without bound", "log10 of Frobenius^2 under it over that without",
              "at least", 1.0, by="ours"),
        Claim("d14", "With learned positions, holding the mean alone lowers the loss", f"change of report loss by mean only, {TUNED}",
              "at most", 0.0, by="ours"),
        Claim("d15", "With learned positions, LocAteR lowers the loss", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0),
        Claim("d16", "With learned positions, shrinking the scale alone does not lower the loss",
              f"change of report loss by scale only, {TUNED}", "at least", 0.0, by="ours"),
    ),
    "e": (
        Claim("e1", "LocAteR does better than an initialisation with the same mean",
              f"report loss of LocAteR less that of mimetic initialisation, {TUNED}", "at most", 0.0, by="ours"),
        Claim("e2", "LocAteR does better than QK-norm", f"report loss of LocAteR less that of QK-norm, {TUNED}",
              "at most", 0.0, by="ours"),
        Claim("e3", "LocAteR adds to mimetic initialisation", f"change of report loss by LocAteR on top of it, {TUNED}",
              "at most", 0.0, by="ours"),
        Claim("e4", "LocAteR adds to QK-norm", f"change of report loss by LocAteR on top of it, {TUNED}", "at most", 0.0, by="ours"),
        Claim("e6", "LocAteR adds to more weight decay", f"change of report loss by LocAteR on top of a decay of 0.3, {TUNED}",
              "at most", 0.0, by="ours"),
        Claim("e5", "No rival does better than LocAteR", f"report loss of LocAteR less that of the best rival, {TUNED}",
              "at most", 0.0, by="ours"),
    ),
    "f": (
        Claim("f1", "A masked language model gains too", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours"),
        Claim("f2", "An image classifier gains too", f"change of test accuracy by LocAteR, {TUNED}", "at least", 0.0, by="ours"),
        Claim("f3", "Sorting gains too", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours"),
    ),
    "h": (
        Claim("h1", "Raising entropy improves perplexity, the mean held",
              "change of report loss by an entropy floor of 0.75, M held at 2", "at most", 0.0),
        Claim("h2", "Lowering entropy costs perplexity, the mean held",
              "change of report loss by an entropy ceiling of 0.35, M held at 2", "at least", 0.0),
        Claim("h3", "Raising the mean improves perplexity, nothing else held",
              "change of report loss by M from 0 to 4 under mean only", "at most", 0.0, by="ours"),
    ),
    "i": (
        Claim("i1", "With LocAteR a model trains at rates at which the plain one fails",
              "highest rate survived with LocAteR over that without", "at least", 2.0),
        Claim("i2", "It trains there as well as with QK-norm", "report loss of LocAteR less that of QK-norm, at the hottest rate",
              "at most", 0.0, by="ours"),
    ),
}  # fmt: skip


def _c(runs: Runs) -> dict[str, Measured]:
    table = _table(runs, [PLAIN, BOTH])
    return known(
        {"c1": change(runs, BOTH, PLAIN, "report_loss", {"arms": table}), "c2": change(runs, BOTH, PLAIN, "entropy")}
    )


def _d(runs: Runs) -> dict[str, Measured]:
    rate, mean, scale, raw = PLAIN.rate(runs), PARTS["mean only"], PARTS["scale only"], PARTS["raw tr W^2"]
    if rate is None:
        return {}
    curves = {
        "targets": {name: _points(runs, curve(held, name, rate)) for name, held in TARGETS.items()},
        "strengths": {name: _points(runs, curve(held, name, rate)) for name, held in STRENGTHS.items()},
    }
    both = curve(TARGETS["both"], "both", rate)
    found = {
        "d8": change(
            runs,
            mean,
            PLAIN,
            "report_loss",
            {
                "arms": _table(runs, [PLAIN, BOTH, *PARTS.values()]),
                "learned": _table(runs, LEARNED.values()),
                "curves": curves,
                "rate": rate,
            },
        ),
        "d9": change(runs, scale, PLAIN, "entropy"),
        "d10": change(runs, scale, PLAIN, "report_loss"),
        "d11": _by_seed(
            runs, list(both.values()), lambda lines: spearman(torch.tensor(list(both)), _losses(lines)) or 0.0
        ),
        "d12": _by_seed(runs, [both[2.0], both[-2.0]], lambda lines: lines[0]["report_loss"] - lines[1]["report_loss"]),
        "d13": change(runs, raw, PLAIN, lambda line: math.log10(line["heads"]["F"])),
        "d14": change(runs, LEARNED["mean only"], LEARNED["none"], "report_loss"),
        "d15": change(runs, LEARNED["LocAteR"], LEARNED["none"], "report_loss"),
        "d16": change(runs, LEARNED["scale only"], LEARNED["none"], "report_loss"),
    }
    return known(found)


def _e(runs: Runs) -> dict[str, Measured]:
    mimetic, normed = RIVALS["mimetic"], RIVALS["QK-norm"]
    rivals = [arm for arm in RIVALS.values() if "LocAteR" not in arm.name and arm.ends(runs)]
    best = min(rivals, key=lambda arm: _mean(arm.ends(runs) or (), "report_loss"), default=None)
    found = {
        "e1": change(runs, BOTH, mimetic, "report_loss", {"arms": _table(runs, [PLAIN, BOTH, *RIVALS.values()])}),
        "e2": change(runs, BOTH, normed, "report_loss"),
        "e3": change(runs, RIVALS["mimetic + LocAteR"], mimetic, "report_loss"),
        "e4": change(runs, RIVALS["QK-norm + LocAteR"], normed, "report_loss"),
        "e6": change(runs, RIVALS["weight decay 0.3 + LocAteR"], RIVALS["weight decay 0.3"], "report_loss"),
        "e5": None if best is None else change(runs, BOTH, best, "report_loss", {"best": best.name}),
    }
    return known(found)


def _f(runs: Runs) -> dict[str, Measured]:
    table = _table(runs, [arm for pair in ELSEWHERE.values() for arm in pair])
    kinds = (("f1", "masked", "report_loss"), ("f2", "image", "accuracy"), ("f3", "sort", "report_loss"))
    found = {
        key: change(runs, ELSEWHERE[name][1], ELSEWHERE[name][0], what, {"arms": table}) for key, name, what in kinds
    }
    return known(found)


def _h(runs: Runs) -> dict[str, Measured]:
    rate = PLAIN.rate(runs)
    if rate is None:
        return {}
    pushed, means = entropy_rows(rate), curve(TARGETS["mean only"], "mean only", rate)
    points = {name: _lines(runs, rows) for name, rows in {**pushed, "M held at 2": means[2.0]}.items()}
    shown = {name: [_end(line) for line in lines] for name, lines in points.items() if lines}

    def change(of: Sequence[Row], against: Sequence[Row], more: Mapping[str, Any] | None = None) -> Measured | None:
        return _by_seed(runs, [of, against], lambda lines: lines[0]["report_loss"] - lines[1]["report_loss"], more)

    return known({
        "h1": change(pushed["floor 0.75"], means[2.0], {"points": shown, "means": _points(runs, means)}),
        "h2": change(pushed["ceiling 0.35"], means[2.0]),
        "h3": change(means[4.0], means[0.0]),
    })  # fmt: skip


def _i(runs: Runs) -> dict[str, Measured]:
    losses = hot_losses(runs)
    if not {"none", "LocAteR", "QK-norm"} <= losses.keys():
        return {}
    survived, limits = rates_survived(losses)
    hottest = max(losses["none"])
    ratios = [a / b for a, b in zip(survived["LocAteR"], survived["none"], strict=True)]
    ahead = [a - b for a, b in zip(losses["LocAteR"][hottest], losses["QK-norm"][hottest], strict=True)]
    numbers = {"losses": losses, "survived": survived, "limits": limits, "steps": SHORT}
    return {"i1": by_seed(ratios, numbers), "i2": by_seed(ahead)}


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
    found = {
        name: [
            max((rate for rate in by_rate if by_rate[rate][seed] < limits[seed]), default=0.0)
            for seed in range(len(limits))
        ]
        for name, by_rate in losses.items()
    }
    return found, limits


JUDGES: dict[str, Callable[[Runs], dict[str, Measured]]] = {"c": _c, "d": _d, "e": _e, "f": _f, "h": _h, "i": _i}
TITLES = {
    "c": "LocAteR against no penalty", "d": "mean against scale", "e": "rivals on the same footing", "f": "beyond the paper's task",
    "h": "is it the entropy", "i": "stability",
}  # fmt: skip
STUDIES = tuple(
    of_runs(TITLES[letter], CLAIMS[letter], partial(rows_of, [letter]), JUDGES[letter]) for letter in CLAIMS
)


def _by_seed(
    runs: Runs,
    groups: Sequence[Sequence[Row]],
    of: Callable[[list[Line]], float],
    more: Mapping[str, Any] | None = None,
) -> Measured | None:
    """A number for each seed, from one line of each group."""
    found = [_lines(runs, rows) for rows in groups]
    if not all(found):
        return None
    return by_seed([of(list(lines)) for lines in zip(*found, strict=True)], more)


def _lines(runs: Runs, rows: Iterable[Row]) -> list[Line]:
    """Ends of these runs; none unless all are there."""
    found = [runs.of(row) for row in rows]
    done = [line for line in found if line is not None and line["status"] == "done"]
    return list(done) if len(done) == len(found) else []


def _losses(lines: Sequence[Line]) -> Tensor:
    return torch.tensor([line["report_loss"] for line in lines])


def _loss(line: Line | None) -> float:
    return float(line["report_loss"]) if line is not None and line["status"] == "done" else math.inf


def _mean(lines: Sequence[Line], name: str) -> float:
    return sum(float(line[name]) for line in lines) / len(lines) if lines else math.nan


def _end(line: Line) -> dict[str, Any]:
    return {"loss": line["report_loss"], "entropy": line["entropy"], "M": line["heads"]["M"], "F": line["heads"]["F"]}


def _points(runs: Runs, held: Mapping[float, Sequence[Row]]) -> list[dict[str, Any]]:
    """A curve: its variable, and the ends of its seeds."""
    found = {x: _lines(runs, rows) for x, rows in held.items()}
    return [{"x": x, "ends": [_end(line) for line in lines]} for x, lines in found.items() if lines]


def _table(runs: Runs, arms: Iterable[Arm]) -> list[dict[str, Any]]:
    return ends_table(runs, arms, lambda line: {**_end(line), "accuracy": line["accuracy"]})
