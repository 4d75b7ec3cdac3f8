"""A scan, a comparison or a probe as tables in the terminal: flagged heads first, a line per layer when there are many heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from locater.compare import Comparison, known_median
from locater.findings import FLAGS
from locater.probe import Probe, ProbeRow
from locater.report.html import collapse_risk
from locater.report.probe import KINDS, agreed, collapse, ran
from locater.result import HeadRow, Scan

ALL_HEADS = 48  # up to this many heads are shown one by one
MOST_FLAGGED = 20
LONGEST_FLAG = max(len(flag.name) for flag in FLAGS)
LEGEND = (
    "M mean self-logit · √F spread of logits · S/F 1 symmetric, -1 antisymmetric · κ concentration · Λ localization by "
    "position · key bias spread of the key-only term · H expected entropy in nats"
)
PROBE_COLUMNS = {  # heading: column
    "H": "entropy", "pred. H": "predicted_entropy", "prior H": "prior_entropy", "first": "sink", "pred. first": "predicted_sink",
    "top": "max_probability", "distance": "distance", "max logit": "max_logit", "Λ": "localization",
}  # fmt: skip
PROBE_LEGEND = (
    "H entropy in nats · first weight on the first token · top weight of the strongest token · distance in tokens · Λ localization by "
    "position · pred. predicted from statistics of the input · prior from weights alone"
)
KEPT_LEGEND = "kept share of the tokens' differences that attention alone keeps"
ROOMY = 100  # columns of a terminal that has room for what is kept
RESIDUAL_LEGEND = (
    "before, after: share of the stream that differs between tokens, around the block (0 is rank collapse) · keep: share of it that a "
    "typical row of attention hands on; the skip passes the stream on as it is"
)
RESIDUAL_COLUMNS = {  # heading: key of a layer
    "before": "residual_before", "after": "residual_after", "heads keep": "typical_kept", "pred. keep": "predicted_typical_kept",
    "prior keep": "prior_typical_kept",
}  # fmt: skip
Row = TypeVar("Row", HeadRow, ProbeRow)


def print_scan(scan: Scan, console: Console) -> None:
    """Table, what the flags mean, and what was assumed."""
    _print_heads(scan.rows, _head_table, lambda: _layer_table(scan, console.width), console)
    legend = f"{LEGEND} · {KEPT_LEGEND}" if console.width >= ROOMY else LEGEND
    console.print(f"[dim]{legend}[/dim]", highlight=False)
    if risk := collapse_risk(scan):
        console.print(risk, highlight=False)
    _print_assumptions(scan, console)


def print_probe(found: Probe, console: Console) -> None:
    """How well predictions agree, the table, what the flags mean, and what kind of number each column is."""
    console.print(f"{escape(ran(found))}\n[bold]{agreed(found)}[/bold]", highlight=False)
    if said := collapse(found):
        console.print(escape(said), highlight=False)
    _print_heads(found.rows, _probe_table, lambda: _probe_layers(found), console)
    console.print(f"[dim]{PROBE_LEGEND}[/dim]", highlight=False)
    console.print(_residual_table(found))
    console.print(f"[dim]{RESIDUAL_LEGEND}[/dim]", highlight=False)
    for kind, meaning in KINDS.items():
        columns = [name for name, how in found.assumptions["how"].items() if how == kind]
        if columns:
            console.print(f"[bold]{kind}[/bold] ({meaning}): [dim]{', '.join(columns)}[/dim]", highlight=False)
    for note in found.assumptions["notes"]:
        console.print(f"[dim]- {escape(note)}[/dim]", highlight=False)


def _print_heads(
    rows: Sequence[Row], table: Callable[[Sequence[Row], str, int], Table], by_layer: Callable[[], Table], console: Console
) -> None:
    """Every head, flagged first, or, of many, the flagged ones and a line per layer; then what the flags mean."""
    flagged: list[Row] = [row for row in rows if row.flags]
    if len(rows) <= ALL_HEADS:
        rest: list[Row] = [row for row in rows if not row.flags]
        console.print(table(flagged + rest, "every head, flagged first", console.width))
    else:
        if flagged:
            shown = _worst(flagged)
            console.print(table(shown, f"{len(shown)} of {len(flagged)} flagged heads", console.width))
        console.print(by_layer())
    print_meanings(flagged, console)


def _probe_table(rows: Sequence[ProbeRow], title: str, width: int) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", show_lines=False, box=None, pad_edge=False)
    narrow = {"pred. first", "top", "distance", "Λ"} if width < 100 else set()  # flags matter more than these
    narrow |= {"pred. H", "prior H", "max logit"} if width < 72 else set()
    names = [name for name in PROBE_COLUMNS if name not in narrow]
    for name in ("layer", "head", *names):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("flags", min_width=LONGEST_FLAG)
    for row in rows:
        numbers = (_number(row[PROBE_COLUMNS[name]]) for name in names)
        table.add_row(str(row.layer), str(row.head), *numbers, escape(" ".join(row.flags)), style="yellow" if row.flags else None)
    return table


def _probe_layers(found: Probe) -> Table:
    table = Table(title="medians by layer", title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("layer", "heads", *PROBE_COLUMNS, "flagged"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("name", overflow="fold")
    for entry in found.layers:
        rows = [row for row in found.rows if row.layer == entry["layer"]]
        cells = [_number(known_median([row[column] for row in rows])) for column in PROBE_COLUMNS.values()]
        flagged = sum(bool(row.flags) for row in rows)
        if rows:
            table.add_row(str(entry["layer"]), str(len(rows)), *cells, str(flagged or ""), escape(entry["name"]))
    return table


def _residual_table(found: Probe) -> Table:
    """The residual of the stream around each layer, and what the layer's heads keep."""
    table = Table(title="differences between tokens, by layer", title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("layer", *RESIDUAL_COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("name", overflow="fold")
    for entry in found.layers:
        table.add_row(str(entry["layer"]), *(_number(entry.get(key)) for key in RESIDUAL_COLUMNS.values()), escape(entry["name"]))
    return table


def print_comparison(found: Comparison, console: Console) -> None:
    """Medians of both, then the heads that changed most."""
    table = Table(title="medians over heads", title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("", "A", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, (a, b) in found.medians().items():
        table.add_row(name, _number(a), _number(b))
    console.print(table)
    if not found.aligned:
        console.print("Their shapes differ, so heads are not subtracted.", highlight=False)
        return
    changes = Table(title="heads that changed most (B - A)", title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("layer", "head", "M", "√F", "κ", "Λ", "H"):
        changes.add_column(name, justify="right", no_wrap=True)
    changes.add_column("flags")
    spread = {(r.layer, r.head): _root(y.F) - _root(x.F) for r, x, y in zip(found.rows, found.a.rows, found.b.rows, strict=True)}
    for row in sorted(found.rows, key=lambda r: -abs(r.difference["localization"] or 0) - abs(spread[r.layer, r.head]))[:MOST_FLAGGED]:
        d = row.difference
        numbers = (d["M"], spread[row.layer, row.head], d["concentration"], d["localization"], d["expected_entropy"])
        flags = " ".join([*(f"+{f}" for f in row.gained), *(f"-{f}" for f in row.lost)])
        changes.add_row(str(row.layer), str(row.head), *(_signed(x) for x in numbers), flags)
    console.print(changes)
    gained, lost = (sum(bool(getattr(r, which)) for r in found.rows) for which in ("gained", "lost"))
    console.print(f"{gained} heads gained a flag, {lost} lost one.", highlight=False)


def print_meanings(rows: Iterable[HeadRow] | Iterable[ProbeRow], console: Console) -> None:
    """What each raised flag means and what to do, once each, with how many heads raise it."""
    counts = _flag_counts(rows)
    for flag in FLAGS:
        if flag.name in counts:
            heads = "1 head" if counts[flag.name] == 1 else f"{counts[flag.name]} heads"
            console.print(f"[bold]{flag.name}[/bold] ({heads}): {flag.meaning}. [dim]{flag.way_out}.[/dim]", highlight=False)


def _worst(flagged: Sequence[Row]) -> list[Row]:
    """One flag's heads should not hide another's: rarest flags first, as many as fit, then in model order."""
    counts = _flag_counts(flagged)
    chosen = sorted(flagged, key=lambda row: min(counts[name] for name in row.flags))[:MOST_FLAGGED]
    return sorted(chosen, key=lambda row: (row.layer, row.head))


def _head_table(rows: Sequence[HeadRow], title: str, width: int) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", show_lines=False, box=None, pad_edge=False)
    names = ("layer", "head", "M", "√F", "S/F", "κ", "Λ", "key bias", "H", "kept")
    narrow = {"kept"} if width < ROOMY else set()  # flags matter more than these
    narrow |= {"S/F", "key bias", "κ"} if width < 78 else set()
    narrow |= {"M", "√F"} if width < 56 else set()
    for name in names:
        if name not in narrow:
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("flags", min_width=LONGEST_FLAG)
    for row in rows:
        ratio = row.S / row.F if row.S is not None and row.F else None
        numbers = (
            row.M, None if row.F is None else row.F**0.5, ratio, row.concentration, row.localization, row.key_bias, row.expected_entropy,
            row.residual_kept,
        )  # fmt: skip
        cells = dict(zip(names, [str(row.layer), str(row.head), *(_number(x) for x in numbers)], strict=True))
        shown = [cell for name, cell in cells.items() if name not in narrow]
        table.add_row(*shown, escape(" ".join(row.flags)), style="yellow" if row.flags else None)
    return table


def _layer_table(scan: Scan, width: int) -> Table:
    table = Table(title="medians by layer", title_justify="left", header_style="bold", box=None, pad_edge=False)
    kept = ("kept",) if width >= ROOMY else ()
    for name in ("layer", "heads", "M", "√F", "κ", "Λ", "H", *kept, "flagged"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("name", overflow="fold")
    for entry in scan.layers:
        rows = [row for row in scan.rows if row.layer == entry["layer"]]
        columns = (
            [r.M for r in rows], [None if r.F is None else r.F**0.5 for r in rows], [r.concentration for r in rows],
            [r.localization for r in rows], [r.expected_entropy for r in rows],
        )  # fmt: skip
        flagged = sum(bool(r.flags) for r in rows)
        cells = [_number(known_median(column)) for column in columns] + [_number(entry.get("residual_kept")) for _ in kept]
        table.add_row(str(entry["layer"]), str(len(rows)), *cells, str(flagged or ""), escape(entry["name"]))
    return table


def _print_assumptions(scan: Scan, console: Console) -> None:
    a = scan.assumptions
    what = "Priors, not measurements: from weights alone" if a["prediction"] == "prior" else "Predictions, not measurements"
    console.print(f"{what}, for {a['length']} {a['tokens']}; weights {a['weights']}.", highlight=False)
    for note in a["notes"]:
        console.print(f"[dim]- {note}[/dim]", highlight=False)


def _flag_counts(rows: Iterable[HeadRow] | Iterable[ProbeRow]) -> Counter[str]:
    return Counter(name for row in rows for name in row.flags)


def _root(x: float | None) -> float:
    return 0.0 if x is None else x**0.5


def _signed(x: float | None) -> str:
    return _number(x) if x is None or round(x, 2) <= 0 else "+" + _number(x)


def _number(x: float | None) -> str:
    if x is None:
        return "-"
    return f"{round(x, 2) + 0.0:.2f}" if abs(x) < 100 else f"{x:.3g}"  # + 0.0: no minus sign on zero
