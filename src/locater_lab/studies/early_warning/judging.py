"""Judges runs of the early-warning record: when the loss shows that one went wrong, and what announced it.

Steps are counted from 1, as `Monitor` counts them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from locater_lab.studies.early_warning.plan import BY_NAME, KINDS, TrainingRun, rate_at

RISE, BEHIND, LASTING, SMOOTH = 0.5, 0.5, 30, 5
SPAN = 50  # alarms that follow each other within so many steps are one; medians are over so many steps before
EARLY = 10  # steps before the loss shows a failure: an alarm after that is too late
DRAWS = 4000  # of the bootstrap
LEAST_RECALL, MOST_FALSE, LEAST_LEAD = 0.74, 0.23, 50
OUTSIDE = "bad data"  # a cause that is not in the model before the loss shows it
LOGITS, SPREADS = (25, 50, 100, 200, 400, math.inf), (2, 3.3, 5, 10, math.inf)
Runs = Sequence[Mapping[str, Any]]
Line = dict[str, Any]
Alarm = Callable[[Line], list[int]]


def smooth_losses(losses: Sequence[float | None]) -> list[float]:
    """Means over the last SMOOTH steps; not finite stays so.

    >>> smooth_losses([1.0, 3.0, None])
    [1.0, 2.0, inf]
    """
    known = [math.inf if x is None else x for x in losses]
    return [statistics.fmean(known[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(known))]


def first_wrong_step(losses: Sequence[float | None], usual: Sequence[float]) -> int | None:
    """The first step from which on the loss shows that the run has gone wrong; None for a healthy one.

    Wrong is RISE nats above the best so far, or BEHIND above the usual loss at that step, for LASTING steps in a row,
    or not finite.

    >>> first_wrong_step([2.0] * 40 + [4.0] * 40, [2.0] * 80)  # a mean of five is 0.5 higher from the second on
    42
    """
    best, count = math.inf, 0
    for step, loss in enumerate(smooth_losses(losses), 1):
        expected = usual[min(step, len(usual)) - 1] if usual else math.inf
        behind = not math.isfinite(loss) or loss > best + RISE or loss > expected + BEHIND
        count = count + 1 if behind else 0
        if not math.isfinite(loss) or count >= LASTING:
            return step - count + 1
        best = min(best, loss)
    return None


def usual_losses(lines: Iterable[Line], kind: str, without: str = "") -> list[float]:
    """The median loss at every step of a kind's ordinary runs, without that of one name."""
    ordinary = [x for x in lines if x["run"]["kind"] == kind and not x["run"]["cause"] and x["name"] != without]
    curves = [smooth_losses(x["losses"]) for x in ordinary]
    return [statistics.median(at) for at in zip(*curves, strict=False)]


def steps_of_jumps(values: Sequence[float | None], above: Callable[[float], float]) -> list[int]:
    """Steps whose value exceeds `above` of the median of the SPAN steps before, or is not finite."""
    steps = []
    for i, value in enumerate(values):
        before = [x for x in values[max(0, i - SPAN) : i] if x is not None]
        if value is None or (len(before) >= 10 and value > above(statistics.median(before))):
            steps.append(i + 1)
    return steps


def steps_above_best(losses: Sequence[float | None], rise: float) -> list[int]:
    """Steps whose smoothed loss is that much above the best so far."""
    best, steps = math.inf, []
    for step, loss in enumerate(smooth_losses(losses), 1):
        if loss > best + rise:
            steps.append(step)
        best = min(best, loss)
    return steps


def relative_rates(line: Line) -> list[float]:
    """The rate of every step, over the kind's usual one at its peak."""
    change = dict(line["run"])
    change["clip"] = math.inf if change.get("clip") is None else change["clip"]
    run = TrainingRun(**change)
    kind = BY_NAME[run.kind]
    return [rate_at(kind, run, step) / kind.rate for step in range(1, len(line["losses"]) + 1)]


def _warning_steps(line: Line, where: str, flag: str | None = None) -> list[int]:
    return sorted({w["step"] for w in line[where] if flag is None or w["flag"] == flag})


def bounds_crossed(line: Line, logit: float, spread: float) -> list[int]:
    """Steps that a monitor at every 50th step would warn at, with other bounds; from what was observed."""
    crossed = []
    for step, lost, max_logit, largest, _ in line["observed"]:
        high = any(x is not None and x > bound for x, bound in ((max_logit, logit), (largest, spread)))
        if (step - 1) % SPAN == 0 and (high or lost):
            crossed.append(step)
    return crossed


RELEASED = "Monitor()"
RIVALS: dict[str, Alarm] = {
    "rate of 1e-2 or more": lambda x: [
        i for i, r in enumerate(relative_rates(x), 1) if r * BY_NAME[x["run"]["kind"]].rate >= 0.01
    ],
    "rate 3 times the usual or more": lambda x: [i for i, r in enumerate(relative_rates(x), 1) if r >= 3],
    "gradient norm 3 times its median": lambda x: steps_of_jumps(x["norms"], lambda m: 3 * m),
    "gradient norm 10 times its median": lambda x: steps_of_jumps(x["norms"], lambda m: 10 * m),
    "loss 0.3 above its median": lambda x: steps_of_jumps(x["losses"], lambda m: m + 0.3),
    "loss 0.2 above its best": lambda x: steps_above_best(x["losses"], 0.2),
    "always, at step 1": lambda x: [1],
}
ALARMS: dict[str, Alarm] = {
    RELEASED: lambda x: _warning_steps(x, "warnings"),
    "of it, exploding": lambda x: _warning_steps(x, "warnings", "exploding"),
    "of it, spread>5": lambda x: _warning_steps(x, "warnings", "spread>5"),
    "of it, nonfinite": lambda x: _warning_steps(x, "warnings", "nonfinite"),
    "Monitor(every=10)": lambda x: _warning_steps(x, "warnings_dense"),
    **RIVALS,
}


def judge_runs(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Of each run: when it went wrong, from where on an alarm is about that, and the steps of every alarm."""
    runs = []
    for line in lines:
        run = line["run"]
        usual = usual_losses(lines, run["kind"], without=line["name"])
        wrong = first_wrong_step(line["losses"], usual)
        onset = run["onset"] if run["onset"] and (wrong is None or wrong >= run["onset"]) else 1
        kind = BY_NAME[run["kind"]]
        facts = {"cause": run["cause"], "model": kind.model, "optimizer": kind.optimizer, "dtype": kind.dtype}
        facts |= {"text": kind.text, "half": "AB"[KINDS.index(kind) % 2], "kind": kind.name}
        raised = {name: alarm(line) for name, alarm in ALARMS.items()}
        steps = len(line["losses"])
        end = (
            next((x for x in reversed(line["losses"]) if x is not None), None)
            if line["losses"][-1] is not None
            else None
        )
        runs.append(
            {
                "name": line["name"],
                **facts,
                "steps": steps,
                "wrong": wrong,
                "onset": onset,
                "raised": raised,
                "end": end,
            }
        )
    return runs


def lead(run: Mapping[str, Any], steps: Sequence[int]) -> int | None:
    """How many steps the first alarm about a failure came before the loss showed it; None where none was EARLY."""
    about = [step for step in steps if run["onset"] <= step <= run["wrong"] - EARLY]
    return run["wrong"] - about[0] if about else None


def count_events(steps: Iterable[int]) -> int:
    """Alarms, those within SPAN steps of each other counted as one.

    >>> count_events([1, 20, 60, 200])
    2
    """
    count, last = 0, -math.inf
    for step in steps:
        count += step - last > SPAN
        last = step
    return count


@cache
def share_interval(count: int, total: int, level: float = 0.05) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share.

    >>> [round(x, 3) for x in share_interval(12, 12)], [round(x, 3) for x in share_interval(0, 14)]
    ([0.735, 1.0], [0.0, 0.232])
    """

    def at_most(p: float, k: int) -> float:
        return sum(math.comb(total, i) * p**i * (1 - p) ** (total - i) for i in range(k + 1))

    def solve(high_enough: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if high_enough(middle) else (middle, high)
        return (low + high) / 2

    if not total:
        return 0.0, 1.0
    least = 0.0 if not count else solve(lambda p: 1 - at_most(p, count - 1) > level / 2)
    most = 1.0 if count == total else solve(lambda p: at_most(p, count) < level / 2)
    return least, most


def bootstrap(value: Callable[[list[Any]], float], items: Sequence[Any], draws: int = DRAWS) -> list[float]:
    """A number of samples drawn with replacement, sorted."""
    generator = random.Random(0)
    return sorted(value(generator.choices(items, k=len(items))) for _ in range(draws)) if items else []


def middle_95(values: Sequence[float]) -> tuple[float, float] | None:
    """The 2.5th and 97.5th percentile of sorted values."""
    return (values[int(0.025 * len(values))], values[math.ceil(0.975 * len(values)) - 1]) if values else None


def alarm_numbers(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Recall, lead and false alarms of one alarm over some runs."""
    failed = [run for run in runs if run["wrong"] is not None]
    ordinary = [run for run in runs if run["wrong"] is None and not run["cause"]]
    survived = [run for run in runs if run["wrong"] is None and run["cause"]]
    leads = [x for run in failed if (x := lead(run, run["raised"][name])) is not None]
    false = sum(bool(run["raised"][name]) for run in ordinary)
    # healthy stretches: ordinary runs, and runs of a later fault before it
    quiet = [(run["raised"][name], run["steps"]) for run in ordinary]
    quiet += [
        ([s for s in run["raised"][name] if s < run["onset"]], run["onset"] - 1) for run in runs if run["onset"] > 1
    ]
    counts = [(count_events(steps), length) for steps, length in quiet]

    def per_thousand(pairs: Sequence[tuple[int, int]]) -> float:
        return 1000 * sum(n for n, _ in pairs) / max(1, sum(length for _, length in pairs))

    return {
        "failed": len(failed),
        "caught": len(leads),
        "recall": share_interval(len(leads), len(failed)),
        "caught_50_before": sum(x >= 50 for x in leads),
        "lead": statistics.median(leads) if leads else None,
        "lead_interval": middle_95(bootstrap(statistics.median, leads)),
        "lead_least": min(leads, default=None),
        "ordinary": len(ordinary),
        "false": false,
        "false_share": share_interval(false, len(ordinary)),
        "survived": len(survived),
        "false_survived": sum(bool(run["raised"][name]) for run in survived),
        "healthy_steps": sum(length for _, length in counts),
        "false_per_1000": per_thousand(counts),
        "false_per_1000_interval": middle_95(bootstrap(per_thousand, counts)),
    }


# ---- the figures of the claims, and other bounds ----


def count_missed(runs: Runs) -> dict[str, int]:
    """Failures without a warning in time: those in which no step was observed that could have given one, those that
    were warned of too late, and those that never were.
    """
    counts = {"failures": 0, "not observed": 0, "late": 0, "never": 0}
    for run in runs:
        steps = run["raised"][RELEASED]
        if run["wrong"] is None or lead(run, steps) is not None:
            continue
        counts["failures"] += 1
        observable = [s for s in range(1, run["steps"] + 1, SPAN) if run["onset"] <= s <= run["wrong"] - EARLY]
        after = any(step >= run["onset"] for step in steps)
        counts["not observed" if not observable else "late" if after else "never"] += 1
    return counts


def score(runs: Runs, name: str) -> float:
    """Share of failures caught, less that of ordinary runs with an alarm: 0 for an alarm that is always raised."""
    failed = [run for run in runs if run["wrong"] is not None]
    ordinary = [run for run in runs if run["wrong"] is None and not run["cause"]]
    caught = sum(lead(run, run["raised"][name]) is not None for run in failed)
    return caught / max(1, len(failed)) - sum(bool(run["raised"][name]) for run in ordinary) / max(1, len(ordinary))


def binomial_p(count: int, total: int, share: float) -> float:
    """Twice the smaller tail at a share."""
    chances = [math.comb(total, i) * share**i * (1 - share) ** (total - i) for i in range(total + 1)]
    return min(1.0, 2 * min(sum(chances[: count + 1]), sum(chances[count:])))


def score_differences(runs: Runs, rival: str) -> list[float]:
    """Score of the monitor less that of a rival, over samples of failures and of ordinary runs; sorted."""
    failed = [run for run in runs if run["wrong"] is not None]
    ordinary = [run for run in runs if run["wrong"] is None and not run["cause"]]
    names = (RELEASED, rival)
    gains = [[lead(r, r["raised"][n]) is not None for n in names] for r in failed]
    costs = [[bool(r["raised"][n]) for n in names] for r in ordinary]
    plus = [a - b for a, b in gains]
    minus = [a - b for a, b in costs]
    generator = random.Random(0)

    def draw() -> float:
        up, down = (generator.choices(x, k=len(x)) for x in (plus, minus))
        return sum(up) / len(up) - sum(down) / len(down)

    return sorted(draw() for _ in range(DRAWS)) if failed and ordinary else []


def bootstrap_p(values: Sequence[float], stated: float) -> float:
    """Twice the smaller share of samples on a side of a number."""
    if not values:
        return 1.0
    below, above = sum(x <= stated for x in values), sum(x >= stated for x in values)
    return min(1.0, 2 * max(1, min(below, above)) / len(values))


def tune_bounds(lines: Sequence[dict[str, Any]], runs: Runs) -> dict[str, Any]:
    """Bounds of logit and spread that do best on half A of the kinds, and what they do on half B."""
    inside = [(line, dict(run)) for line, run in zip(lines, runs, strict=True) if run["cause"] != OUTSIDE]
    halves: dict[str, dict[tuple[float, float], dict[str, Any]]] = {"A": {}, "B": {}}
    for half, table in halves.items():
        chosen = [(line, run) for line, run in inside if run["half"] == half]
        for logit in LOGITS:
            for spread in SPREADS:
                name = f"{logit}, {spread}"
                for line, run in chosen:
                    run["raised"] = {name: bounds_crossed(line, logit, spread)}
                part = [run for _, run in chosen]
                failed = [r for r in part if r["wrong"] is not None]
                ordinary = [r for r in part if r["wrong"] is None and not r["cause"]]
                table[logit, spread] = {
                    "score": score(part, name),
                    "caught": sum(lead(r, r["raised"][name]) is not None for r in failed),
                    "failed": len(failed),
                    "false": sum(bool(r["raised"][name]) for r in ordinary),
                    "ordinary": len(ordinary),
                }
    best = max(halves["A"], key=lambda bounds: (halves["A"][bounds]["score"], bounds))
    released = (200, 5)
    names = {"best": best, "released": released}
    return {
        "bounds": [None if math.isinf(x) else x for x in best],
        **{f"{name}_on_{half}": halves[half][bounds] for name, bounds in names.items() for half in halves},
    }
