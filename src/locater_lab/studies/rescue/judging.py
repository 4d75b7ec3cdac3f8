"""Judges the rescue trial, by docs/results/rescue-plan.md: which branches diverged, what each arm saved, and what other
signals see at the same share of false alarms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.studies.early_warning.judging import (
    EARLY,
    SPAN,
    binomial_p,
    bootstrap,
    bootstrap_p,
    first_wrong_step,
    middle_95,
    smooth_losses,
    usual_losses,
)

FEWEST_STATES, FEWEST_DIVERGING = 30, 10  # below these nothing is judged
LAST = 20  # steps of a loss at the end
MARGIN, COST = 0.1, 0.02
SAVED, CAUGHT = "share of states saved, difference", "share of failures caught, difference"
CLAIMS = (
    Claim("r1", "Scaling the named heads saves alarmed runs", SAVED, "at least", 0.0, by="ours"),
    Claim("r2", "It saves more than scaling as many others", SAVED, "at least", 0.0, by="ours"),
    Claim("r3", f"The layer saves no more than the named heads by {MARGIN}", SAVED, "at most", MARGIN, by="ours"),
    Claim("r4", f"Half the rate saves no more than the named heads by {MARGIN}", SAVED, "at most", MARGIN, by="ours"),
    Claim("r5", f"Where the run lives, it costs {COST} nats at most", "change of loss, nats", "at most", COST, by="ours"),
    Claim("r6", "At 2 to 10 times the rate an alarmed state diverges more often than a quiet one", "difference of shares", "at least", 0.0, by="ours"),
    Claim("r7", "At equal false alarms the released rule catches more rises than the largest logit", CAUGHT, "at least", 0.0, by="ours"),
    Claim("r8", "And more than the spectral entropy", CAUGHT, "at least", 0.0, by="ours"),
)  # fmt: skip
Line = Mapping[str, Any]
State = dict[str, Any]


def states_of(base: Sequence[dict[str, Any]], branches: Sequence[Line]) -> list[State]:
    """Each state with the outcome of its arms: how it diverged ("F1", "F2", or "" where it did not), and its loss at
    the end. States at which the loss had shown a failure already are left out.
    """
    lines = {line["name"]: line for line in base}
    found: dict[str, State] = {}
    for branch in branches:
        line = lines[branch["name"]]
        usual = usual_losses(base, line["run"]["kind"], without=line["name"])
        before = line["losses"][: branch["step"]]
        if first_wrong_step(before, usual) is not None:
            continue
        facts = {"name": line["name"], "sort": branch["sort"], "rate": line["run"]["rate"], "arms": {}}
        state = found.setdefault(line["name"], facts)
        if branch["losses"] is not None:
            state["arms"][branch["arm"]] = _outcome([*before, *branch["losses"]], usual)
    return [state for state in found.values() if "nothing" in state["arms"]]


def _outcome(losses: Sequence[float | None], usual: Sequence[float]) -> tuple[str, float]:
    known = [math.inf if x is None else x for x in losses[-LAST:]]
    failure = "F1" if first_wrong_step(losses, []) is not None else ""
    return failure or ("F2" if first_wrong_step(losses, usual) is not None else ""), statistics.fmean(known)


def diverged(state: State, arm: str) -> bool:
    return bool(state["arms"][arm][0])


def mcnemar(states: Sequence[State], worse: str, better: str) -> Measurement | None:
    """Share of states that diverge under one arm less that under another; the p of McNemar's exact test."""
    both = [s for s in states if worse in s["arms"] and better in s["arms"]]
    if not both:
        return None
    saved = sum(diverged(s, worse) and not diverged(s, better) for s in both)
    lost = sum(diverged(s, better) and not diverged(s, worse) for s in both)
    value, half = (saved - lost) / len(both), 1.96 * math.sqrt(saved + lost) / len(both)
    numbers = {"states": len(both), "saved": saved, "lost": lost}
    p = binomial_p(saved, saved + lost, 0.5) if saved + lost else 1.0
    return Measurement(value, half, "1.96 standard errors of a paired share; p of McNemar's exact test", numbers, p=p)


def compare_arms(states: Sequence[State], arm: str, other: str, stated: float) -> Measurement | None:
    """What an arm saves more than another, by a bootstrap over states."""
    both = [s for s in states if arm in s["arms"] and other in s["arms"]]
    return _bootstrapped([int(diverged(s, other)) - int(diverged(s, arm)) for s in both], stated)


def _bootstrapped(values: Sequence[float], stated: float) -> Measurement | None:
    if not values:
        return None
    draws = bootstrap(statistics.fmean, values)
    ends = middle_95(draws) or (0.0, 0.0)
    how = "half of the 95 % interval of a bootstrap, which is not symmetric"
    mean, half = statistics.fmean(values), (ends[1] - ends[0]) / 2
    return Measurement(mean, half, how, {"of": len(values), "interval": list(ends)}, p=bootstrap_p(draws, stated))


def fisher(a: int, of_a: int, b: int, of_b: int) -> float:
    """Fisher's exact test of two shares, both sides.

    >>> round(fisher(8, 10, 1, 10), 4)
    0.0055
    """
    total, all_of = a + b, of_a + of_b
    chances = {
        k: math.comb(of_a, k) * math.comb(of_b, total - k) / math.comb(all_of, total)
        for k in range(max(0, total - of_b), min(of_a, total) + 1)
    }
    return min(1.0, sum(p for p in chances.values() if p <= chances[a] * (1 + 1e-9)))


def compare_sorts(states: Sequence[State]) -> Measurement | None:
    """How much more often an alarmed state of 2 to 10 times the rate diverges than a quiet one."""
    hot = [s for s in states if s["rate"] >= 2]
    counts = []
    for sort in ("alarmed", "quiet"):
        of_sort = [s for s in hot if s["sort"] == sort]
        counts += [sum(diverged(s, "nothing") for s in of_sort), len(of_sort)]
    a, of_a, b, of_b = counts
    if not of_a or not of_b:
        return None
    shares = a / of_a, b / of_b
    half = 1.96 * math.sqrt(sum(x * (1 - x) / n for x, n in zip(shares, (of_a, of_b), strict=True)))
    numbers = {"alarmed": [a, of_a], "quiet": [b, of_b]}
    how = "1.96 standard errors of a difference of shares; p of Fisher's exact test"
    return Measurement(shares[0] - shares[1], half, how, numbers, p=fisher(*counts))


# ---- rivals at equal shares of false alarms ----

Signal = Callable[[Line], list[tuple[int, float]]]  # (step, how alarming), by observed step


def _observed(column: int, sign: float = 1.0) -> Signal:
    return lambda line: [(row[0], sign * row[column]) for row in line["observed"] if row[column] is not None]


def _rival(column: int, sign: float = 1.0) -> Signal:
    return lambda line: [(int(row[0]), sign * row[column]) for row in line["rivals"] if row[column] is not None]


def _growth(line: Line) -> list[tuple[int, float]]:
    """The largest logit over what it was 50 steps before."""
    logits = dict(_observed(2)(line))
    return [(step, x / max(logits[step - SPAN], 1e-6)) for step, x in logits.items() if step - SPAN in logits]


def _norm(line: Line) -> list[tuple[int, float]]:
    """The gradient norm over its median of the last 50 steps."""
    norms = [math.inf if x is None else x for x in line["norms"]]
    return [
        (i + 1, norms[i] / max(statistics.median(norms[max(0, i - SPAN) : i]), 1e-9)) for i in range(10, len(norms), 10)
    ]


def _above_best(line: Line) -> list[tuple[int, float]]:
    losses = smooth_losses(line["losses"])
    return [(i + 1, losses[i] - min(losses[: i + 1])) for i in range(0, len(losses), 10)]


SIGNALS: dict[str, Signal] = {
    "largest logit": _observed(2),
    "growth of the largest logit": _growth,
    "gradient norm": _norm,
    "update of queries and keys": _rival(2),
    "spectral entropy": _rival(1, -1.0),
    "entropy ratio": _observed(4, -1.0),
    "loss above its best": _above_best,
}


def released_steps(line: Line) -> list[int]:
    return sorted({w["step"] for w in line["warnings"]})


def bound_for(signal: Signal, usual: Sequence[Line], alarms: int) -> float:
    """The least bound that a signal crosses in as few ordinary runs as the released rule warns in."""
    tops = sorted((max((x for _, x in signal(line)), default=-math.inf) for line in usual), reverse=True)
    return tops[alarms] if alarms < len(tops) else -math.inf


def catches(steps: Sequence[int], wrong: int) -> bool:
    return any(step <= wrong - EARLY for step in steps)


def compare_signals(base: Sequence[dict[str, Any]], name: str) -> Measurement | None:
    """Failures by a rise that the released rule catches in time, less those that a signal does."""
    usual = [line for line in base if line["run"]["rate"] == 1]
    alarms = sum(bool(released_steps(line)) for line in usual)
    signal = SIGNALS[name]
    bound = bound_for(signal, usual, alarms)
    values: list[float] = []
    for line in base:
        wrong = first_wrong_step(line["losses"], [])
        if wrong is not None:
            fired = [step for step, x in signal(line) if x > bound]
            values.append(float(catches(released_steps(line), wrong)) - float(catches(fired, wrong)))
    return _bootstrapped(values, 0.0)


def judge_trial(base: Sequence[dict[str, Any]], branches: Sequence[Line]) -> dict[str, Measurement | None]:
    """A measurement of each claim; None where the plan says that there is too little to judge."""
    states = states_of(base, branches)
    alarmed = [s for s in states if s["sort"] == "alarmed"]
    dying = [s for s in alarmed if diverged(s, "nothing")]
    enough = len(alarmed) >= FEWEST_STATES and len(dying) >= FEWEST_DIVERGING
    costs = [
        s["arms"]["named"][1] - s["arms"]["nothing"][1]
        for s in alarmed
        if not diverged(s, "nothing") and "named" in s["arms"]
    ]
    return {
        "r1": mcnemar(dying, "nothing", "named") if enough else None,
        "r2": mcnemar(dying, "random", "named") if enough else None,
        "r3": compare_arms(dying, "layer", "named", MARGIN) if enough else None,
        "r4": compare_arms(dying, "half", "named", MARGIN) if enough else None,
        "r5": by_seed(costs, of="states") if len(costs) > 1 else None,
        "r6": compare_sorts(states),
        "r7": compare_signals(base, "largest logit"),
        "r8": compare_signals(base, "spectral entropy"),
    }
