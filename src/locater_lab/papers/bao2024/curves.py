"""One thing changed at a time, at the plain arm's learning rate: the target, the strength, the entropy. Study h, and
study d as a whole, which has the tuned arms of `judged.py` and the curves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from locater.numerics import spearman
from locater_lab.engine.arms import Line, study_of_runs
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Row, Runs
from locater_lab.papers.bao2024.arms import PLAIN, STRENGTHS, TARGETS, curve, entropy_rows, rows_of
from locater_lab.papers.bao2024.judged import PARTS_CLAIMS, end_of, of_parts

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


def of_curves(runs: Runs) -> Results:
    """Loss and entropy over targets and strengths."""
    rate = PLAIN.rate(runs)
    if rate is None:
        return Results({})
    both = curve(TARGETS["both"], "both", rate)

    def order(lines: list[Line]) -> float:
        losses = torch.tensor([line["report_loss"] for line in lines])
        return spearman(torch.tensor(list(both)), losses) or 0.0

    measured = {
        "d11": _each_seed(runs, list(both.values()), order),
        "d12": _each_seed(runs, [both[2.0], both[-2.0]], _difference),
    }
    tables = {
        "targets": {name: _points(runs, curve(by_target, name, rate)) for name, by_target in TARGETS.items()},
        "strengths": {name: _points(runs, curve(by_strength, name, rate)) for name, by_strength in STRENGTHS.items()},
        "curve_rate": rate,
    }
    return Results(measured, tables)


def of_entropy(runs: Runs) -> Results:
    """Entropy pushed up or down while the mean is held; the mean moved while entropy is free."""
    rate = PLAIN.rate(runs)
    if rate is None:
        return Results({})
    pushed, means = entropy_rows(rate), curve(TARGETS["mean only"], "mean only", rate)
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
    lines = [_finished(runs, rows) for rows in groups]
    return by_seed([of(list(each)) for each in zip(*lines, strict=True)]) if all(lines) else None


def _finished(runs: Runs, rows: Iterable[Row]) -> list[Line]:
    """Lines of these runs; none unless all are there."""
    lines = [runs.of(row) for row in rows]
    done = [line for line in lines if line is not None and line["status"] == "done"]
    return list(done) if len(done) == len(lines) else []


def _ends(runs: Runs, rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [end_of(line) for line in _finished(runs, rows)]


def _points(runs: Runs, rows_at: Mapping[float, Sequence[Row]]) -> list[dict[str, Any]]:
    """A curve: its variable, and the ends of its seeds."""
    points = [{"x": x, "ends": _ends(runs, rows)} for x, rows in rows_at.items()]
    return [point for point in points if point["ends"]]


def of_parts_and_curves(runs: Runs) -> Results:
    parts, curves = of_parts(runs), of_curves(runs)
    return Results({**parts.measured, **curves.measured}, {**parts.tables, **curves.tables})


PARTS_STUDY = study_of_runs(
    "mean against scale",
    tuple(sorted((*PARTS_CLAIMS, *CURVE_CLAIMS), key=lambda claim: int(claim.id[1:]))),
    partial(rows_of, "d"),
    of_parts_and_curves,
)
ENTROPY_STUDY = study_of_runs("is it the entropy", ENTROPY_CLAIMS, partial(rows_of, "h"), of_entropy)
