"""A diagnosis in the terminal, as a page and in a notebook: Verdict, Why, Next, Read."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from locater.markup import display, heat_map, table
from locater.report.pages import prose, short_name, wide
from locater.report.verdict_sentences import amount

Document = Mapping[str, Any]
SHOWN = 8  # findings that the terminal lists
ADVICE = 2  # lines of advice
CELLS = 60  # kinds of tensors in a map


def verdict_of(diagnosis: Document) -> str:
    """One sentence: broken, changed, or neither.

    >>> fault = {"severity": "fault", "cause": "zero", "where": "h.0", "words": "is all zero", "next": ""}
    >>> verdict_of({"findings": [fault], "base": None, "adapter": None})
    'broken: 1 fault (zero)'
    """
    of = {kind: [x for x in diagnosis["findings"] if x["severity"] == kind] for kind in ("fault", "change", "note")}
    if of["fault"]:
        causes = ", ".join(dict.fromkeys(x["cause"] for x in of["fault"]))
        return f"broken: {amount(len(of['fault']), 'fault')} ({causes})"
    against = "the adapter" if diagnosis["adapter"] else "BASE"
    causes_of_notes = {x["cause"] for x in of["note"]}
    if diagnosis["base"] is None:
        return "no fault found in the file alone"
    if of["change"]:
        causes = ", ".join(dict.fromkeys(x["cause"] for x in of["change"]))
        return f"changed from {against if not diagnosis['adapter'] else 'BASE'}, no fault found ({causes})"
    for cause, words in (
        ("identical", "identical to BASE"),
        ("equivalent", "equivalent to BASE: stored otherwise, computes the same"),
        ("dtype", "equal to BASE but for rounding"),
    ):
        if cause in causes_of_notes:
            return words
    return "no fault found"


def ranked(findings: Sequence[Document]) -> list[Document]:
    """Faults, then changes, then notes."""
    order = {"fault": 0, "change": 1, "note": 2}
    return sorted(findings, key=lambda x: order[x["severity"]])


def advice(diagnosis: Document) -> list[str]:
    """What to do, each once, the worst first."""
    lines = [x["next"] for x in ranked(diagnosis["findings"]) if x["severity"] != "note" and x["next"]]
    if not lines:
        lines = [*diagnosis["needs"][:1]]
    return list(dict.fromkeys(lines))


def read_words(read: Document) -> str:
    """How much was read.

    >>> read_words({"tensors": 290, "of": 290, "bytes": 269_060_552, "seconds": 3.12})
    '290 of 290 tensors, 269 MB, 3.1 s; nothing was run'
    """
    if not read:
        return "nothing: the files could not be opened; nothing was run"
    size = read["bytes"] / 1e6
    shown = f"{size:,.0f} MB" if size >= 10 else f"{size:.1f} MB"
    run = f"run on {read['text']['tokens']:,} tokens" if read.get("text") else "nothing was run"
    return f"{read['tensors']:,} of {read['of']:,} tensors, {shown}, {read['seconds']:.1f} s; {run}"


def print_diagnosis(diagnosis: Document, console: Console) -> None:
    """One screen."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    style = "bold red" if diagnosis["broken"] else "bold"
    grid.add_row("Verdict", f"[{style}]{escape(diagnosis['verdict'])}[/{style}]")
    findings = ranked(diagnosis["findings"])
    important = [x for x in findings if x["severity"] != "note"] or findings
    for number, item in enumerate(important[:SHOWN]):
        grid.add_row("Why" if not number else "", f"[bold]{escape(item['where'])}[/bold]  {escape(item['words'])}")
    if len(important) > SHOWN:
        grid.add_row("", f"and {amount(len(important) - SHOWN, 'more finding')} (--json has all)")
    for item in [x for x in findings if x["severity"] == "note"][:3] if len(important) < len(findings) else ():
        grid.add_row("", f"[dim]{escape(item['where'])}  {escape(item['words'])}[/dim]")
    for number, line in enumerate(advice(diagnosis)[:ADVICE]):
        grid.add_row("Next" if not number else "", escape(line))
    grid.add_row("Read", escape(read_words(diagnosis["read"])))
    console.print(grid, highlight=False)


def diagnosis_page(diagnosis: Document) -> str:
    """The page: verdict, findings, layers by kinds of tensors, heads."""
    title = short_name(diagnosis["source"])
    against = f" against {short_name(diagnosis['base'])}" if diagnosis["base"] else ""
    parts = [f"<p><strong>{html.escape(_sentence(diagnosis['verdict']))}</strong></p>"]
    lines = [
        [x["severity"], x["cause"], x["where"], x["words"], _evidence(x["evidence"]), x["next"]]
        for x in ranked(diagnosis["findings"])
    ]
    headings = ["", "cause", "where", "what", "evidence", "next"]
    parts += ["<h2>Findings</h2>", wide(table(headings, lines, left=headings))] if lines else []
    parts += [f"<p>{html.escape(_sentence(line))}</p>" for line in diagnosis["needs"]]
    parts += _tensor_maps(diagnosis)
    parts += _head_maps(diagnosis)
    parts.append(f"<p>Read: {html.escape(read_words(diagnosis['read']))}.</p>")
    return prose(f"{title}{against}", parts, " from weights alone.")


def _tensor_maps(diagnosis: Document) -> list[str]:
    parts: list[str] = []
    stacks = list(dict.fromkeys(x["stack"] for x in diagnosis["tensors"] if x["layer"] is not None))
    for stack in stacks:
        rows = [x for x in diagnosis["tensors"] if x["stack"] == stack and x["layer"] is not None]
        kinds = list(dict.fromkeys(x["kind"] for x in rows))
        layers = sorted({x["layer"] for x in rows})
        by_place = {(x["kind"], x["layer"]): x for x in rows}
        parts.append(f"<h2>{html.escape(stack or 'Layers')}: layers by kinds of tensors</h2>")
        if len(kinds) > CELLS:
            parts.append(f"<p>The first {CELLS} of {len(kinds):,} kinds.</p>")
            kinds = kinds[:CELLS]
        columns = "difference" if diagnosis["base"] else "rms"
        grid = [[_cell(by_place.get((kind, layer)), columns, rows) for layer in layers] for kind in kinds]
        label = (
            "difference from BASE, as a share of its norm"
            if columns == "difference"
            else "size beside that of the same kind in other layers (log2; empty: missing or not finite)"
        )
        drawing = heat_map(
            grid, label, rows="tensor", columns="layer", names=kinds, least=1e-3 if diagnosis["base"] else 1.0
        )
        parts.append(wide(drawing))
    return parts


def _cell(row: Document | None, column: str, rows: Sequence[Document]) -> float | None:
    if row is None:
        return None
    if column == "difference":
        value: float | None = row.get("difference")
        return value
    if not row["finite"] or not row["rms"]:
        return None
    same = sorted(x["rms"] for x in rows if x["kind"] == row["kind"] and x["rms"])
    return math.log2(row["rms"] / same[len(same) // 2])


def _head_maps(diagnosis: Document) -> list[str]:
    heads = diagnosis["heads"]
    if not heads:
        return []
    parts = ["<h2>Heads</h2>"]
    columns = {
        "logits_difference": "difference of its logits from BASE, as a share of their norm",
        "output_difference": "difference of what it writes from BASE, as a share of its norm",
        "written": "what a head writes: norm of output times value, over the median of its layer (log2)",
        "spread": "spread of its logits on unit tokens",
    }
    for column, label in columns.items():
        if not any(row.get(column) is not None for row in heads):
            continue
        layers = sorted({row["layer"] for row in heads})
        grid = []
        for layer in layers:
            own = [row.get(column) for row in heads if row["layer"] == layer]
            if column == "written":
                known = sorted(x for x in own if x)
                middle = known[len(known) // 2] if known else 1.0
                own = [None if not x else math.log2(x / middle) for x in own]
            grid.append(own)
        parts.append(wide(heat_map(grid, label, names=[str(x) for x in layers])))
    return parts


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _evidence(evidence: Mapping[str, Any]) -> str:
    """Numbers of a finding, without lists of names."""
    return ", ".join(f"{name} {value}" for name, value in evidence.items() if isinstance(value, int | float | str))


def diagnosis_in_notebook(diagnosis: Document) -> str:
    """The verdict and a table of findings."""
    lines = [[x["severity"], x["cause"], x["where"], x["words"]] for x in ranked(diagnosis["findings"])[:20]]
    headings = ["", "cause", "where", "what"]
    listed = table(headings, lines, left=headings) if lines else ""
    sentences = (_sentence(diagnosis["verdict"]), *(_sentence(x) for x in advice(diagnosis)[:ADVICE]))
    return display(
        f"Diagnosis of {short_name(diagnosis['source'])}",
        [*sentences, f"Read: {read_words(diagnosis['read'])}."],
        listed,
    )
