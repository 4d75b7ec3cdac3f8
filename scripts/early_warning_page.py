"""The page of the unseen runs: claims, tables and words, from lines that scripts/early_warning_train.py wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from early_warning_claims import OUTSIDE, claims, lead_text, missed, share_text, tuned
from early_warning_judge import ALARMS, EARLY, RELEASED, judged, lead, measured
from early_warning_plan import STEPS, all_runs

from locater_lab.engine.significance import LEVEL

GROUPS = {"cause": "cause of failure", "model": "model", "optimizer": "optimizer", "dtype": "precision", "text": "text"}


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
        "missed": missed(inside),
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


def _row(name: str, m: Mapping[str, Any]) -> str:
    ends = m["false_per_1000_interval"] or (0, 0)
    cells = [
        name,
        share_text(m["caught"], m["failed"], m["recall"]),
        str(m["caught_50_before"]) if m["failed"] else "-",
        lead_text(m),
        share_text(m["false"], m["ordinary"], m["false_share"]),
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
        f"{EARLY} steps before or earlier, and not before the fault began. The monitor observes one step in 50; its rivals read every step. The share caught "
        "depends on which causes were planned: read it by cause.",
        "",
        "## The claims",
        "",
        f"Over all runs but those with {OUTSIDE}, judged together (Holm, {LEVEL:.0%}).",
        "",
        "| | claim | measured | verdict |",
        "|---|---|---|---|",
        *(f"| {c['claim']} | {c['text']} | {c['figure']} | {c['verdict']} |" for c in data["claims"]),
        "",
        *_missed_words(data["missed"]),
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


def _missed_words(counts: Mapping[str, int]) -> list[str]:
    return [
        f"Of the {counts['failures']} failures that were missed, {counts['not observed']} had no observed step between the fault and "
        f"{EARLY} steps before the failure, so that no bound could have caught them at this pace; {counts['late']} were warned of too late; "
        f"{counts['never']} never were. (This count was added after a look at the first 111 runs. It judges nothing.)"
    ]


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
