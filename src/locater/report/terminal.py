"""Tables in the terminal: heads with faults first, a line per layer of a large model, and what flags mean.

Tables show as many columns as fit, and always the flags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from locater.findings import FLAGS, Verdict
from locater.numerics import known_median
from locater.report.columns import Read, Row
from locater.report.verdict_sentences import MOST_SHOWN, amount, heads_to_show, number

GAP = 2  # spaces between columns
ALL_HEADS = 48  # up to this many heads are listed one by one
NOTES_SHOWN = 3  # reasons that are printed for one flag
NAMES_FROM = 60  # width of a terminal from which layer names are shown
Line = tuple[tuple[int, int], list[str], Collection[str], Collection[str]]  # layer and head, numbers, faults, notes


def print_heads(
    document: Mapping[str, Any],
    verdicts: Sequence[Verdict],
    columns: Mapping[str, Read],
    legend: Mapping[str, str],
    of_layer: Mapping[str, str],
    console: Console,
) -> None:
    """Every head, or of many heads those with faults and a line per layer; then what the flags mean."""
    rows: Sequence[Row] = document["heads"]
    faulty = sum(bool(verdict.faults) for verdict in verdicts)
    every = len(rows) <= ALL_HEADS
    tables = []
    lines: list[Line] = [
        ((row["layer"], row["head"]), [number(read(row)) for read in columns.values()], verdict.faults, verdict.notes)
        for row, verdict in heads_to_show(rows, verdicts, ALL_HEADS if every else min(faulty, MOST_SHOWN))
    ]
    if lines:
        title = "every head" + ", faults first" * bool(faulty)
        if not every:
            title = f"{len(lines)} of {amount(faulty, 'head')} with faults"
        tables.append(line_table(title, list(columns), lines, console.width))
    if not every:
        tables.append(_layer_table(document, verdicts, columns, of_layer, console.width))
    print_tables(tables, legend, console)
    print_meanings(rows, verdicts, console)


def line_table(title: str, names: list[str], lines: Sequence[Line], width: int) -> Table:
    """A line per head; those with a fault are coloured."""
    cells = {"layer": [str(at[0]) for at, *_ in lines], "head": [str(at[1]) for at, *_ in lines]}
    cells |= {name: [numbers[i] for _, numbers, _, _ in lines] for i, name in enumerate(names)}
    longest = max(len(word) for _, _, faults, notes in lines for word in ("flags", *faults, *notes))
    shown = fitting_columns(cells, ("layer", "head"), width - longest - GAP)
    table = empty_table(title, shown)
    table.add_column("flags", overflow="fold")
    for i, (_, _, faults, notes) in enumerate(lines):
        flags = Text(" ".join(faults)).append(" " * bool(faults and notes)).append(" ".join(notes), style="dim")
        table.add_row(*(cells[name][i] for name in shown), flags, style="yellow" if faults else None)
    return table


def _layer_table(
    document: Mapping[str, Any],
    verdicts: Sequence[Verdict],
    columns: Mapping[str, Read],
    of_layer: Mapping[str, str],
    width: int,
) -> Table:
    """Medians over the heads of each layer. `of_layer` are headings whose number is a key of the layer itself."""
    cells: dict[str, list[str]] = {name: [] for name in ("layer", "heads", *columns, "faults")}
    by_layer: dict[int, list[tuple[Row, Verdict]]] = {}
    for row, verdict in zip(document["heads"], verdicts, strict=True):
        by_layer.setdefault(row["layer"], []).append((row, verdict))
    names: list[str] = []
    for entry in document["layers"]:
        heads = by_layer.get(entry["layer"], [])
        if not heads:
            continue
        medians = {name: known_median(read(row) for row, _ in heads) for name, read in columns.items()}
        medians |= {name: entry.get(key) for name, key in of_layer.items()}
        faulty = sum(bool(verdict.faults) for _, verdict in heads)
        line = (str(entry["layer"]), str(len(heads)), *(number(medians[name]) for name in columns), str(faulty or ""))
        for column, cell in zip(cells.values(), line, strict=True):
            column.append(cell)
        names.append(escape(entry["name"]))
    return named_table(
        "medians by layer (faults: heads with a fault)", cells, ("layer", "heads", "faults"), names, width
    )


def named_table(title: str, cells: dict[str, list[str]], always: Sequence[str], names: list[str], width: int) -> Table:
    """A line per layer, with its name if there is room."""
    room = min(24, max((len(name) for name in names), default=0)) + GAP if width >= NAMES_FROM else 0
    shown = fitting_columns(cells, always, width - room)
    table = empty_table(title, shown)
    if room:
        table.add_column("name", overflow="fold")
    for i, name in enumerate(names):
        table.add_row(*(cells[heading][i] for heading in shown), *([name] if room else []))
    return table


def fitting_columns(cells: Mapping[str, Sequence[str]], always: Collection[str], width: int) -> list[str]:
    """The columns that fit, in their order: those in `always`, then others from the left while there is room."""
    wide = {name: max(len(text) for text in (name, *column)) + GAP for name, column in cells.items()}
    left = width + GAP - sum(wide[name] for name in always)
    shown = {*always}
    for name in cells:
        if name not in always and wide[name] <= left:
            left -= wide[name]
            shown.add(name)
    return [name for name in cells if name in shown]


def empty_table(title: str, names: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_tables(tables: Sequence[Table], legend: Mapping[str, str], console: Console) -> None:
    """Tables, and the meaning of their headings."""
    for table in tables:
        console.print(table)
    headings = {column.header for table in tables for column in table.columns}
    if words := [f"{name} {meaning}" for name, meaning in legend.items() if name in headings]:
        console.print(f"[dim]{' · '.join(words)}[/dim]", highlight=False)


def print_meanings(rows: Sequence[Row], verdicts: Sequence[Verdict], console: Console) -> None:
    """What each fault means and what to do, once each; then notes, dim, with the reason why they are no faults."""
    for flag in FLAGS:
        count = sum(flag.name in verdict.faults for verdict in verdicts)
        if count:
            heads = amount(count, "head")
            console.print(
                f"[bold yellow]{flag.name}[/bold yellow] ({heads}): {flag.meaning}. {flag.way_out}.", highlight=False
            )
    for flag in FLAGS:
        by_reason: dict[str, list[str]] = {}
        for row, verdict in zip(rows, verdicts, strict=True):
            if flag.name in verdict.notes:
                by_reason.setdefault(verdict.notes[flag.name], []).append(f"{row['layer']}.{row['head']}")
        for reason, where in list(by_reason.items())[:NOTES_SHOWN]:
            text = f"{flag.meaning}. {reason}" if reason == flag.way_out else reason
            heads = where[0] if len(where) == 1 else amount(len(where), "head")
            console.print(f"[dim]note: {flag.name} ({heads}): {escape(text)}.[/dim]", highlight=False)
        if more := sum(len(where) for where in list(by_reason.values())[NOTES_SHOWN:]):
            console.print(f"[dim]note: {flag.name}: {amount(more, 'more such head')}.[/dim]", highlight=False)
