"""An ablation: tables in the terminal, its page with a map and sorted bars, and a notebook display."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from locater.markup import HIGH, LOW, display, heat_map, table
from locater.report.pages import prose, short_name, wide
from locater.report.plots import HeadMap
from locater.report.terminal import empty_table
from locater.report.verdict_sentences import amount

Document = Mapping[str, Any]
LISTED = 12  # removals in a table of the terminal, at each end
BARS = 40  # on the page, at each end
MEANINGS = {
    "zero": "the output of the head is zero",
    "mean": "the output of the head is its mean over the tokens of the batch",
    "uniform": "the weights of the head are even over the keys that it sees",
    "window": "the head sees the last keys and the first ones alone",
    "bits": "the keys of the head are rounded",
}


def ranked(document: Document) -> list[Any]:
    """Removals, the largest change first; those without a number last."""
    known = [row for row in document["removals"] if row["change"] is not None]
    lost = [row for row in document["removals"] if row["change"] is None]
    return sorted(known, key=lambda row: -row["change"]) + lost


def is_clear(row: Document) -> bool:
    """Whether the interval of a change leaves out zero."""
    return row["low"] is not None and (row["low"] > 0 or row["high"] < 0)


def label(document: Document) -> str:
    return "change of the loss (nats)" if document["measure"] == "loss" else "cosine distance of the output"


def data_sentence(document: Document) -> str:
    """What was removed, and what it was judged on."""
    given = document["assumptions"]
    data = f" of {given['data']}" if given["data"] else ""
    what = (
        f"The loss with every head is {document['loss']:.4f} nats"
        if document["loss"] is not None
        else "The model has no loss on these inputs: outputs are compared by their cosine distance"
    )
    length = f" of {given['length']} tokens" if given["length"] > 1 else ""
    return (
        f"{amount(len(document['removals']), 'removal')} ({given['how']}: {MEANINGS[given['mode']]}), on "
        f"{amount(given['sequences'], 'sequence')}{length}{data}. {what}."
    )


def summary(document: Document) -> str:
    """How many removals hurt, help, or cannot be told from nothing."""
    rows = document["removals"]
    if document["measure"] != "loss" or not any(row["low"] is not None for row in rows):
        worst = ranked(document)[0]
        return f"The largest change is {_number(worst['change'])}, of {worst['name']}."
    worse = sum(is_clear(row) and row["low"] > 0 for row in rows)
    better = sum(is_clear(row) and row["high"] < 0 for row in rows)
    rest = len(rows) - worse - better
    return (
        f"The loss is higher without {worse} of {len(rows)}, lower without {better}; of {rest} the interval has zero "
        "in it (95 % over sequences, each removal by itself)."
    )


def cost_sentence(document: Document) -> str:
    """What a removal costs beside a pass."""
    cost = document["cost"]
    if not cost["share_of_blocks"]:
        return ""
    return (
        f"A removal took {cost['share_of_blocks']:.2f} of the time of the blocks in a pass "
        f"({cost['removal_blocks']:.3g} of {cost['pass_blocks']:.3g} s), and {cost['removal_rest']:.3g} s for "
        "embeddings and output layer."
    )


def map_of_changes(document: Document) -> HeadMap:
    """The change of every head that was removed alone."""
    known = {tuple(row["heads"][0]): row["change"] for row in document["removals"] if len(row["heads"]) == 1}
    values = {
        (layer["layer"], head): known.get((layer["layer"], head))
        for layer in document["layers"]
        if any(at == layer["layer"] for at, _ in known)
        for head in range(layer["heads"])
    }
    return HeadMap(short_name(document["source"]), label(document), 0.0, document["measure"] == "loss", values)


def print_ablation(document: Document, console: Console) -> None:
    """Sentences, the removals at both ends, and the cost."""
    console.print(escape(data_sentence(document)), highlight=False)
    console.print(f"[bold]{escape(summary(document))}[/bold]", highlight=False)
    rows = ranked(document)
    shown = rows if len(rows) <= 2 * LISTED else [*rows[:LISTED], *rows[-LISTED:]]
    title = "every removal" if shown is rows else f"the {LISTED} largest changes and the {LISTED} smallest"
    grid = empty_table(f"{title}: {label(document)}", ["removed", "change", "95 % interval"])
    for at, row in enumerate(shown):
        if shown is not rows and at == LISTED:
            grid.add_row("...", "", "")
        style = None if is_clear(row) else "dim"
        grid.add_row(escape(_short(row["name"])), _number(row["change"]), _interval(row), style=style)
    console.print(grid)
    for line in (cost_sentence(document), *(f"Note: {note}." for note in document["assumptions"]["notes"])):
        if line:
            console.print(f"[dim]{escape(line)}[/dim]", highlight=False)


def ablation_page(document: Document) -> str:
    """The page: a map of heads, bars from the largest change to the smallest, and every number."""
    title = f"{short_name(document['source'])}: heads removed"
    rows = ranked(document)
    shown = rows if len(rows) <= 2 * BARS else [*rows[:BARS], *rows[-BARS:]]
    sentences = (data_sentence(document), summary(document), cost_sentence(document))
    parts = [f"<p>{html.escape(text)}</p>" for text in sentences if text]
    heads = map_of_changes(document)
    if heads.values:
        parts.append("<h2>Heads by layers</h2>")
        parts.append(wide(heat_map(heads.grid, heads.label, names=heads.layers, diverging=heads.diverging)))
    some = "" if shown is rows else f" The {BARS} largest and the {BARS} smallest."
    parts.append(
        f"<h2>From the largest change to the smallest</h2><p>Lines are 95 % intervals over sequences.{some}</p>"
    )
    parts.append(wide(bars(shown, label(document))))
    headings = ["removed", "change", "95 % interval", "sequences"]
    lines = [[row["name"], _number(row["change"]), _interval(row), str(row["sequences"])] for row in rows]
    parts += ["<h2>Every number</h2>", wide(table(headings, lines, left=["removed"]))]
    parts += [f"<p>Note: {html.escape(note)}.</p>" for note in document["assumptions"]["notes"]]
    return prose(title, parts, ": measured while the model ran.")


def ablation_in_notebook(document: Document) -> str:
    heads = map_of_changes(document)
    drawn = heat_map(heads.grid, heads.label, names=heads.layers, diverging=heads.diverging) if heads.values else ""
    lines = [[_short(row["name"]), _number(row["change"]), _interval(row)] for row in ranked(document)[:LISTED]]
    listed = table(["removed", "change", "95 % interval"], lines, left=["removed"])
    sentences = [data_sentence(document), summary(document)]
    return display(f"Ablation of {short_name(document['source'])}", sentences, drawn, listed)


# ---- bars

LEFT, RIGHT, ROW = 110.0, 560.0, 14.0  # of the bars, in pixels


def bars(rows: Sequence[Any], words: str) -> str:
    """A bar and an interval for each removal, as SVG."""
    known = [row for row in rows if row["change"] is not None]
    ends = [x for row in known for x in (row["change"], row["low"], row["high"], 0.0) if x is not None] or [0.0, 1.0]
    low, high = min(ends), max(ends)
    width = (high - low) or 1.0

    def place(x: float) -> float:
        return LEFT + (x - low) / width * (RIGHT - LEFT)

    parts = []
    for at, row in enumerate(known):
        top, zero, end = 4 + at * ROW, place(0.0), place(row["change"])
        colour = HIGH if row["change"] >= 0 else LOW
        name = html.escape(_short(row["name"]))
        parts.append(
            f'<text x="{LEFT - 6:.0f}" y="{top + 9:.1f}" text-anchor="end">{name}</text>'
            f'<rect x="{min(zero, end):.1f}" y="{top + 1:.1f}" width="{abs(end - zero):.1f}" height="{ROW - 4:.0f}" '
            f'fill="{colour}" fill-opacity="{0.9 if is_clear(row) else 0.35}"><title>{name}: {_number(row["change"])} '
            f"({_interval(row)})</title></rect>"
        )
        if row["low"] is not None:
            middle = top + ROW / 2 - 1
            path = f"M{place(row['low']):.1f} {middle:.1f}H{place(row['high']):.1f}"
            parts.append(f'<path d="{path}" stroke="currentColor" stroke-opacity=".6"/>')
    bottom = 4 + len(known) * ROW
    axis = f'<path d="M{place(0.0):.1f} 0V{bottom:.0f}" stroke="currentColor" stroke-opacity=".5"/>'
    anchors = [(low, "start"), (high, "end")]
    numbers = "".join(
        f'<text x="{place(x):.1f}" y="{bottom + 12:.0f}" text-anchor="{anchor}">{x:.2g}</text>' for x, anchor in anchors
    )
    size = f'width="{RIGHT + 10:.0f}" height="{bottom + 20:.0f}" viewBox="0 0 {RIGHT + 10:.0f} {bottom + 20:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(words)}" '
        'style="max-width:100%;height:auto" font-size="11" font-family="sans-serif" fill="currentColor">'
        f"{axis}{''.join(parts)}{numbers}</svg>"
    )


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:15]}..."


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:+.4f}" if abs(x) >= 1e-4 or x == 0 else f"{x:+.1e}"


def _interval(row: Document) -> str:
    return "-" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"
