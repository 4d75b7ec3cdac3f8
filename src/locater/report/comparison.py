"""Two scans of models, or a series of them: what changed, as sentences, a page, tables and a notebook display.

A comparison's document has differences, so what is shown of it needs the documents of its scans too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from locater.findings import Verdict
from locater.markup import display, table
from locater.numerics import known_median
from locater.report.change_verdict import change_verdict
from locater.report.columns import SCAN_HEADINGS, Read, column_reader, quantities, quantity_words
from locater.report.notebook import map_html
from locater.report.pages import short_name
from locater.report.plots import map_of_comparison
from locater.report.scan import LEGEND, opening_of, page_of_scans, scan_verdict
from locater.report.terminal import Line, empty_table, fitting_columns, line_table, print_tables
from locater.report.verdict_sentences import MOST_SHOWN, fault_changes, letters, number, verdicts_of
from locater.version import OLD_NOTES

Document = Mapping[str, Any]
NAMED_COLUMNS, NAMED_CHANGES = 3, 6  # columns and heads that sentences name
MOST_MEDIANS = 8  # scans of a series in the table of medians; of more, evenly chosen ones with the first and the last
UNREAD = "Compared are queries, keys and norms; values, output maps, MLPs and embeddings were not read."
SHOWN = 0.005  # relative difference of a head's maps, which two decimals show
NOTABLE = 0.01  # of the range of a number: smaller changes are not named
# of a head's maps over their norm in A
DIFFERENCE_HEADINGS = {"QK": "qk", "QK apart": "qk_rotated", "OV": "ov"}
DIFFERENCE_LEGEND = {
    "QK": "difference of W over its norm in A",
    "QK apart": "the same for tokens some positions apart",
    "OV": "of what it writes",
}
MEDIAN_COLUMNS: dict[str, Read] = {
    **SCAN_HEADINGS,
    "stable rank": column_reader("stable_rank"),
    "effective rank": column_reader("effective_rank"),
}


# ---- two scans ----


def changes_sentences(comparison: Document, a: Document, b: Document) -> list[str]:
    """Which numbers changed most over heads, and which heads changed most and how; empty where heads differ."""
    if not comparison["aligned"]:
        return []
    if comparison["equal"]:
        return []
    columns = [name for name, size in comparison["changes"]["columns"].items() if size >= NOTABLE]
    heads = notable_changes(comparison)
    if not heads:
        if comparison.get("weights") is not None:  # the verdict says it
            return []
        return [f"No number of any head changed by more than {NOTABLE:.0%} of its range. {UNREAD}"]
    named = "; ".join(_medians_of_two(name, a, b) for name in columns[:NAMED_COLUMNS])
    listed = "; ".join(_by_column(heads[:NAMED_CHANGES]))
    most = [f"Changed most over heads: {named}."] if named else []
    return [*most, f"Heads that changed most (layer.head): {listed}."]


def notable_changes(comparison: Document) -> list[Document]:
    """The heads that the document lists, the largest change first, without those that hardly changed."""
    return [change for change in comparison["changes"]["heads"] if change["size"] >= NOTABLE]


def change_sentence(comparison: Document) -> str:
    """The verdict on two models; on those that were compared by their scans alone, what was not read."""
    return change_verdict(comparison).sentence


def following_sentences(comparison: Document, a: Document, b: Document) -> list[str]:
    """What follows the verdict: faults that heads gained or lost, and which numbers changed most."""
    if not comparison["aligned"] or change_verdict(comparison).name == "identical":
        return []
    faults = fault_changes(verdicts_of(a), verdicts_of(b))
    if comparison["equal"]:
        return []
    return [faults, *changes_sentences(comparison, a, b)]


def lines_of_weights(comparison: Document) -> list[Document]:
    """The heads whose maps differ by what two decimals show, the most different first; those without numbers before."""
    heads = [x for x in comparison["heads"] if x.get("weights") is not None]
    lost = [x for x in heads if "nonfinite" in (*x["gained"], *x["lost"])]
    known = [x for x in heads if largest_difference(x["weights"]) >= SHOWN and x not in lost]
    return lost + sorted(known, key=lambda x: -largest_difference(x["weights"]))


def largest_difference(differences: Mapping[str, float | None]) -> float:
    return max((x for x in differences.values() if x is not None), default=0.0)


def _medians_of_two(name: str, a: Document, b: Document) -> str:
    """`spread of logits √F (median 0.61 in A, 1.92 in B)`."""
    before, after = (number(_median(scan, name)) for scan in (a, b))
    return f"{quantity_words()[name]} (median {before} in A, {after} in B)"


def _median(scan: Document, name: str) -> float | None:
    read = quantities(scan["assumptions"]["length"])[name].read
    return known_median(read(row) for row in scan["heads"])


def _by_column(heads: Sequence[Document]) -> list[str]:
    """The number of each head that changed most, by number.

    >>> _by_column([{"layer": 1, "head": 2, "column": "sqrtF", "before": 0.5, "after": 1.25, "size": 0.6}])
    ['spread of logits √F: 1.2 from 0.50 to 1.25']
    """
    parts: dict[str, list[str]] = {}
    for x in heads:
        numbers = f"from {number(x['before'])} to {number(x['after'])}"
        parts.setdefault(quantity_words()[x["column"]], []).append(f"{x['layer']}.{x['head']} {numbers}")
    return [f"{words}: {', '.join(changes)}" for words, changes in parts.items()]


def comparison_page(comparison: Document, a: Document, b: Document) -> str:
    """The page of two scans, with differences where they have the same heads."""
    aligned = comparison["aligned"]
    counts = " ".join(
        f"{letter}: {len(scan['heads'])} heads in {len(scan['layers'])} layers."
        for letter, scan in (("A", a), ("B", b))
    )
    changed = ""
    if aligned:
        verdict = change_sentence(comparison)
        changed = " ".join(following_sentences(comparison, a, b))
    else:
        verdict = " ".join(f"{letter}: {scan_verdict(x)}" for letter, x in (("A", a), ("B", b)))
        counts += " Their shapes differ, so heads are shown one model at a time and not subtracted."
    opening = next(iter(comparison["changes"]["columns"]), "sqrtF") if aligned else opening_of(a)
    title = f"{short_name(a['source'])} against {short_name(b['source'])}"
    return page_of_scans(title, verdict, counts, [a, b], aligned, opening, changed)


def comparison_in_notebook(comparison: Document, a: Document, b: Document) -> str:
    title = f"{short_name(a['source'])} (A) against {short_name(b['source'])} (B)"
    if not comparison["aligned"]:
        medians = [[name, *map(number, pair)] for name, pair in comparison["medians"].items()]
        sentence = "Their shapes differ, so heads are not subtracted. Medians over heads:"
        return display(title, [sentence], table(["column", "A", "B"], medians, left=["column"]))
    words = quantity_words()
    lines = [
        [
            f"{x['layer']}.{x['head']}",
            words[x["column"]],
            *map(number, (x["before"], x["after"], x["after"] - x["before"])),
        ]
        for x in comparison["changes"]["heads"][:NAMED_CHANGES]
    ]
    listed = table(["head", "changed most", "A", "B", "B - A"], lines, left=["changed most"])
    sentences = (change_sentence(comparison), *following_sentences(comparison, a, b))
    if comparison["equal"] and not lines_of_weights(comparison):
        return display(title, sentences)
    return display(title, sentences, map_html(map_of_comparison(comparison, a, b)), listed)


def print_comparison(comparison: Document, a: Document, b: Document, console: Console) -> None:
    """The verdict, what changed most in words, medians of both, then the heads that changed most."""
    both = [verdicts_of(scan) for scan in (a, b)]
    console.print(f"[bold]{escape(change_sentence(comparison))}[/bold]", highlight=False)
    for sentence in following_sentences(comparison, a, b):
        console.print(escape(sentence), highlight=False)
    for letter, scan in (("A", a), ("B", b)):
        for note in scan["assumptions"]["notes"]:
            if note in OLD_NOTES:
                console.print(f"[dim]- {letter}: {escape(note)}[/dim]", highlight=False)
    differing = lines_of_weights(comparison)
    if comparison["equal"] and not differing:
        return
    if notable_changes(comparison) or not comparison["aligned"]:
        medians = empty_table("medians over heads", ("", "A", "B"))
        for name, read in MEDIAN_COLUMNS.items():
            of_both = [number(known_median(read(row) for row in scan["heads"])) for scan in (a, b)]
            if len({*of_both}) > 1 or not comparison["aligned"]:
                medians.add_row(name, *of_both)
        if medians.row_count:
            console.print(medians)
    if not comparison["aligned"]:
        console.print("Their shapes differ, so heads are not subtracted.", highlight=False)
        return
    lines = _change_lines(comparison, a, b, *both)[:MOST_SHOWN]
    if lines:
        title = "heads that changed most (B - A)"
        names = [*_difference_columns(comparison), *_number_columns(comparison)]
        kept = [i for i in range(len(names)) if any(cells[i] not in ("0.00", "-") for _, cells, *_ in lines)]
        shown = [(at, [cells[i] for i in kept], faults, notes) for at, cells, faults, notes in lines]
        print_tables(
            [line_table(title, [names[i] for i in kept], shown, console.width)],
            {**LEGEND, **DIFFERENCE_LEGEND},
            console,
        )


def _difference_columns(comparison: Document) -> dict[str, str]:
    """Headings of differences of maps, where they were compared."""
    return DIFFERENCE_HEADINGS if any(x.get("weights") is not None for x in comparison["heads"]) else {}


def _number_columns(comparison: Document) -> dict[str, Read]:
    """Headings of numbers of a scan, where one changed notably or there is nothing else to show."""
    return SCAN_HEADINGS if notable_changes(comparison) or not _difference_columns(comparison) else {}


def _change_lines(
    comparison: Document, a: Document, b: Document, before: Sequence[Verdict], after: Sequence[Verdict]
) -> list[Line]:
    """A line per head that changed, with its differences and the flags it gained (+) or lost (-), the largest change
    first.
    """
    lines: dict[tuple[int, int], Line] = {}
    broken = []  # heads without numbers to compare
    differences, numbers = _difference_columns(comparison), _number_columns(comparison)
    for change, row_a, row_b, was, is_now in zip(
        comparison["heads"], a["heads"], b["heads"], before, after, strict=True
    ):
        at = (change["layer"], change["head"])
        faults, notes = (
            [f"+{x}" for x in change["gained"] if x in gained] + [f"-{x}" for x in change["lost"] if x in lost]
            for gained, lost in ((is_now.faults, was.faults), (is_now.notes, was.notes))
        )
        cells = [number(change["weights"][name]) for name in differences.values()]
        cells += [_signed(_minus(read(row_b), read(row_a))) for read in numbers.values()]
        lines[at] = (at, cells, faults, notes)
        if "nonfinite" in (*change["gained"], *change["lost"]):
            broken.append(at)
    flagged = [at for at, (_, _, faults, notes) in lines.items() if faults or notes]
    differing = [(x["layer"], x["head"]) for x in lines_of_weights(comparison)]
    largest = [(x["layer"], x["head"]) for x in notable_changes(comparison)]
    if not differences:
        largest = [(x["layer"], x["head"]) for x in comparison["changes"]["heads"] if x["size"] > 0]
    return [lines[at] for at in dict.fromkeys([*broken, *flagged, *differing, *largest])]


def _minus(b: float | None, a: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _signed(x: float | None) -> str:
    return number(x) if x is None or round(x, 2) <= 0 else "+" + number(x)


# ---- a series ----


def series_sentences(series: Document, scans: Sequence[Document]) -> list[str]:
    """Which numbers changed most and between which scans; which heads; and between which scans nothing did."""
    labels, columns = letters(len(scans)), series["changes"]["between"]
    heads = notable_changes(series)
    if not heads:
        return [f"No number of any head changed by more than {NOTABLE:.0%} of its range between neighbours. {UNREAD}"]
    named = [name for name, sizes in columns.items() if max(sizes) >= NOTABLE][:NAMED_COLUMNS]
    listed = ", ".join(
        f"{x['layer']}.{x['head']} {quantity_words()[x['column']]} from {number(x['before'])} in {labels[x['start']]} "
        f"to {number(x['after'])} in {labels[x['end']]}"
        for x in heads[:NAMED_CHANGES]
    )
    sentences = [f"Heads that changed most (layer.head): {listed}."]
    if named:
        words = "; ".join(_medians_of_series(name, columns[name], scans) for name in named)
        sentences.insert(0, f"Changed most over heads: {words}.")
    still = [
        f"{labels[at]} to {labels[at + 1]}"
        for at in range(len(scans) - 1)
        if all(sizes[at] < NOTABLE for sizes in columns.values())
    ]
    if still:
        more = f" and {len(still) - NAMED_CHANGES} more" if len(still) > NAMED_CHANGES else ""
        sentences.append(f"Hardly anything changed from {', '.join(still[:NAMED_CHANGES])}{more}.")
    return sentences


def _medians_of_series(name: str, sizes: Sequence[float], scans: Sequence[Document]) -> str:
    """`spread of logits √F most from B to C (median 0.61 in A, 0.70 in B, 1.92 in C)`, without those far from it."""
    labels, at = letters(len(scans)), sizes.index(max(sizes))
    places = sorted({0, at, at + 1, len(scans) - 1})
    shown = ", ".join(f"{number(_median(scans[i], name))} in {labels[i]}" for i in places)
    return f"{quantity_words()[name]} most from {labels[at]} to {labels[at + 1]} (median {shown})"


def fault_sentence(scans: Sequence[Document]) -> str:
    """Between which scans how many heads gained a fault, and how many lost one."""
    labels, verdicts = letters(len(scans)), [verdicts_of(scan) for scan in scans]
    gained: list[str] = []
    lost: list[str] = []
    for at in range(len(scans) - 1):
        both = [({*x.faults}, {*y.faults}) for x, y in zip(verdicts[at], verdicts[at + 1], strict=True)]
        for parts, count in ((gained, sum(bool(y - x) for x, y in both)), (lost, sum(bool(x - y) for x, y in both))):
            if count:
                parts.append(f"{count:,} from {labels[at]} to {labels[at + 1]}")
    if not gained and not lost:
        return "No head gained or lost a fault."
    return f"Heads that gained a fault: {_list_words(gained)}. Heads that lost one: {_list_words(lost)}."


def _list_words(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - NAMED_CHANGES} more times" if len(parts) > NAMED_CHANGES else ""
    return (", ".join(parts[:NAMED_CHANGES]) or "none") + more


def print_series(series: Document, scans: Sequence[Document], console: Console) -> None:
    """Faults and changes in words, medians of the scans, and the heads that changed most with where they did."""
    console.print(f"[bold]{escape(fault_sentence(scans))}[/bold]", highlight=False)
    for sentence in series_sentences(series, scans):
        console.print(escape(sentence), highlight=False)
    labels, count = letters(len(scans)), len(scans)
    by = max(1, -(-(count - 1) // (MOST_MEDIANS - 1)))
    places = sorted({*range(0, count, by), count - 1})
    cells = {"": list(series["medians"])}
    cells |= {labels[at]: [number(values[at]) for values in series["medians"].values()] for at in places}
    medians = empty_table(
        "medians over heads", shown := fitting_columns(cells, ("", labels[0], labels[-1]), console.width)
    )
    for at in range(len(cells[""])):
        medians.add_row(*(cells[name][at] for name in shown))
    console.print(medians)
    heads = empty_table("heads that changed most", ("layer", "head", "from", "to", "before", "after", "number"))
    for x in notable_changes(series)[:MOST_SHOWN]:
        place = (str(x["layer"]), str(x["head"]), labels[x["start"]], labels[x["end"]])
        heads.add_row(*place, number(x["before"]), number(x["after"]), quantity_words()[x["column"]])
    if heads.row_count:
        console.print(heads)
