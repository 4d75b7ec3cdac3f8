"""A scan, a comparison or a probe as tables in the terminal.

Heads with faults come first; a large model gets a line per layer. Tables show as many columns as fit, and
always the flags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from locater.findings import FLAGS, Verdict
from locater.numerics import known_median
from locater.report.change_words import changes_sentences
from locater.report.probe_columns import KINDS
from locater.report.probe_words import agreement_sentence, collapse, data_sentence
from locater.report.scan_columns import Read
from locater.report.tables import (
    MOST_SHOWN,
    NO_ROLES,
    PROBE,
    SCAN,
    chosen,
    collapse_risk,
    counted,
    directions,
    moved,
    noted,
    number,
    origin,
    predicted_from,
    read_sentence,
    roles_sentence,
    summary,
)

if TYPE_CHECKING:
    from locater.results.comparison import Comparison
    from locater.results.probe import Probe
    from locater.results.scan import Scan

GAP = 2  # spaces between columns
ALL_HEADS = 48  # up to this many heads are listed one by one
NOTES_SHOWN = 3  # reasons that are printed for one flag
NAMES_FROM = 60  # width of a terminal from which layer names are shown
LEGEND = {
    "M": "mean self-logit",
    "√F": "spread of logits",
    "H": "expected entropy in nats",
    "Λ": "localization by position",
    "κ": "concentration of the spectrum",
    "S/F": "1 symmetric, -1 antisymmetric",
    "key bias": "spread of the key-only term",
    "kept": "share of the tokens' differences that attention alone keeps",
    "stable rank": "how many directions carry the map",
}
PROBE_LEGEND = {
    "H": "entropy in nats",
    "first": "weight on the first token",
    "max logit": "largest score before the softmax",
    "pred. H": "predicted from statistics of the input",
    "prior H": "from weights alone",
    "distance": "in tokens",
    "top": "weight of the strongest token",
    "Λ": "localization by position",
    "pred. first": "predicted weight on the first token",
}
RESIDUAL_LEGEND = (
    "before, after: share of the stream that differs between tokens, around the block (0 is rank collapse) · "
    "keep: share of it that a typical row of attention passes on; the skip connection passes on all of it"
)
RESIDUAL_COLUMNS = {  # heading: key of a layer
    "before": "residual_before",
    "after": "residual_after",
    "heads keep": "typical_kept",
    "pred. keep": "predicted_typical_kept",
    "prior keep": "prior_typical_kept",
}
Line = tuple[tuple[int, int], list[str], Collection[str], Collection[str]]  # layer and head, numbers, faults, notes


def print_scan(scan: Scan, console: Console) -> None:
    """The verdict, the table, what the flags mean, and what was assumed."""
    verdict = summary(scan.rows, scan.verdicts, predicted_from(scan.assumptions))
    console.print(f"[bold]{verdict}[/bold] {noted(scan.rows, scan.verdicts)}", highlight=False)
    legend = {**LEGEND, "H": "log T - v/2, the old formula"} if scan.old else LEGEND
    _print_heads(scan, SCAN, legend, {"kept": "residual_kept"}, console)
    if risk := collapse_risk(scan.layers, scan.assumptions["length"]):
        console.print(escape(risk), highlight=False)
    if used := directions(scan.rows):
        console.print(escape(used), highlight=False)
    a = scan.assumptions
    console.print(escape(" ".join(filter(None, (origin(a), read_sentence(a))))), highlight=False)
    for note in (f"for {a['length']} {a['tokens']}; weights {a['weights']}", *a["notes"], NO_ROLES):
        console.print(f"[dim]- {escape(note)}[/dim]", highlight=False)


def print_probe(probe: Probe, console: Console) -> None:
    """What heads do and which have faults, the tables, how well predictions agree, and the kinds of numbers."""
    rows, verdicts = probe.rows, probe.verdicts
    console.print(escape(data_sentence(probe)), highlight=False)
    console.print(f"[bold]{summary(rows, verdicts)}[/bold]", highlight=False)
    for sentence in filter(None, (roles_sentence(probe.roles), noted(rows, verdicts), collapse(probe))):
        console.print(escape(sentence), highlight=False)
    _print_heads(probe, PROBE, PROBE_LEGEND, {}, console)
    _print_residuals(probe, console)
    console.print(escape(agreement_sentence(probe)), highlight=False)
    for kind, meaning in KINDS.items():
        columns = [name for name, how in probe.assumptions["how"].items() if how == kind]
        if columns:
            console.print(f"[bold]{kind}[/bold] ({meaning}): [dim]{', '.join(columns)}[/dim]", highlight=False)
    for note in probe.assumptions["notes"]:
        console.print(f"[dim]- {escape(note)}[/dim]", highlight=False)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """What changed most in words, medians of both, then the heads that changed most."""
    a, b = comparison.a, comparison.b
    if comparison.aligned:
        console.print(f"[bold]{moved(a.verdicts, b.verdicts)}[/bold]", highlight=False)
    for sentence in changes_sentences(comparison):
        console.print(escape(sentence), highlight=False)
    for letter, scan in (("A", a), ("B", b)):
        if scan.about_old:
            console.print(f"[dim]- {letter}: {escape(scan.about_old)}[/dim]", highlight=False)
    columns: dict[str, Read] = {
        **SCAN,
        "stable rank": lambda row: row.stable_rank,
        "effective rank": lambda row: row.effective_rank,
    }
    table = empty_table("medians over heads", ("", "A", "B"))
    for name, read in columns.items():
        table.add_row(name, *(number(known_median(read(row) for row in scan.rows)) for scan in (a, b)))
    console.print(table)
    if not comparison.aligned:
        console.print("Their shapes differ, so heads are not subtracted.", highlight=False)
        return
    if comparison.equal:
        return
    lines = _change_lines(comparison)[:MOST_SHOWN]
    _print_tables([_line_table("heads that changed most (B - A)", list(SCAN), lines, console.width)], LEGEND, console)


def _change_lines(comparison: Comparison) -> list[Line]:
    """A line per head with its differences and the flags it gained (+) or lost (-), the largest change first."""
    a, b = comparison.a, comparison.b
    lines: dict[tuple[int, int], Line] = {}
    for change, row_a, row_b, before, after in zip(
        comparison.rows, a.rows, b.rows, a.verdicts, b.verdicts, strict=True
    ):
        faults, notes = (
            [f"+{x}" for x in change.gained if x in gained] + [f"-{x}" for x in change.lost if x in lost]
            for gained, lost in ((after.faults, before.faults), (after.notes, before.notes))
        )
        differences = [_signed(_minus(read(row_b), read(row_a))) for read in SCAN.values()]
        lines[change.layer, change.head] = ((change.layer, change.head), differences, faults, notes)
    broken = [(x.layer, x.head) for x in comparison.rows if "nonfinite" in (*x.gained, *x.lost)]  # no number to compare
    order = dict.fromkeys([*broken, *((x.layer, x.head) for x in comparison.head_changes()), *lines])
    return [lines[head] for head in order]


def _print_heads(
    result: Scan | Probe,
    columns: Mapping[str, Read],
    legend: Mapping[str, str],
    of_layer: Mapping[str, str],
    console: Console,
) -> None:
    """Every head, or, of many, those with faults and a line per layer; then what the flags mean."""
    rows: Sequence[Any] = result.rows
    faulty = sum(bool(verdict.faults) for verdict in result.verdicts)
    every = len(rows) <= ALL_HEADS
    tables = []
    lines: list[Line] = [
        ((row.layer, row.head), [number(read(row)) for read in columns.values()], verdict.faults, verdict.notes)
        for row, verdict in chosen(rows, result.verdicts, ALL_HEADS if every else min(faulty, MOST_SHOWN))
    ]
    if lines:
        title = "every head" + ", faults first" * bool(faulty)
        if not every:
            title = f"{len(lines)} of {faulty} heads to look at"
        tables.append(_line_table(title, list(columns), lines, console.width))
    if not every:
        tables.append(_layer_table(result, columns, of_layer, console.width))
    _print_tables(tables, legend, console)
    _print_meanings(rows, result.verdicts, console)


def _line_table(title: str, names: list[str], lines: Sequence[Line], width: int) -> Table:
    """A line per head; those with a fault are coloured."""
    cells = {"layer": [str(at[0]) for at, *_ in lines], "head": [str(at[1]) for at, *_ in lines]}
    cells |= {name: [numbers[i] for _, numbers, _, _ in lines] for i, name in enumerate(names)}
    longest = max(len(word) for _, _, faults, notes in lines for word in ("flags", *faults, *notes))
    shown = fitting(cells, ("layer", "head"), width - longest - GAP)
    table = empty_table(title, shown)
    table.add_column("flags", overflow="fold")
    for i, (_, _, faults, notes) in enumerate(lines):
        flags = Text(" ".join(faults)).append(" " * bool(faults and notes)).append(" ".join(notes), style="dim")
        table.add_row(*(cells[name][i] for name in shown), flags, style="yellow" if faults else None)
    return table


def _layer_table(result: Scan | Probe, columns: Mapping[str, Read], of_layer: Mapping[str, str], width: int) -> Table:
    """Medians over the heads of each layer. `of_layer` are headings whose number is a key of the layer itself."""
    cells: dict[str, list[str]] = {name: [] for name in ("layer", "heads", *columns, "look")}
    pairs: list[tuple[Any, Verdict]] = list(zip(result.rows, result.verdicts, strict=True))
    names: list[str] = []
    for entry in result.layers:
        heads = [(row, verdict) for row, verdict in pairs if row.layer == entry["layer"]]
        if not heads:
            continue
        medians = {name: known_median(read(row) for row, _ in heads) for name, read in columns.items()}
        medians |= {name: entry.get(key) for name, key in of_layer.items()}
        faulty = sum(bool(verdict.faults) for _, verdict in heads)
        line = (str(entry["layer"]), str(len(heads)), *(number(medians[name]) for name in columns), str(faulty or ""))
        for column, cell in zip(cells.values(), line, strict=True):
            column.append(cell)
        names.append(escape(entry["name"]))
    return _with_names("medians by layer (look: heads to look at)", cells, ("layer", "heads", "look"), names, width)


def _print_residuals(probe: Probe, console: Console) -> None:
    """How much tokens differ before and after each layer's block, and how much of it the layer's heads keep."""
    cells = {"layer": [str(entry["layer"]) for entry in probe.layers]}
    cells |= {name: [number(entry.get(key)) for entry in probe.layers] for name, key in RESIDUAL_COLUMNS.items()}
    names = [escape(entry["name"]) for entry in probe.layers]
    console.print(_with_names("differences between tokens, by layer", cells, ("layer",), names, console.width))
    console.print(f"[dim]{RESIDUAL_LEGEND}[/dim]", highlight=False)


def _with_names(title: str, cells: dict[str, list[str]], always: Sequence[str], names: list[str], width: int) -> Table:
    """A line per layer, with its name where there is room."""
    room = min(24, max((len(name) for name in names), default=0)) + GAP if width >= NAMES_FROM else 0
    shown = fitting(cells, always, width - room)
    table = empty_table(title, shown)
    if room:
        table.add_column("name", overflow="fold")
    for i, name in enumerate(names):
        table.add_row(*(cells[heading][i] for heading in shown), *([name] if room else []))
    return table


def fitting(cells: Mapping[str, Sequence[str]], always: Collection[str], width: int) -> list[str]:
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


def _print_tables(tables: Sequence[Table], legend: Mapping[str, str], console: Console) -> None:
    """Tables, and the meaning of their headings."""
    for table in tables:
        console.print(table)
    headings = {column.header for table in tables for column in table.columns}
    if words := [f"{name} {meaning}" for name, meaning in legend.items() if name in headings]:
        console.print(f"[dim]{' · '.join(words)}[/dim]", highlight=False)


def _print_meanings(rows: Sequence[Any], verdicts: Sequence[Verdict], console: Console) -> None:
    """What each fault means and what to do, once each; then notes, dim, with the reason why they are no faults."""
    for flag in FLAGS:
        count = sum(flag.name in verdict.faults for verdict in verdicts)
        if count:
            heads = counted(count, "head")
            console.print(
                f"[bold yellow]{flag.name}[/bold yellow] ({heads}): {flag.meaning}. {flag.way_out}.", highlight=False
            )
    for flag in FLAGS:
        by_reason: dict[str, list[str]] = {}
        for row, verdict in zip(rows, verdicts, strict=True):
            if flag.name in verdict.notes:
                by_reason.setdefault(verdict.notes[flag.name], []).append(f"{row.layer}.{row.head}")
        for reason, where in list(by_reason.items())[:NOTES_SHOWN]:
            text = f"{flag.meaning}. {reason}" if reason == flag.way_out else reason
            heads = where[0] if len(where) == 1 else counted(len(where), "head")
            console.print(f"[dim]note: {flag.name} ({heads}): {escape(text)}.[/dim]", highlight=False)
        if more := sum(len(where) for where in list(by_reason.values())[NOTES_SHOWN:]):
            console.print(f"[dim]note: {flag.name}: {counted(more, 'more such head')}.[/dim]", highlight=False)


def _minus(b: float | None, a: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _signed(x: float | None) -> str:
    return number(x) if x is None or round(x, 2) <= 0 else "+" + number(x)
