"""The claims about the unseen runs of the early-warning record, its rivals, and other bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from early_warning_judge import (
    DRAWS,
    EARLY,
    RELEASED,
    RIVALS,
    SPAN,
    bootstrap,
    bounds_crossed,
    lead,
    measured,
)

from locater_lab.engine.significance import LEVEL, decided_by_holm

LEAST_RECALL, MOST_FALSE, LEAST_LEAD = 0.74, 0.23, 50
OUTSIDE = "bad data"  # a cause that is not in the model before the loss shows it
LOGITS, SPREADS = (25, 50, 100, 200, 400, math.inf), (2, 3.3, 5, 10, math.inf)
Runs = Sequence[Mapping[str, Any]]


def share_text(count: int, total: int, ends: Sequence[float]) -> str:
    return f"{count} of {total} ({ends[0]:.2f} to {ends[1]:.2f})" if total else "-"


def lead_text(m: Mapping[str, Any]) -> str:
    return "-" if m["lead"] is None else f"{m['lead']:g} ({m['lead_interval'][0]:g} to {m['lead_interval'][1]:g})"


def missed(runs: Runs) -> dict[str, int]:
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


def _binomial_p(count: int, total: int, share: float) -> float:
    """Twice the smaller tail at a share."""
    chances = [math.comb(total, i) * share**i * (1 - share) ** (total - i) for i in range(total + 1)]
    return min(1.0, 2 * min(sum(chances[: count + 1]), sum(chances[count:])))


def _differences(runs: Runs, rival: str) -> list[float]:
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


def _bootstrap_p(values: Sequence[float], stated: float) -> float:
    """Twice the smaller share of samples on a side of a number."""
    if not values:
        return 1.0
    below, above = sum(x <= stated for x in values), sum(x >= stated for x in values)
    return min(1.0, 2 * max(1, min(below, above)) / len(values))


def claims(runs: Runs) -> list[dict[str, Any]]:
    """The claims of the plan, judged together."""
    m = measured(runs, RELEASED)
    leads = [x for r in runs if r["wrong"] is not None and (x := lead(r, r["raised"][RELEASED])) is not None]
    medians = bootstrap(lambda x: sorted(x)[len(x) // 2], leads)
    rows: list[tuple[str, str, bool, float, str]] = [
        (
            "a",
            f"Of the failures that begin in the model, at least {LEAST_RECALL} are warned of {EARLY} steps before the loss shows them or earlier",
            m["caught"] >= LEAST_RECALL * m["failed"],
            _binomial_p(m["caught"], m["failed"], LEAST_RECALL),
            share_text(m["caught"], m["failed"], m["recall"]),
        ),
        (
            "b",
            f"At most {MOST_FALSE} of ordinary runs are warned of",
            m["false"] <= MOST_FALSE * m["ordinary"],
            _binomial_p(m["false"], m["ordinary"], MOST_FALSE),
            share_text(m["false"], m["ordinary"], m["false_share"]),
        ),
        (
            "c",
            f"Where a warning came in time, its median lead is {LEAST_LEAD} steps or more",
            (m["lead"] or 0) >= LEAST_LEAD,
            _bootstrap_p(medians, LEAST_LEAD),
            lead_text(m),
        ),
    ]
    for i, rival in enumerate(RIVALS, 1):
        values = _differences(runs, rival)
        difference = score(runs, RELEASED) - score(runs, rival)
        ends = (
            f" ({values[int(0.025 * len(values))]:.2f} to {values[math.ceil(0.975 * len(values)) - 1]:.2f})"
            if values
            else ""
        )
        text = f'Recall less false alarms is higher than that of the rival "{rival}"'
        rows.append((f"d{i}", text, difference > 0, _bootstrap_p(values, 0.0), f"{difference:+.2f}{ends}"))
    decided = decided_by_holm({name: p for name, _, _, p, _ in rows}, LEVEL)
    return [
        {
            "claim": name,
            "text": text,
            "figure": figure,
            "p": p,
            "verdict": ("holds" if good else "fails") if name in decided else "undecided",
        }
        for name, text, good, p, figure in rows
    ]


def tuned(lines: Sequence[dict[str, Any]], runs: Runs) -> dict[str, Any]:
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
