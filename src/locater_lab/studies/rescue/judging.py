"""What the branches of the rescue trial did, by docs/results/rescue-plan.md: which diverged, what each arm saved, and what
it cost where nothing had been wrong. Other signals are in signals.py.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from locater_lab.engine.claims import Measurement, by_seed
from locater_lab.studies.early_warning.judging import (
    binomial_p,
    bootstrap,
    bootstrap_p,
    first_wrong_step,
    middle_95,
    share_interval,
    usual_losses,
)
from locater_lab.studies.early_warning.plan import BY_NAME, vocabulary_size
from locater_lab.studies.rescue.branches import ARMS
from locater_lab.studies.rescue.signals import STRESSED, difference_of_catches, fates_of

FEWEST_STATES, FEWEST_DIVERGING = 30, 10  # below these nothing is judged
LAST = 20  # steps of a loss at the end
MARGIN = 0.1
SENSITIVE = ("nothing", "named", "half")  # arms whose sensitivity to the rate is compared
Line = Mapping[str, Any]
State = dict[str, Any]


def uniform_loss(kind: str) -> float:
    return math.log(vocabulary_size(BY_NAME[kind])) if kind in BY_NAME else math.inf


def end_loss(losses: Sequence[float | None], kind: str) -> float:
    """Mean of the last steps, at most that of a uniform guess."""
    known = [math.inf if x is None else x for x in losses[-LAST:]]
    return min(statistics.fmean(known), uniform_loss(kind))


def states_of(base: Sequence[dict[str, Any]], branches: Sequence[Line]) -> list[State]:
    """Each state with the outcome of its arms: how it diverged ("F1", "F2", or "" where it did not), its loss at the end,
    and at which step that is. States at which the loss had shown a failure already are left out.
    """
    lines = {line["name"]: line for line in base}
    usual = {
        name: usual_losses(base, lines[name]["run"]["kind"], without=name) for name in {x["name"] for x in branches}
    }
    found: dict[str, State] = {}
    for branch in branches:
        line, others = lines[branch["name"]], usual[branch["name"]]
        before = line["losses"][: branch["step"]]
        if first_wrong_step(before, others) is not None:
            continue
        facts = {"name": line["name"], "sort": branch["sort"], "step": branch["step"], "arms": {}}
        facts |= {"kind": line["run"]["kind"], "rate": line["run"]["rate"]}
        state = found.setdefault(line["name"], facts)
        if branch["losses"] is not None:
            whole = [*before, *branch["losses"]]
            state["arms"][branch["arm"]] = _fate(whole, others), end_loss(whole, state["kind"]), len(whole)
    return [state for state in found.values() if "nothing" in state["arms"]]


def _fate(losses: Sequence[float | None], usual: Sequence[float]) -> str:
    if first_wrong_step(losses, []) is not None:
        return "F1"
    return "F2" if first_wrong_step(losses, usual) is not None else ""


def diverged(state: State, arm: str) -> bool:
    return bool(state["arms"][arm][0])


def with_arms(states: Sequence[State], *arms: str) -> list[State]:
    return [s for s in states if all(arm in s["arms"] for arm in arms)]


def mcnemar(states: Sequence[State], worse: str, better: str) -> Measurement | None:
    """Share of states that diverge under one arm less that under another; the p of McNemar's exact test."""
    both = with_arms(states, worse, better)
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
    both = with_arms(states, arm, other)
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
    """How much more often an alarmed state of a stressed run diverges than a quiet one."""
    counts = []
    for sort in ("alarmed", "quiet"):
        of_sort = [s for s in states if s["rate"] >= STRESSED and s["sort"] == sort]
        counts += [sum(diverged(s, "nothing") for s in of_sort), len(of_sort)]
    a, of_a, b, of_b = counts
    if not of_a or not of_b:
        return None
    shares = a / of_a, b / of_b
    half = 1.96 * math.sqrt(sum(x * (1 - x) / n for x, n in zip(shares, (of_a, of_b), strict=True)))
    numbers = {"alarmed": [a, of_a], "quiet": [b, of_b]}
    how = "1.96 standard errors of a difference of shares; p of Fisher's exact test"
    return Measurement(shares[0] - shares[1], half, how, numbers, p=fisher(*counts))


def judge_trial(base: Sequence[dict[str, Any]], branches: Sequence[Line]) -> dict[str, Measurement | None]:
    """A measurement of each claim; None where the plan says that there is too little to judge."""
    states = states_of(base, branches)
    alarmed = [s for s in states if s["sort"] == "alarmed"]
    dying = [s for s in alarmed if diverged(s, "nothing")]
    enough = len(alarmed) >= FEWEST_STATES and len(dying) >= FEWEST_DIVERGING
    living = with_arms([s for s in alarmed if not diverged(s, "nothing")], "named")
    costs = [s["arms"]["named"][1] - s["arms"]["nothing"][1] for s in living]
    return {
        "r1": mcnemar(dying, "nothing", "named") if enough else None,
        "r2": mcnemar(dying, "random", "named") if enough else None,
        "r3": compare_arms(dying, "layer", "named", MARGIN) if enough else None,
        "r4": compare_arms(dying, "half", "named", MARGIN) if enough else None,
        "r5": by_seed(costs, of="states") if len(costs) > 1 else None,
        "r6": compare_sorts(states),
        "r7": _bootstrapped(difference_of_catches(base, "largest logit"), 0.0),
        "r8": _bootstrapped(difference_of_catches(base, "spectral entropy"), 0.0),
    }


# ---- what the page shows beside the claims ----


def arm_rows(states: Sequence[State]) -> dict[str, dict[str, Any]]:
    """Of each arm: how many states diverge (F1, F2), with McNemar's test against "nothing", and its cost where both live."""
    rows: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        both = with_arms(states, arm)
        test = mcnemar(both, "nothing", arm)
        living = [s for s in both if not diverged(s, "nothing") and not diverged(s, arm)]
        fates = Counter(s["arms"][arm][0] for s in both)
        cost = [s["arms"][arm][1] - s["arms"]["nothing"][1] for s in living]
        rows[arm] = {
            "states": len(both),
            "F1": fates["F1"],
            "F2": fates["F2"],
            "interval": share_interval(fates["F1"] + fates["F2"], len(both)),
            "p": None if test is None or arm == "nothing" else test.p,
            "cost": statistics.fmean(cost) if cost else None,
        }
    return rows


def saved_by_fate(states: Sequence[State]) -> dict[str, dict[str, list[int]]]:
    """Of the alarmed states that rise (F1), or stay behind (F2), under "nothing": how many each arm saves, of how many."""
    found: dict[str, dict[str, list[int]]] = {}
    for fate in ("F1", "F2"):
        dying = [s for s in states if s["sort"] == "alarmed" and s["arms"]["nothing"][0] == fate]
        found[fate] = {
            arm: [sum(not diverged(s, arm) for s in both), len(both)]
            for arm in ARMS[1:]
            for both in [with_arms(dying, arm)]
        }
    return found


def ladder(base: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each rate: how its base runs ended, how many were warned of, and the loss above the best of the kind."""
    fates = fates_of(base)
    excess = _excess(base)
    rows: dict[str, dict[str, Any]] = {}
    for rate in sorted({line["run"]["rate"] for line in base}):
        lines = [line for line in base if line["run"]["rate"] == rate]
        counts = Counter(fates[line["name"]][0] for line in lines)
        warned = [bool(line["warnings"]) for line in lines]
        lived = [bool(line["warnings"]) for line in lines if not fates[line["name"]][0]]
        rows[f"{rate:g}"] = {
            "runs": len(lines),
            "F1": counts["F1"],
            "F2": counts["F2"],
            "warned": sum(warned),
            "warned and lived": sum(lived),
            "above the best": statistics.fmean(excess[line["name"]] for line in lines),
        }
    return rows


def _excess(base: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The loss of each base run at the end, above the kind's best: the least mean over the seeds of a rate."""
    ends = {line["name"]: end_loss(line["losses"], line["run"]["kind"]) for line in base}
    cells: dict[tuple[str, float], list[float]] = {}
    for line in base:
        cells.setdefault((line["run"]["kind"], line["run"]["rate"]), []).append(ends[line["name"]])
    best: dict[str, float] = {}
    for (kind, _), values in cells.items():
        best[kind] = min(best.get(kind, math.inf), statistics.fmean(values))
    return {line["name"]: ends[line["name"]] - best[line["run"]["kind"]] for line in base}


def sensitivity(base: Sequence[dict[str, Any]], states: Sequence[State]) -> dict[str, Any]:
    """Learning-rate sensitivity: mean loss above the best, of all base runs and, where an alarmed state was branched, of
    arms at the last step of the branch. Means over kinds, with those of each.
    """
    excess = _excess(base)
    by_kind: dict[str, dict[str, list[float]]] = {}
    for line in base:
        by_kind.setdefault(line["run"]["kind"], {}).setdefault("base", []).append(excess[line["name"]])
    for state in with_arms([s for s in states if s["sort"] == "alarmed"], *SENSITIVE):
        kind, until = state["kind"], state["arms"]["nothing"][2]
        best = min(end_loss(x["losses"][:until], kind) for x in base if x["run"]["kind"] == kind)
        for arm in SENSITIVE:
            by_kind[kind].setdefault(arm, []).append(state["arms"][arm][1] - best)
    kinds = {kind: {name: statistics.fmean(x) for name, x in of.items()} for kind, of in by_kind.items()}
    names = ("base", *SENSITIVE)
    known = {name: [row[name] for row in kinds.values() if name in row] for name in names}
    return {"kinds": kinds, "mean": {name: statistics.fmean(x) for name, x in known.items() if x}}
