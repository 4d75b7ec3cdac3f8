"""The plan of studies j to n as tables: new runs, their steps, and GPU seconds.

`next_table` is that of the amended plan, written after the first sitting and before further runs. The table of the
first plan is kept on its page as it was: it has doses of j that were cut later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locater_lab.engine.runs import Row, Runs, expected_rows
from locater_lab.papers.bao2024 import arms, entropy_or_mean, measured_logits, paper_experiment

ROWS: dict[str, Callable[[Runs], Sequence[Row]]] = {
    "j": paper_experiment.experiment_rows,
    "k": measured_logits.measured_rows,
    "l": entropy_or_mean.cause_rows,
    "m": measured_logits.once_rows,
    "n": paper_experiment.long_experiment_rows,
}
QUESTIONS = {
    "j": "the paper's own experiment: a sweep over doses, then ten seeds of three arms",
    "k": "LocAteR on what acts: hot rates, ordinary rates, other settings",
    "l": "cause or company: entropy and mean moved apart",
    "m": "text that is seen once",
    "n": "the paper's own experiment, four times as long",
}
STEP_SECONDS = {"j": 0.04 / 3, "n": 0.04 / 3}  # seconds of a whole GPU, from 42 s for a run of j; the others as below
OTHER_STEP_SECONDS, RUN_SECONDS = 0.003, 2.0
FIRST_SITTING = "7b66e820eb8f"  # the commit that its runs name


def earlier_lines(runs: Runs) -> dict[str, dict[str, Any]]:
    """Lines of the runs that were there when the plan was written: those of claims c to i."""
    return {key: line for key, line in runs.lines.items() if line["claim"] in arms.ORDER}


def new_rows_by_letter(known: Mapping[str, dict[str, Any]]) -> dict[str, list[Row]]:
    """By letter, the runs that neither the file nor an earlier letter has."""
    seen, rows = set(known), {}
    for letter, of in ROWS.items():
        # the longer runs wait for the sweep of j
        every = expected_rows(
            (lambda runs: [*paper_experiment.experiment_rows(runs), *paper_experiment.long_experiment_rows(runs)])
            if letter == "n"
            else of,
            dict(known),
        )
        rows[letter] = [row for row in every if row.key not in seen]
        seen |= {row.key for row in every}
    return rows


def first_sitting_lines(runs: Runs) -> dict[str, dict[str, Any]]:
    """Lines of the runs of j to l that the first sitting made."""
    return {key: line for key, line in runs.lines.items() if line.get("commit") == FIRST_SITTING}


NEXT_ORDER = ("j", "k", "m", "n")  # of the next sitting; l is whole


def next_table(runs: Runs) -> list[str]:
    """By letter: the runs that the first sitting made and that are still asked for, and those that it left."""
    before, made = earlier_lines(runs), first_sitting_lines(runs)
    rows = new_rows_by_letter({**before, **made})
    lines = ["| claim | question | made | to run | steps | seconds |", "|---|---|---|---|---|---|"]
    for letter in NEXT_ORDER:
        steps = sum(row.plan.steps for row in rows[letter])
        seconds = STEP_SECONDS.get(letter, OTHER_STEP_SECONDS) * steps + RUN_SECONDS * len(rows[letter])
        done = sum(line["claim"] == letter for line in made.values())
        lines.append(f"| {letter} | {QUESTIONS[letter]} | {done} | {len(rows[letter])} | {steps:,} | {seconds:.0f} |")
    return lines
