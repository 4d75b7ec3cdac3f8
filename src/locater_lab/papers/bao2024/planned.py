"""The plan of studies j to n as tables: new runs, their steps, and GPU seconds.

`next_table` is that of the amended plan, written after the first sitting and before further runs. The table of the first
plan is kept on its page as it was: it has doses of j that were cut later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locater_lab.engine.runs import Row, Runs, expected_rows
from locater_lab.papers.bao2024 import acting, arms, cause, own

ROWS: dict[str, Callable[[Runs], Sequence[Row]]] = {
    "j": own.rows_of,
    "k": acting.rows_of,
    "l": cause.rows_of,
    "m": acting.once_rows_of,
    "n": own.long_rows_of,
}
QUESTIONS = {
    "j": "the paper's own experiment: a sweep over doses, then ten seeds of three arms",
    "k": "LocAteR on what acts: hot rates, ordinary rates, other settings",
    "l": "cause or company: entropy and mean moved apart",
    "m": "text that is seen once",
    "n": "the paper's own experiment, four times as long",
}
STEP = {"j": 0.04 / 3, "n": 0.04 / 3}  # seconds of a whole GPU, from 42 s for a run of j; the others as below
OTHER_STEP, RUN = 0.003, 2.0
FIRST_SITTING = "7b66e820eb8f"  # the commit that its runs name


def earlier(runs: Runs) -> dict[str, dict[str, Any]]:
    """Lines of the runs that were there when the plan was written: those of claims c to i."""
    return {key: line for key, line in runs.lines.items() if line["claim"] in arms.ORDER}


def new_rows(known: Mapping[str, dict[str, Any]]) -> dict[str, list[Row]]:
    """By letter, the runs that neither the file nor an earlier letter has."""
    seen, rows = set(known), {}
    for letter, of in ROWS.items():
        # the longer runs wait for the sweep of j
        every = expected_rows(
            (lambda runs: [*own.rows_of(runs), *own.long_rows_of(runs)]) if letter == "n" else of, dict(known)
        )
        rows[letter] = [row for row in every if row.key not in seen]
        seen |= {row.key for row in every}
    return rows


def first_sitting(runs: Runs) -> dict[str, dict[str, Any]]:
    """Lines of the runs of j to l that the first sitting made."""
    return {key: line for key, line in runs.lines.items() if line.get("commit") == FIRST_SITTING}


ORDER = ("j", "k", "m", "n")  # of the next sitting; l is whole


def next_table(runs: Runs) -> list[str]:
    """By letter: the runs that the first sitting made and that are still asked for, and those that it left."""
    before, made = earlier(runs), first_sitting(runs)
    rows = new_rows({**before, **made})
    lines = ["| claim | question | made | to run | steps | seconds |", "|---|---|---|---|---|---|"]
    for letter in ORDER:
        steps = sum(row.plan.steps for row in rows[letter])
        seconds = STEP.get(letter, OTHER_STEP) * steps + RUN * len(rows[letter])
        done = sum(line["claim"] == letter for line in made.values())
        lines.append(f"| {letter} | {QUESTIONS[letter]} | {done} | {len(rows[letter])} | {steps:,} | {seconds:.0f} |")
    return lines
