"""Does acting on the heads that a warning names save a run? docs/results/rescue-plan.md was written before any run.

`base_runs.py` trains runs on a ladder of rates and keeps states of them, `branches.py` forks a state and changes one thing,
`queue.py` makes the lines of both, which needs a GPU. Here the lines are judged: `judging.py` for what the arms did,
`signals.py` for what other signals see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater_lab.engine.claims import Claim
from locater_lab.engine.reproduction import Paper, Results, Setting, Study
from locater_lab.engine.runs import KEPT
from locater_lab.studies.early_warning import share_text
from locater_lab.studies.rescue.base_runs import Size, planned_runs
from locater_lab.studies.rescue.branches import ARMS
from locater_lab.studies.rescue.judging import (
    MARGIN,
    arm_rows,
    diverged,
    judge_trial,
    ladder,
    saved_by_fate,
    sensitivity,
    states_of,
)
from locater_lab.studies.rescue.signals import CHOSEN_ON, JUDGED_ON, normed_rows, rival_rows
from locater_lab.train.sweep import read_lines

EARLIER = (
    "early-warning-unseen.jsonl"  # runs that there were before: of kinds with norms on queries and keys among others
)
COST = 0.02
SAVED, CAUGHT = "share of states saved, difference", "share of rises caught in time, difference"


def _claim(name: str, says: str, quantity: str, stated: float, most: bool = False) -> Claim:
    return Claim(name, says, quantity, "at most" if most else "at least", stated, by="ours")


CLAIMS = (
    _claim("r1", "Scaling the named heads saves alarmed runs", SAVED, 0.0),
    _claim("r2", "It saves more than scaling as many others", SAVED, 0.0),
    _claim("r3", f"The layer saves no more than the named heads by {MARGIN}", SAVED, MARGIN, most=True),
    _claim("r4", f"Half the rate saves no more than the named heads by {MARGIN}", SAVED, MARGIN, most=True),
    _claim("r5", f"Where the run lives, it costs {COST} nats at most", "change of loss, nats", COST, most=True),
    _claim("r6", "At 2 to 10 times the rate an alarmed state diverges more often than a quiet one", "difference of shares", 0.0),
    _claim("r7", "At equal false alarms the released rule catches more rises than the largest logit", CAUGHT, 0.0),
    _claim("r8", "And more than the spectral entropy", CAUGHT, 0.0),
)  # fmt: skip


def measure(setting: Setting) -> Results:
    """Judge the lines that there are. `queue.py` makes them."""
    if setting.jobs:
        raise LocaterError("rescue: its runs need a GPU and are made by python -m locater_lab.studies.rescue.queue")
    if setting.runs is None:
        return Results({}, {"normed earlier": normed_rows(earlier_lines(KEPT / EARLIER))} if KEPT.is_dir() else {})
    lines = [line for path in (*setting.more_runs, setting.runs) for line in read_lines(path)]
    return results_of([x for x in lines if "arm" not in x], [x for x in lines if "arm" in x])


def earlier_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of the earlier record that failed by something else than bad data, or did not; they have no rivals."""
    return [{"rivals": [], **line} for line in read_lines(path) if line["run"]["cause"] != "bad data"]


def results_of(base: Sequence[dict[str, Any]], branches: Sequence[dict[str, Any]]) -> Results:
    """A measurement for each claim, and what the page shows."""
    states = states_of(base, branches)
    alarmed = [s for s in states if s["sort"] == "alarmed"]
    tables: dict[str, Any] = {
        "made": {"base": len(base), "planned": len(planned_runs(Size())), "branches": len(branches)},
        "machines": sorted({f"{x['device']}, torch {x['torch']}, commit {x['commit']}" for x in base}),
        "states": {
            sort: [len(of), sum(diverged(s, "nothing") for s in of)]
            for sort in ("alarmed", "quiet")
            for of in [[s for s in states if s["sort"] == sort]]
        },
        "kinds": Counter(f"{s['kind']}, {s['sort']}" for s in states),
        "arms": {sort: arm_rows([s for s in states if s["sort"] == sort]) for sort in ("alarmed", "quiet")},
        "saved": saved_by_fate(states),
        "ladder": ladder(base),
        "sensitivity": sensitivity(base, states),
        "rivals": rival_rows(base),
        "normed": normed_rows(base),
        "normed earlier": normed_rows(earlier_lines(KEPT / EARLIER)),
        "too little": len(alarmed),
    }
    return Results(judge_trial(base, branches), tables)


# ---- what the page shows ----


def interval_text(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"


def number(x: float | None, form: str = "g") -> str:
    return "-" if x is None else format(x, form)


STUDY = Study(
    "the rescue trial",
    CLAIMS,
    measure,
    "its lines, which a GPU makes: python -m locater_lab.studies.rescue.queue",
    on_runs=True,
)
PAPER = Paper(
    "rescue",
    "Does acting on the named heads save a run?",
    "Runs that are forked at the first warning: one thing is changed in each branch",
    (STUDY,),
    Path(__file__).parent,
    {"share_text": share_text, "interval_text": interval_text, "number": number, "ARMS": ARMS, "CHOSEN_ON": CHOSEN_ON, "JUDGED_ON": JUDGED_ON},
    page="results/rescue",
    kept=("rescue-runs.jsonl", "rescue-branches.jsonl"),
    kinds={"experiment": "r"},
    within={(-1.0, 1.0): "r1 r2 r3 r4 r6 r7 r8"},
    says="Does acting on the heads that a warning names save a run?",
    beliefs={
        "r1 r2": "scaling the named heads saves alarmed runs, and more than scaling as many others",
        "r6": "an alarmed state diverges more often than a quiet one",
    },
)  # fmt: skip

__all__ = ["PAPER"]
