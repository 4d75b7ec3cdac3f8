"""What `locater.Monitor()` is worth as it is released, on training runs that its thresholds were not chosen on.

docs/results/early-warning-plan.md was written before the runs. Whether a run went wrong is judged by its loss alone;
what counts is how many steps before that the monitor warned, and how often it warns in ordinary runs. The runs on which
the thresholds were chosen are in `first_runs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Paper, Results, Setting, Study
from locater_lab.studies.early_warning.judging import (
    ALARMS,
    EARLY,
    LEAST_LEAD,
    LEAST_RECALL,
    MOST_FALSE,
    OUTSIDE,
    RELEASED,
    RIVALS,
    alarm_numbers,
    binomial_p,
    bootstrap,
    bootstrap_p,
    count_missed,
    judge_runs,
    lead,
    middle_95,
    score,
    score_differences,
    tune_bounds,
)
from locater_lab.studies.early_warning.plan import STEPS, all_runs
from locater_lab.train.sweep import read_lines

TEXT = "articles.txt.xz"  # Wikipedia prose, in the folder of --data
GROUPS = {"cause": "cause of failure", "model": "model", "optimizer": "optimizer", "dtype": "precision", "text": "text"}
CLAIMS = (
    Claim(
        "a",
        f"Of the failures that begin in the model, at least {LEAST_RECALL} are warned of {EARLY} steps before the loss shows them or earlier",
        "share of failures warned of in time",
        "at least",
        LEAST_RECALL,
        by="ours",
    ),
    Claim(
        "b",
        f"At most {MOST_FALSE} of ordinary runs are warned of",
        "share of ordinary runs with a warning",
        "at most",
        MOST_FALSE,
        by="ours",
    ),
    Claim(
        "c",
        f"Where a warning came in time, its median lead is {LEAST_LEAD} steps or more",
        "median lead, steps",
        "at least",
        LEAST_LEAD,
        by="ours",
    ),
    *(
        Claim(
            f"d{number}",
            f'Recall less false alarms is higher than that of the rival "{rival}"',
            "score of the monitor less that of the rival",
            "at least",
            0.0,
            by="ours",
        )
        for number, rival in enumerate(RIVALS, 1)
    ),
)


def measure(setting: Setting) -> Results:
    """Judge the lines that there are; with --jobs make those that are missing first."""
    if setting.runs is None:
        return Results({})
    if setting.jobs:
        assert setting.data is not None
        from locater_lab.studies.early_warning.training import train_missing

        if not (setting.data / TEXT).is_file():
            raise LocaterError(f"{setting.data / TEXT}: no such file, and the runs train on it: give --data FOLDER")
        train_missing(setting.runs, setting.data / TEXT, setting.jobs, setting.log)
    lines = [line for path in (*setting.more_runs, setting.runs) for line in read_lines(path)]
    return results_of(lines) if lines else Results({})


def results_of(lines: Sequence[dict[str, Any]]) -> Results:
    """A measurement for each claim, and what the page shows."""
    order = {run.name: i for i, run in enumerate(all_runs())}
    lines = sorted(lines, key=lambda line: order[line["name"]])
    runs = judge_runs(lines)
    inside = [run for run in runs if run["cause"] != OUTSIDE]
    groups = {
        by: {
            value: alarm_numbers([r for r in runs if r[by] == value], RELEASED)
            for value in dict.fromkeys(r[by] for r in runs)
            if value
        }
        for by in GROUPS
    }
    tables = {
        "runs": [{k: v for k, v in run.items() if k != "raised"} | _first_alarm(run) for run in runs],
        "alarms": {name: alarm_numbers(runs, name) for name in ALARMS},
        "inside": {name: alarm_numbers(inside, name) for name in ALARMS},
        "groups": groups,
        "missed": count_missed(inside),
        "tuned": tune_bounds(lines, runs),
        "planned": len(all_runs()),
        "machines": list(dict.fromkeys(f"{x['machine']['device']}, torch {x['machine']['torch']}" for x in lines)),
        "texts": lines[0]["texts"],
        "troubles": {line["name"]: line["troubles"] for line in lines if line["troubles"]},
    }
    return Results(measured_claims(inside, tables["inside"][RELEASED]), tables)


def measured_claims(runs: Sequence[Mapping[str, Any]], m: Mapping[str, Any]) -> dict[str, Measurement | None]:
    """Shares by the binomial distribution, the rest by a bootstrap over runs. `m` is what the monitor did in these runs."""
    leads = [x for r in runs if r["wrong"] is not None and (x := lead(r, r["raised"][RELEASED])) is not None]
    medians = bootstrap(lambda x: sorted(x)[len(x) // 2], leads)
    found: dict[str, Measurement | None] = {
        "a": _share_measurement(m["caught"], m["failed"], m["recall"], LEAST_RECALL),
        "b": _share_measurement(m["false"], m["ordinary"], m["false_share"], MOST_FALSE),
        "c": _bootstrap_measurement(float(m["lead"] or 0), m["lead_interval"], bootstrap_p(medians, LEAST_LEAD)),
    }
    for number, rival in enumerate(RIVALS, 1):
        values = score_differences(runs, rival)
        found[f"d{number}"] = _bootstrap_measurement(
            score(runs, RELEASED) - score(runs, rival), middle_95(values), bootstrap_p(values, 0.0)
        )
    return found


def _share_measurement(count: int, total: int, ends: Sequence[float], stated: float) -> Measurement | None:
    if not total:
        return None
    numbers = {"count": count, "of": total, "interval": list(ends)}
    how = "half of the 95 % interval of Clopper and Pearson, which is not symmetric"
    return Measurement(count / total, (ends[1] - ends[0]) / 2, how, numbers, p=binomial_p(count, total, stated))


def _bootstrap_measurement(value: float, ends: Sequence[float] | None, p: float) -> Measurement | None:
    if ends is None:
        return None
    how = "half of the 95 % interval of a bootstrap over runs, which is not symmetric"
    return Measurement(value, (ends[1] - ends[0]) / 2, how, {"interval": list(ends)}, p=p)


def _first_alarm(run: Mapping[str, Any]) -> dict[str, Any]:
    """The first alarm of the monitor, and its lead."""
    steps = run["raised"][RELEASED]
    return {"warned": steps[0] if steps else None, "lead": lead(run, steps) if run["wrong"] is not None else None}


# ---- what the page shows of an alarm ----


def share_text(count: int, total: int, ends: Sequence[float]) -> str:
    return f"{count} of {total} ({ends[0]:.2f} to {ends[1]:.2f})" if total else "-"


def lead_text(m: Mapping[str, Any]) -> str:
    return "-" if m["lead"] is None else f"{m['lead']:g} ({m['lead_interval'][0]:g} to {m['lead_interval'][1]:g})"


def alarms_table(rows: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """A row for each alarm, or for each group of runs."""
    headings = (
        title, "caught in time", "of them 50 steps before", "median lead, steps", "ordinary runs with an alarm",
        "alarms per 1,000 healthy steps", "forced runs that survived, with an alarm",
    )  # fmt: skip
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(_row(name, m) for name, m in rows.items())])


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


def bounds_text(bounds: Sequence[float | None]) -> str:
    return "logit {}, spread {}".format(*("none" if x is None else f"{x:g}" for x in bounds))


def bounds_row(bounds: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Other bounds of the monitor, on both halves of the kinds."""

    def counts_text(m: Mapping[str, Any]) -> str:
        return f"{m['caught']} of {m['failed']} | {m['false']} of {m['ordinary']} | {m['score']:+.2f}"

    return f"| {bounds} | {counts_text(a)} | {counts_text(b)} |"


def run_row(run: Mapping[str, Any]) -> str:
    shown = [run["wrong"], run["onset"] if run["onset"] > 1 else None, run["warned"], run["lead"]]
    end = "not finite" if run["end"] is None else f"{run['end']:.2f}"
    return f"| {run['name']} | {' | '.join('-' if x is None else str(x) for x in shown)} | {end} |"


STUDY = Study(
    "unseen runs",
    CLAIMS,
    measure,
    f"its training runs: --runs FILE of earlier ones, with --jobs N --data FOLDER to make those that it lacks from {TEXT}",
    on_runs=True,
)
PAPER = Paper(
    "early-warning",
    "The early-warning record, on unseen runs",
    "What the warnings of locater.Monitor() are worth: training runs that go wrong, and others",
    (STUDY,),
    Path(__file__).parent,
    {
        "alarms_table": alarms_table, "bounds_row": bounds_row, "bounds_text": bounds_text, "run_row": run_row, "share_text": share_text, "lead_text": lead_text,
        "GROUPS": GROUPS, "OUTSIDE": OUTSIDE, "RELEASED": RELEASED, "EARLY": EARLY, "STEPS": STEPS,
    },
    page="results/early-warning-unseen",
    kept=("early-warning-unseen.jsonl",),
    kinds={"experiment": "a b c d"},
    within={(0.0, 1.0): "a b"},
    says="Does the default warning of `Monitor()` come before a run fails, on runs that it was not chosen on?",
    beliefs={
        "a": "the default warning comes in 0.74 or more of the failures that begin in the model 10 steps before the "
        "loss shows them",
        "b": "the default warning is given in at most 0.23 of ordinary runs",
        "d1 d2 d3 d4 d5 d6 d7": "recall less false alarms of the default warning is higher than that of simple rivals",
    },
    cover="leads",
)  # fmt: skip

__all__ = ["PAPER"]
