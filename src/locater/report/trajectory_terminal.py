"""The checkpoints of runs in the terminal: what was read, what comes first, what is missing, and medians over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from locater.numerics import known_median
from locater.report.tables import number
from locater.report.terminal import empty_table, fitting
from locater.report.trajectory_words import first_faults, irregularities, overview, run_labels

COLUMNS = {
    "M": "M",
    "F": "F",
    "H": "expected_entropy",
    "Λ": "localization",
    "κ": "concentration",
    "kept": "residual_kept",
}
MOST_STEPS, MOST_RUNS = 6, 4  # steps of a run, and runs, that the tables show


def print_trajectory(document: Mapping[str, Any], console: Console) -> None:
    """Sentences, then for the first runs the medians over heads at some steps, the first and the last among them."""
    console.print(overview(document), highlight=False, markup=False)
    if words := first_faults(document):
        console.print(words, style="bold", highlight=False, markup=False)
    for sentence in irregularities(document):
        console.print(sentence, highlight=False, markup=False)
    labels = run_labels([run["name"] for run in document["runs"]])
    for run in document["runs"][:MOST_RUNS]:
        _print_medians(run, labels[run["name"]], console)


def _print_medians(run: Mapping[str, Any], label: str, console: Console) -> None:
    count = len(run["steps"])
    if not count:
        return
    shown = min(count, MOST_STEPS)
    places = sorted({round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)})
    steps = [run["steps"][at] for at in places]
    cells = {"step": [f"{x['step']:,}" if run["numbered"] else escape(x["source"][-24:]) for x in steps]}
    for heading, column in COLUMNS.items():
        if column in run["values"]:
            values = (run["values"][column][at] for at in places)
            cells[heading] = [number(known_median(x for layer in step for x in layer)) for step in values]
    cells["faults"] = [str(_faults(run, x["step"])) for x in steps]
    names = fitting(cells, ("step", "faults"), console.width)
    table = empty_table(f"{escape(label)}: medians over heads at {len(places)} of {count} checkpoints", names)
    for at in range(len(places)):
        table.add_row(*(cells[name][at] for name in names))
    console.print(table, markup=False, highlight=False)


def _faults(run: Mapping[str, Any], step: int) -> int:
    """How many heads have a fault at a step."""
    heads = {
        (x["layer"], x["head"])
        for x in run["findings"]
        if any(first <= step <= last for first, last in x["fault_spans"])
    }
    return len(heads)
