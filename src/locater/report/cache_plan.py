"""A cache plan: the lists of key heads in the terminal, its page, and a notebook display."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape

from locater.markup import display, heat_map, table
from locater.report.pages import prose, short_name, wide
from locater.report.plots import HeadMap
from locater.report.terminal import empty_table
from locater.report.verdict_sentences import amount

Document = Mapping[str, Any]
LISTED = 12  # key heads of each list in a table of the terminal
HEADINGS = ("head", "beyond", "predicted", "alone", "95 % interval")
LEGEND = (
    "head: layer.key head · beyond: share of its attention that the window leaves out · predicted: what the window "
    "costs to first order, in nats · alone: measured, with this head's window and no other"
)


def candidates(document: Document) -> list[Any]:
    return [row for row in document["key_heads"] if not row["bounded"]]


def setting(document: Document) -> str:
    given = document["assumptions"]
    return f"the last {given['window']} keys and the first {given['sinks']}"


def verdict(document: Document) -> str:
    """How many key heads can do with the window, and at what loss."""
    rows, judged = candidates(document), document["judged"]
    if judged is None:
        return (
            f"No list of key heads was shown to cost at most {document['budget']:g} nats with {setting(document)}: "
            "all of them keep the whole cache."
        )
    return (
        f"{judged['heads']} of {amount(len(rows), 'key head')} can do with {setting(document)}: all at once they cost "
        f"{change(judged)} nats, on text that the choice was not made on. {len(rows) - judged['heads']} keep the whole "
        "cache."
    )


def why(document: Document) -> list[str]:
    """What stands behind the verdict, a sentence each."""
    judged, given = document["judged"], document["assumptions"]
    twice = ", of which the first half stands twice and the second copy counts" if given["copies"] else ""
    said = [
        f"Chosen on {amount(given['sequences']['choose'], 'sequence')} and judged on "
        f"{given['sequences']['judge']} others of {given['length']} tokens{_data(given)}{twice}. The loss with the "
        f"whole cache is {document['loss']:.4f} nats; the interval may end {document['budget']:g} above it."
    ]
    if judged is not None:
        said.append(
            f"The sum of their single effects ({judged['sum_of']}) is {judged['sum']:+.4f}: heads that stand in for "
            "each other are seen only all at once."
        )
        failed = [row for row in document["tried"] if row["text"] == "judge" and not row["holds"]]
        said += [f"A list of {row['heads']} was longer and did not hold: {change(row)}." for row in failed]
    said += other_sentence(document)
    return said


def other_sentence(document: Document) -> list[str]:
    """What the list costs where what is asked for is far back; or, if it was judged by that, on the text as it is."""
    other = document["other"]
    if other is None:
        return []
    if document["assumptions"]["copies"]:
        return [f"On the text as it is, the loss is {other['loss']:.3f} nats, and {change(other)} more with this list."]
    over = other["high"] is not None and other["high"] > document["budget"]
    warning = " More than the budget: if answers are copied from far back, choose with --copies." if over else ""
    return [
        f"Where each text stands twice, the second copy costs {other['loss']:.3f} nats, and {change(other)} more with "
        f"this list.{warning}"
    ]


def sink_sentences(document: Document) -> list[str]:
    """Which tokens are sinks, what is massive, and what that does to keys of few bits."""
    said, layers = [], document["sinks"]
    with_sinks = [row for row in layers if row["first_heads"] * 2 >= row["heads"]]
    if layers:
        heads, every = sum(row["first_heads"] for row in layers), sum(row["heads"] for row in layers)
        where = f", in layers {spans([row['layer'] for row in with_sinks])} half of them or more" if with_sinks else ""
        said.append(
            f"Sinks: {heads} of {amount(every, 'head')} give the first token more than 0.3 of their weight{where}."
        )
        others = sum(row["other_heads"] for row in layers)
        names = list(dict.fromkeys(token for row in layers for token in row["other_tokens"]))[:4]
        if others:
            said.append(f"Other tokens are sinks of {amount(others, 'head')}: {', '.join(names)}.")
    said.append(massive_sentence(document["massive"]))
    return [*said, *key_sentences(document)]


def massive_sentence(blocks: Sequence[Document]) -> str:
    massive = [row for row in blocks if row["massive"]]
    if not massive:
        known = [row for row in blocks if row["ratio"] is not None]
        if not known:
            return "Massive activations: not seen, since the stream between blocks is not known."
        most = max(known, key=lambda row: row["ratio"])
        return (
            f"No massive activations: the largest entry of the stream is {most['ratio']:.0f} times the median, after "
            f"block {most['block']}."
        )
    most = max(massive, key=lambda row: row["ratio"] or 0.0)
    places = sorted({place for row in massive for place in row["places"]})
    return (
        f"Massive activations after blocks {spans([row['block'] for row in massive])}: up to {most['top']:.0f}, "
        f"{most['ratio']:.0f} times the median, in channel {', '.join(map(str, most['channels'][:2]))} at token "
        f"{', '.join(map(str, places[:4]))} ({', '.join(most['tokens'][:2])})."
    )


def key_sentences(document: Document) -> list[str]:
    """What the first tokens do to keys of few bits."""
    keys, sinks = document["keys"], document["assumptions"]["sinks"]
    if keys["finer"] is None or not sinks:
        return []
    text = (
        f"Keys of few bits: without the first {sinks} tokens the range of a channel is {keys['finer']:.2f} times "
        f"smaller (median of layers; {keys['finest']:.2f} at most), and so are the steps that it is rounded to."
    )
    rounded, apart = keys.get("rounded"), keys.get("first_apart")
    if rounded is None or apart is None:
        return [text]
    gain = rounded["change"] - apart["change"]
    advice = f"Keep the first {sinks} as they are." if gain > document["budget"] else "There is little to gain here."
    return [
        f"{text} All keys at {keys['bits']} bits cost {change(rounded)} nats, with the first {sinks} left as they are "
        f"{change(apart)}. {advice}"
    ]


def next_sentence(document: Document) -> str:
    if document["judged"] is None:
        return "Next: a longer --window, or a larger --loss."
    return (
        "Next: --out FOLDER writes the list as DuoAttention and kvpress read it. What is judged is the loss on this "
        "text: give text of the length and kind that you serve."
    )


def spans(numbers: Sequence[int]) -> str:
    """Runs of whole numbers.

    >>> spans([3, 4, 5, 9])
    '3 to 5, 9'
    """
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def change(row: Document) -> str:
    """`+0.0120 (+0.0080 to +0.0160)`."""
    if row["low"] is None:
        return _number(row["change"])
    return f"{_number(row['change'])} ({_number(row['low'])} to {_number(row['high'])})"


def by_layer(rows: Sequence[Document]) -> str:
    """`0: 1 2; 3: 0`: key heads by layer."""
    layers: dict[int, list[str]] = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(str(row["kv_head"]))
    return "; ".join(f"{layer}: {' '.join(heads)}" for layer, heads in layers.items()) or "none"


def ranked(document: Document) -> list[Any]:
    """Candidates, those that the window costs most first."""
    return sorted(candidates(document), key=lambda row: -_cost(row))


def map_of_plan(document: Document) -> HeadMap:
    """What each key head costs with the window alone."""
    measured = document["assumptions"]["measured"]
    values = {(row["layer"], row["kv_head"]): None if row["bounded"] else _cost(row) for row in document["key_heads"]}
    label = (
        "change of the loss with the window alone (nats), by key head" if measured else "predicted change, by key head"
    )
    return HeadMap(short_name(document["source"]), label, 0.0, True, values)


def print_plan(document: Document, console: Console) -> None:
    """The verdict, both lists, the heads at both ends, and sinks."""
    console.print(f"[bold]{escape(verdict(document))}[/bold]", highlight=False)
    for sentence in why(document):
        console.print(escape(sentence), highlight=False)
    rows = candidates(document)
    for title, windowed in (("keep the whole cache", False), ("a window is enough", True)):
        some = [row for row in rows if row["windowed"] is windowed]
        console.print(f"[bold]{title}[/bold] (layer: key heads): {by_layer(some)}", highlight=False)
    order = ranked(document)
    shown = order if len(order) <= 2 * LISTED else [*order[:LISTED], *order[-LISTED:]]
    measured = document["assumptions"]["measured"]
    headings = [name for name in (*HEADINGS, "list") if measured or name not in ("alone", "95 % interval")]
    grid = empty_table("key heads, from the most to the least that the window costs", headings)
    for at, row in enumerate(shown):
        if shown is not order and at == LISTED:
            grid.add_row("...", *[""] * (len(headings) - 1))
        cells = _cells(row, measured)
        grid.add_row(*map(escape, cells), style="dim" if row["windowed"] else None)
    console.print(grid)
    console.print(f"[dim]{escape(LEGEND)}[/dim]", highlight=False)
    for sentence in (*sink_sentences(document), next_sentence(document)):
        console.print(escape(sentence), highlight=False)
    for note in document["assumptions"]["notes"]:
        console.print(f"[dim]Note: {escape(note)}.[/dim]", highlight=False)


def plan_page(document: Document) -> str:
    """The page: the verdict, a map of key heads, every list that was tried, sinks, and every number."""
    title = f"{short_name(document['source'])}: which key heads need the whole cache"
    measured = document["assumptions"]["measured"]
    parts = [f"<p><strong>{html.escape(verdict(document))}</strong></p>"]
    parts += [f"<p>{html.escape(text)}</p>" for text in (*why(document), next_sentence(document))]
    rows = candidates(document)
    for name, windowed in (("Keep the whole cache", False), ("A window is enough", True)):
        some = [row for row in rows if row["windowed"] is windowed]
        parts.append(f"<p>{name} (layer: key heads): {html.escape(by_layer(some))}</p>")
    drawn = map_of_plan(document)
    parts += ["<h2>Key heads by layers</h2>", wide(_map_html(drawn))]
    lines = [
        [_text(row["text"]), str(row["heads"]), change(row), "yes" if row["holds"] else "no"]
        for row in document["tried"]
    ]
    parts += [
        "<h2>Lists that were tried</h2>",
        wide(table(["text", "heads", "change of the loss", "holds"], lines, ["text"])),
    ]
    parts += ["<h2>Sinks, massive activations, keys</h2>"]
    parts += [f"<p>{html.escape(text)}</p>" for text in sink_sentences(document)]
    names = [
        "layer",
        "heads with the first token as a sink",
        "its weight",
        "other sinks",
        "key steps without the first",
    ]
    lines = [
        [
            str(row["layer"]),
            f"{row['first_heads']} of {row['heads']}",
            _share(row["first_weight"]),
            ", ".join(row["other_tokens"]) if row["other_heads"] else "",
            "-" if row["key_step"] is None else f"{row['key_step']:.2f}",
        ]
        for row in document["sinks"]
    ]
    parts.append(wide(table(names, lines, ["other sinks"])))
    headings = [name for name in (*HEADINGS, "list") if measured or name not in ("alone", "95 % interval")]
    lines = [_cells(row, measured) for row in ranked(document)]
    parts += [
        "<h2>Every key head</h2>",
        f"<p>{html.escape(LEGEND)}</p>",
        wide(table(headings, lines, ["head", "list"])),
    ]
    parts += [f"<p>Note: {html.escape(note)}.</p>" for note in document["assumptions"]["notes"]]
    return prose(title, parts, ": measured while the model ran.")


def plan_in_notebook(document: Document) -> str:
    measured = document["assumptions"]["measured"]
    headings = [name for name in (*HEADINGS, "list") if measured or name not in ("alone", "95 % interval")]
    listed = table(headings, [_cells(row, measured) for row in ranked(document)[:LISTED]], ["head", "list"])
    sentences = [verdict(document), *why(document), *sink_sentences(document)]
    return display(f"Cache of {short_name(document['source'])}", sentences, _map_html(map_of_plan(document)), listed)


def _map_html(drawn: HeadMap) -> str:
    return heat_map(drawn.grid, drawn.label, names=drawn.layers, columns="key head", diverging=drawn.diverging)


def _cells(row: Document, measured: bool) -> list[str]:
    interval = "-" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"
    own = [_number(row["change"]), interval] if measured else []
    name = f"{row['layer']}.{row['kv_head']}"
    return [name, _share(row["beyond"]), _number(row["predicted"]), *own, "window" if row["windowed"] else "whole"]


def _cost(row: Document) -> float:
    known = row["change"] if row["change"] is not None else row["predicted"]
    return 0.0 if known is None else float(known)


def _text(name: str) -> str:
    return {"choose": "of the choice", "judge": "other text"}[name]


def _data(given: Document) -> str:
    return f" of {given['data']}" if given["data"] else ""


def _share(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:+.4f}" if abs(x) >= 1e-4 or x == 0 else f"{x:+.1e}"
