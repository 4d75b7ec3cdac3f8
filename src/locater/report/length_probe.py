"""Lengths of context: the verdict and a line per length in the terminal, the page, a notebook display."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from locater.markup import display, heat_map, table
from locater.report.pages import prose, short_name, wide
from locater.report.terminal import empty_table
from locater.report.verdict_sentences import amount

Document = Mapping[str, Any]
HEADINGS = ("tokens", "loss", "change", "95 % interval", "entropy", "ratio", "first", "reach")
LEGEND = (
    "change: of the loss, from the shorter length with the lowest · medians over heads: entropy in nats, ratio (over "
    "the log of the keys in sight), first (weight on the first token), reach (distance in tokens)"
)
MAPS = ("sink", "entropy_ratio", "reach")
NAMES = {"sink": "weight on the first token", "entropy_ratio": "entropy ratio", "reach": "reach in tokens"}


def verdict(document: Document) -> str:
    """Where attention falls apart; or from where on more context is of no use, or that all of it is."""
    rows = document["lengths"]
    apart = next((row for row in rows if row["apart"]), None)
    if apart is not None:
        if apart["loss"] is None:
            return f"Attention falls apart at {apart['length']:,} tokens: the loss is not a number there."
        return (
            f"Attention falls apart at {apart['length']:,} tokens: the loss of the same tokens is {_change(apart)} "
            f"nats higher than with {best_before(rows, apart)['length']:,}."
        )
    risen = [row for row in rows[1:] if row["low"] is not None and row["low"] > 0]
    if risen:
        return (
            f"Attention holds up to {rows[-1]['length']:,} tokens, but the loss rises a little: {_change(risen[0])} "
            f"nats at {risen[0]['length']:,}."
        )
    return f"Attention holds up to {rows[-1]['length']:,} tokens: at no length does the loss rise for certain."


def use_sentence(document: Document) -> str:
    """From which length on more context does not lower the loss."""
    rows = document["lengths"]
    useful = [row for row in rows[1:] if row["high"] is not None and row["high"] < 0]
    if any(row["low"] is None for row in rows[1:]):
        return ""
    if not useful:
        return f"With more than {rows[0]['length']:,} tokens the loss is not lower for certain."
    if useful[-1] is rows[-1]:
        return f"Up to {rows[-1]['length']:,} tokens more context lowers the loss."
    return f"With more than {useful[-1]['length']:,} tokens the loss is not lower for certain."


def why(document: Document) -> list[str]:
    given, judged = document["assumptions"], document["assumptions"]["judged"]
    data = f" of {given['data']}" if given["data"] else ""
    said = [
        f"Judged by the last {judged} tokens of {amount(given['sequences'], 'sequence')}{data}, the same for every "
        f"length. Apart: the loss has risen by more than {given['threshold']:g} nats for certain.",
        use_sentence(document),
    ]
    if document["changed"]:
        heads = ", ".join(f"{row['layer']}.{row['head']}" for row in document["changed"])
        first = document["changed"][0]
        said.append(
            f"Heads that change most: {heads}. {first['layer']}.{first['head']} gives the first token "
            f"{_number(first['sink'][1])} of its weight (before: {_number(first['sink'][0])}), and its entropy ratio "
            f"is {_number(first['entropy_ratio'][1])} (before: {_number(first['entropy_ratio'][0])})."
        )
    return [*filter(None, said), positions_sentence(document)]


def positions_sentence(document: Document) -> str:
    """What the configuration says of positions."""
    stated = document["rotary"]
    count = f"{stated['positions']:,} positions" if stated["positions"] else "no number of positions"
    if not stated["rotary"]:
        return f"The configuration states {count}, and none that are rotary."
    settings = ", ".join(f"{name} {_setting(value)}" for name, value in stated["scaling"].items())
    return f"The configuration states {count}; rotary: {settings or 'no scaling'}."


def next_sentence(document: Document) -> str:
    rows = document["lengths"]
    apart = next((row for row in rows if row["apart"]), None)
    if apart is None:
        return ""
    good = max(row["length"] for row in rows if row["length"] < apart["length"])
    return (
        f"Next: serve up to {good:,} tokens; try lengths between {good:,} and {apart['length']:,} for the limit; "
        "compare the rotary settings above with those that the model was trained with."
    )


def best_before(rows: Sequence[Document], row: Document) -> Document:
    """The shorter length with the lowest loss."""
    shorter = [other for other in rows if other["length"] < row["length"] and other["loss"] is not None]
    return min(shorter, key=lambda other: float(other["loss"]))


def print_lengths(document: Document, console: Console) -> None:
    console.print(f"[bold]{escape(verdict(document))}[/bold]", highlight=False)
    for sentence in why(document):
        console.print(escape(sentence), highlight=False)
    grid = empty_table("by length of context", HEADINGS)
    for row in document["lengths"]:
        grid.add_row(*map(escape, _cells(row)), style="yellow" if row["apart"] else None)
    console.print(grid)
    console.print(f"[dim]{escape(LEGEND)}[/dim]", highlight=False)
    if said := next_sentence(document):
        console.print(escape(said), highlight=False)
    for note in document["assumptions"]["notes"]:
        console.print(f"[dim]Note: {escape(note)}.[/dim]", highlight=False)


def lengths_page(document: Document) -> str:
    """The page: the verdict, a line per length, and maps of heads at each length on one scale."""
    title = f"{short_name(document['source'])}: lengths of context"
    parts = [f"<p><strong>{html.escape(verdict(document))}</strong></p>"]
    parts += [f"<p>{html.escape(text)}</p>" for text in (*why(document), next_sentence(document)) if text]
    lines = [_cells(row) for row in document["lengths"]]
    parts += [wide(table(HEADINGS, lines)), f"<p>{html.escape(LEGEND)}</p>"]
    for column in MAPS:
        parts.append(f"<h2>{html.escape(NAMES[column].capitalize())}</h2>")
        most = max((row[column] or 0.0 for row in document["heads"]), default=1.0)
        for row in document["lengths"]:
            parts.append(wide(_map(document, column, row["length"], most)))
    parts += [f"<p>Note: {html.escape(note)}.</p>" for note in document["assumptions"]["notes"]]
    return prose(title, parts, ": measured while the model ran.")


def lengths_in_notebook(document: Document) -> str:
    listed = table(HEADINGS, [_cells(row) for row in document["lengths"]])
    return display(f"Lengths of {short_name(document['source'])}", [verdict(document), *why(document)], listed)


def _map(document: Document, column: str, length: int, most: float) -> str:
    rows = [row for row in document["heads"] if row["length"] == length]
    layers = sorted({row["layer"] for row in rows})
    grid = [[row[column] for row in rows if row["layer"] == layer] for layer in layers]
    return heat_map(grid, f"{NAMES[column]}, {length:,} tokens", names=[str(layer) for layer in layers], least=most)


def _cells(row: Document) -> list[str]:
    interval = "-" if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}"
    rise = "-" if row["rise"] is None else f"{row['rise']:+.3f}"
    numbers = [_number(row[name]) for name in ("entropy", "entropy_ratio", "sink")]
    reach = "-" if row["reach"] is None else f"{row['reach']:.0f}"
    return [f"{row['length']:,}", _number(row["loss"], 3), rise, interval, *numbers, reach]


def _change(row: Document) -> str:
    if row["low"] is None:
        return f"{row['rise']:.2f}"
    return f"{row['rise']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _number(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def _setting(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {_setting(part)}" for name, part in value.items()) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)
