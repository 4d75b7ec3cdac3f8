"""What other signals see in the base runs of the rescue trial: at the share of false alarms of the released rule, among
stressed runs, and in kinds with norms on queries and keys. Bounds are set on ordinary runs, never on those that are judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locater_lab.studies.early_warning.judging import (
    EARLY,
    SPAN,
    bootstrap,
    first_wrong_step,
    middle_95,
    share_interval,
    smooth_losses,
    usual_losses,
)

STRESSED = 2.0  # times the rate, from which on a run is stressed
LOGIT, SPREAD = 200.0, 5.0  # of the released rule
CHOSEN_ON, JUDGED_ON = ("qwen3-a", "olmo2"), "qwen3-c"
Line = Mapping[str, Any]
Signal = Callable[[Line], list[tuple[int, float]]]  # (step, how alarming), by observed step
RELEASED = "the released rule"


def _observed(column: int, sign: float = 1.0) -> Signal:
    return lambda line: [(row[0], sign * row[column]) for row in line["observed"] if row[column] is not None]


def _rival(column: int, sign: float = 1.0) -> Signal:
    return lambda line: [(int(row[0]), sign * row[column]) for row in line["rivals"] if row[column] is not None]


def _growth(of: Signal) -> Signal:
    """A signal over what it was SPAN steps before."""

    def grown(line: Line) -> list[tuple[int, float]]:
        values = dict(of(line))
        return [(step, x / max(values[step - SPAN], 1e-6)) for step, x in values.items() if step - SPAN in values]

    return grown


def _norm(line: Line) -> list[tuple[int, float]]:
    """The gradient norm over its median of the SPAN steps before."""
    norms = [math.inf if x is None else x for x in line["norms"]]
    return [
        (i + 1, norms[i] / max(statistics.median(norms[max(0, i - SPAN) : i]), 1e-9)) for i in range(10, len(norms), 10)
    ]


def _above_best(line: Line) -> list[tuple[int, float]]:
    losses = smooth_losses(line["losses"])
    return [(i + 1, losses[i] - min(losses[: i + 1])) for i in range(0, len(losses), 10)]


def _severity(line: Line) -> list[tuple[int, float]]:
    """How far the released rule is over its bounds."""
    return [
        (row[0], math.inf if row[1] else max((row[2] or 0.0) / LOGIT, (row[3] or 0.0) / SPREAD))
        for row in line["observed"]
    ]


def above_earlier_run(base: Sequence[Line]) -> Signal:
    """The loss above that of one earlier run of the kind, at its own rate."""
    ordinary = sorted(ordinary_runs(base), key=lambda x: x["run"]["seed"])

    def above(line: Line) -> list[tuple[int, float]]:
        others = [x for x in ordinary if x["run"]["kind"] == line["run"]["kind"] and x["name"] != line["name"]]
        if not others:
            return []
        earlier, losses = smooth_losses(others[0]["losses"]), smooth_losses(line["losses"])
        return [(i + 1, losses[i] - earlier[min(i, len(earlier) - 1)]) for i in range(0, len(losses), 10)]

    return above


def signals_of(base: Sequence[Line]) -> dict[str, Signal]:
    return {
        RELEASED: _severity,
        "largest logit": _observed(2),
        "growth of the largest logit": _growth(_observed(2)),
        "gradient norm": _norm,
        "update of queries and keys": _rival(2),
        "spectral entropy": _rival(1, -1.0),
        "entropy ratio": _observed(4, -1.0),
        "loss above its best": _above_best,
        "loss above one earlier run": above_earlier_run(base),
    }


NORMED: dict[str, Signal] = {  # of kinds with norms on queries and keys
    "gains": _rival(4),
    "growth of the gains": _growth(_rival(4)),
    "logits after the norm": _observed(2),
    "growth of the logits": _growth(_observed(2)),
    "entropy ratio": _observed(4, -1.0),
    "update of queries and keys": _rival(2),
}


# ---- at equal shares of false alarms ----


def ordinary_runs(base: Sequence[Line]) -> list[Line]:
    return [line for line in base if not line["run"]["cause"]]


def released_steps(line: Line) -> list[int]:
    return sorted({w["step"] for w in line["warnings"]})


def top(signal: Signal, line: Line, before: float = math.inf) -> float:
    """The highest value at an observed step up to `before`."""
    return max((x for step, x in signal(line) if step <= before and not math.isnan(x)), default=-math.inf)


def bound_for(signal: Signal, usual: Sequence[Line], alarms: int) -> float:
    """The least bound that a signal crosses in as few ordinary runs as the released rule warns in."""
    tops = sorted((top(signal, line) for line in usual), reverse=True)
    return tops[alarms] if alarms < len(tops) else -math.inf


def first_lead(steps: Sequence[int], wrong: int) -> int | None:
    """Steps from the first alarm to the failure; None where it came too late."""
    early = [step for step in steps if step <= wrong - EARLY]
    return wrong - early[0] if early else None


def alarm_steps(base: Sequence[Line], signal: Signal | None) -> Callable[[Line], list[int]]:
    """The steps at which a signal is over its bound for equal false alarms; without one, those of the released rule."""
    if signal is None:
        return released_steps
    usual = ordinary_runs(base)
    bound = bound_for(signal, usual, sum(bool(released_steps(line)) for line in usual))
    return lambda line: [step for step, x in signal(line) if x > bound]


def rises(base: Sequence[Line]) -> list[tuple[Line, int]]:
    """Runs whose loss rises above its own lowest, or is not finite, and from which step on (F1)."""
    found = ((line, first_wrong_step(line["losses"], [])) for line in base)
    return [(line, wrong) for line, wrong in found if wrong is not None]


def difference_of_catches(base: Sequence[Line], name: str) -> list[float]:
    """Of each rise: 1 where the released rule alone catches it in time, -1 where a signal alone does."""
    ours, theirs = alarm_steps(base, None), alarm_steps(base, signals_of(base)[name])
    return [
        float(first_lead(ours(line), wrong) is not None) - float(first_lead(theirs(line), wrong) is not None)
        for line, wrong in rises(base)
    ]


def rival_rows(base: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of every signal: rises caught in time at equal false alarms, lead, and the area among stressed runs."""
    rows: dict[str, dict[str, Any]] = {}
    usual, fates = ordinary_runs(base), fates_of(base)
    for name, signal in signals_of(base).items():
        steps = alarm_steps(base, None if name == RELEASED else signal)
        leads = [first_lead(steps(line), wrong) for line, wrong in rises(base)]
        caught = [x for x in leads if x is not None]
        rows[name] = {
            "caught": len(caught),
            "of": len(leads),
            "interval": share_interval(len(caught), len(leads)),
            "lead": statistics.median(caught) if caught else None,
            "false": sum(bool(steps(line)) for line in usual),
            "ordinary": len(usual),
            **_area(base, signal, fates),
        }
    return rows


def fates_of(base: Sequence[dict[str, Any]]) -> dict[str, tuple[str, int | None]]:
    """How each run ended (F1, F2, or nothing), and from which step on."""
    usual = {kind: usual_losses(base, kind) for kind in {line["run"]["kind"] for line in base}}
    fates: dict[str, tuple[str, int | None]] = {}
    for line in base:
        rise = first_wrong_step(line["losses"], [])
        others = (
            usual[line["run"]["kind"]]
            if line["run"]["cause"]
            else usual_losses(base, line["run"]["kind"], without=line["name"])
        )
        behind = first_wrong_step(line["losses"], others)
        fates[line["name"]] = ("F1", rise) if rise is not None else ("F2" if behind is not None else "", behind)
    return fates


def _area(base: Sequence[Line], signal: Signal, fates: Mapping[str, tuple[str, int | None]]) -> dict[str, Any]:
    """Of the stressed runs: the share of pairs in which the one that rises has a higher score than the one that lives."""
    scores: list[tuple[bool, float]] = []
    for line in base:
        fate, wrong = fates[line["name"]]
        if line["run"]["rate"] >= STRESSED and fate != "F2":
            scores.append((fate == "F1", top(signal, line, math.inf if wrong is None else wrong - EARLY)))
    failed = sum(risen for risen, _ in scores)
    if failed in (0, len(scores)):
        return {"area": None, "area_interval": None, "pairs": [failed, len(scores) - failed]}
    ends = middle_95(bootstrap(area_of, scores, draws=1000))
    return {"area": area_of(scores), "area_interval": ends, "pairs": [failed, len(scores) - failed]}


def area_of(scores: Sequence[tuple[bool, float]]) -> float:
    """The share of pairs of a failing and another run in which the failing one has the higher score; half for equal ones.

    >>> area_of([(True, 2.0), (True, 1.0), (False, 1.0), (False, 0.0)])
    0.875
    """
    bad, good = ([x for failed, x in scores if failed is kind] for kind in (True, False))
    if not bad or not good:
        return 0.5
    return sum((a > b) + 0.5 * (a == b) for a in bad for b in good) / (len(bad) * len(good))


# ---- kinds with norms on queries and keys ----


def normed_rows(base: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Bounds of signals that exist where queries and keys are normed: chosen on two kinds, judged on a third."""
    fates = fates_of(base)
    rows: dict[str, dict[str, Any]] = {}
    for name, signal in NORMED.items():
        chosen = [_score(line, signal, fates) for line in base if line["run"]["kind"] in CHOSEN_ON]
        bounds = sorted({x for _, x in chosen if math.isfinite(x)} | {-math.inf})
        if len(bounds) == 1 or not any(failed for failed, _ in chosen):
            continue  # no line has it, or nothing failed
        bound = max(bounds, key=lambda b: (_difference(chosen, b), b))
        judged = [_score(line, signal, fates) for line in base if line["run"]["kind"] == JUDGED_ON]
        rows[name] = {"bound": bound, "chosen": _counts(chosen, bound), "judged": _counts(judged, bound)}
    return rows


def _score(line: Line, signal: Signal, fates: Mapping[str, tuple[str, int | None]]) -> tuple[bool | None, float]:
    """Whether a run failed (None: it was stressed and lived), and its score."""
    fate, wrong = fates[line["name"]]
    if not fate:
        return (None if line["run"]["cause"] else False), top(signal, line)
    return True, top(signal, line, (wrong or 0) - EARLY)


def _counts(scores: Sequence[tuple[bool | None, float]], bound: float) -> list[int]:
    """Failures caught, failures; ordinary runs with an alarm, ordinary runs; stressed runs that lived, in the same way."""
    groups = [[x for failed, x in scores if failed is kind] for kind in (True, False, None)]
    return [count for group in groups for count in (sum(x > bound for x in group), len(group))]


def _difference(scores: Sequence[tuple[bool | None, float]], bound: float) -> float:
    caught, failed, false, ordinary, *_ = _counts(scores, bound)
    return caught / max(1, failed) - false / max(1, ordinary)
