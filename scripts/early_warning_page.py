"""The page of the unseen runs: claims, tables and words, from lines that scripts/early_warning_train.py wrote."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from early_warning_judge import (
    ALARMS,
    DRAWS,
    EARLY,
    RELEASED,
    RIVALS,
    bootstrap,
    bounds_crossed,
    judged,
    lead,
    measured,
)
from early_warning_plan import STEPS, all_runs

from locater_papers.engine.intervals import LEVEL, decided_together

LEAST_RECALL, MOST_FALSE, LEAST_LEAD = 0.74, 0.23, 50
OUTSIDE = "bad data"  # a cause that is not in the model before the loss shows it
LOGITS, SPREADS = (25, 50, 100, 200, 400, math.inf), (2, 3.3, 5, 10, math.inf)
GROUPS = {"cause": "cause of failure", "model": "model", "optimizer": "optimizer", "dtype": "precision", "text": "text"}
Runs = Sequence[Mapping[str, Any]]


def record(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that the page shows, as data."""
    order = {run.name: i for i, run in enumerate(all_runs())}
    lines = sorted(lines, key=lambda line: order[line["name"]])
    runs = judged(lines)
    inside = [run for run in runs if run["cause"] != OUTSIDE]
    groups = {
        by: {
            value: measured([r for r in runs if r[by] == value], RELEASED)
            for value in dict.fromkeys(r[by] for r in runs)
            if value
        }
        for by in GROUPS
    }
    return {
        "runs": [{k: v for k, v in run.items() if k != "raised"} | _first(run) for run in runs],
        "alarms": {name: measured(runs, name) for name in ALARMS},
        "inside": {name: measured(inside, name) for name in ALARMS},
        "groups": groups,
        "claims": claims(inside),
        "tuned": tuned(lines, runs),
        "planned": len(all_runs()),
        "machines": list(dict.fromkeys(f"{x['machine']['device']}, torch {x['machine']['torch']}" for x in lines)),
        "texts": lines[0]["texts"],
        "troubles": {line["name"]: line["troubles"] for line in lines if line["troubles"]},
    }


def _first(run: Mapping[str, Any]) -> dict[str, Any]:
    """The first alarm of the monitor, and its lead."""
    steps = run["raised"][RELEASED]
    return {"warned": steps[0] if steps else None, "lead": lead(run, steps) if run["wrong"] is not None else None}


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
            _share(m["caught"], m["failed"], m["recall"]),
        ),
        (
            "b",
            f"At most {MOST_FALSE} of ordinary runs are warned of",
            m["false"] <= MOST_FALSE * m["ordinary"],
            _binomial_p(m["false"], m["ordinary"], MOST_FALSE),
            _share(m["false"], m["ordinary"], m["false_share"]),
        ),
        (
            "c",
            f"Where a warning came in time, its median lead is {LEAST_LEAD} steps or more",
            (m["lead"] or 0) >= LEAST_LEAD,
            _bootstrap_p(medians, LEAST_LEAD),
            _lead(m),
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
    decided = decided_together({name: p for name, _, _, p, _ in rows}, LEVEL)
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


def _share(count: int, total: int, ends: Sequence[float]) -> str:
    return f"{count} of {total} ({ends[0]:.2f} to {ends[1]:.2f})" if total else "-"


def _lead(m: Mapping[str, Any]) -> str:
    return "-" if m["lead"] is None else f"{m['lead']:g} ({m['lead_interval'][0]:g} to {m['lead_interval'][1]:g})"


def _row(name: str, m: Mapping[str, Any]) -> str:
    ends = m["false_per_1000_interval"] or (0, 0)
    cells = [
        name,
        _share(m["caught"], m["failed"], m["recall"]),
        str(m["caught_50_before"]) if m["failed"] else "-",
        _lead(m),
        _share(m["false"], m["ordinary"], m["false_share"]),
        f"{m['false_per_1000']:.2f} ({ends[0]:.2f} to {ends[1]:.2f})" if m["healthy_steps"] else "-",
        f"{m['false_survived']} of {m['survived']}" if m["survived"] else "-",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = [
    "| {} | caught in time | of them 50 steps before | median lead, steps | ordinary runs with an alarm | alarms per 1,000 healthy steps | forced runs that survived, with an alarm |",
    "|---|---|---|---|---|---|---|",
]


def text(data: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    failed, ordinary = data["alarms"][RELEASED]["failed"], data["alarms"][RELEASED]["ordinary"]
    survived = data["alarms"][RELEASED]["survived"]
    lines = [
        "# The early-warning record, on unseen runs",
        "",
        "What `locater.Monitor()` is worth on runs that its thresholds were not chosen on. Planned before the first run "
        "([plan](early-warning-plan.md)); made and judged by `scripts/early_warning.py unseen` and `judge`; every run is a line of "
        f"`early-warning-unseen.jsonl`, every figure is in `early-warning-unseen.json`. {len(data['runs'])} of {data['planned']} planned runs "
        f"of up to {STEPS} steps were made ({'; '.join(data['machines'])}): {failed} went wrong, {ordinary} were ordinary and "
        f"stayed healthy, {survived} were forced and survived. Brackets are intervals of 95 %.",
        "",
        "Lead is how many steps an alarm came before the loss showed the failure. It is in time if it came "
        f"{EARLY} steps before or earlier, and not before the fault began. The monitor observes one step in 50; its rivals read every step.",
        "",
        "## The claims",
        "",
        f"Over all runs but those with {OUTSIDE}, judged together (Holm, {LEVEL:.0%}).",
        "",
        "| | claim | measured | verdict |",
        "|---|---|---|---|",
        *(f"| {c['claim']} | {c['text']} | {c['figure']} | {c['verdict']} |" for c in data["claims"]),
        "",
        "## All alarms",
        "",
        f"Without {OUTSIDE}:",
        "",
        HEAD[0].format("alarm"),
        HEAD[1],
        *(_row(name, m) for name, m in data["inside"].items()),
        "",
        "With it:",
        "",
        HEAD[0].format("alarm"),
        HEAD[1],
        *(_row(name, m) for name, m in data["alarms"].items()),
        "",
        "## By family",
        "",
        f"`{RELEASED}` on each family by itself. No threshold was chosen on any of these runs, so each family is one that was left out.",
    ]
    for by, title in GROUPS.items():
        lines += ["", HEAD[0].format(title), HEAD[1], *(_row(name, m) for name, m in data["groups"][by].items())]
    lines += ["", "## Other bounds", "", *_tuned_words(data["tuned"]), "", "## The runs", ""]
    lines += [
        "| run | went wrong at step | fault from step | first warning | lead | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for run in data["runs"]:
        shown = [run["wrong"], run["onset"] if run["onset"] > 1 else None, run["warned"], run["lead"]]
        end = "not finite" if run["end"] is None else f"{run['end']:.2f}"
        lines.append(f"| {run['name']} | {' | '.join('-' if x is None else str(x) for x in shown)} | {end} |")
    return "\n".join(lines) + "\n"


def _tuned_words(t: Mapping[str, Any]) -> list[str]:
    logit, spread = ("none" if x is None else f"{x:g}" for x in t["bounds"])

    def told(m: Mapping[str, Any]) -> str:
        return f"{m['caught']} of {m['failed']} | {m['false']} of {m['ordinary']} | {m['score']:+.2f}"

    return [
        "Bounds of the largest logit and of the spread that have the highest recall less false alarms on half A of the kinds, beside the "
        "released ones. Half A chose them, so only half B says what they are worth.",
        "",
        "| bounds | half A: caught | ordinary with an alarm | difference | half B: caught | ordinary with an alarm | difference |",
        "|---|---|---|---|---|---|---|",
        f"| logit {logit}, spread {spread} | {told(t['best_on_A'])} | {told(t['best_on_B'])} |",
        f"| logit 200, spread 5 (released) | {told(t['released_on_A'])} | {told(t['released_on_B'])} |",
    ]
