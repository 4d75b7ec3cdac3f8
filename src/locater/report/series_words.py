"""What changed along a series of scans, in words and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from locater.numerics import known_median
from locater.report.change_words import NAMED_CHANGES, NAMED_COLUMNS, NOTABLE, UNREAD
from locater.report.scan_columns import in_words, quantities
from locater.report.tables import MOST_SHOWN, number
from locater.report.terminal import empty_table, fitting

if TYPE_CHECKING:
    from locater.results.series import ComparisonSeries

MOST_MEDIANS = 8  # scans whose medians a table shows; of more, evenly chosen ones with the first and the last


def series_sentences(series: ComparisonSeries) -> list[str]:
    """Which numbers changed most and between which scans; which heads; and between which scans nothing did."""
    labels, columns = series.labels, series.column_changes()
    heads = [change for change in series.head_changes() if change.size >= NOTABLE]
    if not heads:
        return [f"No number of any head changed by more than {NOTABLE:.0%} of its range between neighbours. {UNREAD}"]
    named = [name for name, sizes in columns.items() if max(sizes) >= NOTABLE][:NAMED_COLUMNS]
    listed = ", ".join(
        f"{x.layer}.{x.head} {in_words()[x.column]} from {number(x.before)} in {labels[x.start]} "
        f"to {number(x.after)} in {labels[x.end]}"
        for x in heads[:NAMED_CHANGES]
    )
    sentences = [f"Heads that changed most (layer.head): {listed}."]
    if named:
        sentences.insert(0, f"Changed most over heads: {'; '.join(_column_words(series, name) for name in named)}.")
    still = [
        f"{labels[at]} to {labels[at + 1]}"
        for at in range(len(series.pairs))
        if all(sizes[at] < NOTABLE for sizes in columns.values())
    ]
    if still:
        more = f" and {len(still) - NAMED_CHANGES} more" if len(still) > NAMED_CHANGES else ""
        sentences.append(f"Hardly anything changed from {', '.join(still[:NAMED_CHANGES])}{more}.")
    return sentences


def _column_words(series: ComparisonSeries, name: str) -> str:
    """`spread of logits √F most from B to C (median 0.61 in A, 0.70 in B, 1.92 in C)`, without those far from it."""
    sizes, labels = series.column_changes()[name], series.labels
    at = sizes.index(max(sizes))
    read = quantities(series.scans[0].assumptions["length"])[name].read
    places = sorted({0, at, at + 1, len(series.scans) - 1})
    medians = [number(known_median(read(row) for row in series.scans[i].rows)) for i in places]
    shown = ", ".join(f"{median} in {labels[i]}" for median, i in zip(medians, places, strict=True))
    return f"{in_words()[name]} most from {labels[at]} to {labels[at + 1]} (median {shown})"


def fault_sentence(series: ComparisonSeries) -> str:
    """Between which scans how many heads gained a fault, and how many lost one."""
    labels = series.labels
    gained: list[str] = []
    lost: list[str] = []
    for at, pair in enumerate(series.pairs):
        both = [({*x.faults}, {*y.faults}) for x, y in zip(pair.a.verdicts, pair.b.verdicts, strict=True)]
        for parts, count in ((gained, sum(bool(y - x) for x, y in both)), (lost, sum(bool(x - y) for x, y in both))):
            if count:
                parts.append(f"{count:,} from {labels[at]} to {labels[at + 1]}")
    if not gained and not lost:
        return "No head gained a fault, none lost one."
    return f"Heads that gained a fault: {_listed(gained)}. Heads that lost one: {_listed(lost)}."


def _listed(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - NAMED_CHANGES} more times" if len(parts) > NAMED_CHANGES else ""
    return (", ".join(parts[:NAMED_CHANGES]) or "none") + more


def print_series(series: ComparisonSeries, console: Console) -> None:
    """Faults and changes in words, medians of the scans, and the heads that changed most with where they did."""
    console.print(f"[bold]{escape(fault_sentence(series))}[/bold]", highlight=False)
    for sentence in series_sentences(series):
        console.print(escape(sentence), highlight=False)
    labels, count = [escape(label) for label in series.labels], len(series.scans)
    by = max(1, -(-(count - 1) // (MOST_MEDIANS - 1)))
    places = sorted({*range(0, count, by), count - 1})
    cells = {"": list(series.medians())}
    cells |= {labels[at]: [number(values[at]) for values in series.medians().values()] for at in places}
    table = empty_table("medians over heads", shown := fitting(cells, ("", labels[0], labels[-1]), console.width))
    for at in range(len(cells[""])):
        table.add_row(*(cells[name][at] for name in shown))
    console.print(table)
    table = empty_table("heads that changed most", ("layer", "head", "from", "to", "before", "after", "number"))
    for x in [x for x in series.head_changes() if x.size >= NOTABLE][:MOST_SHOWN]:
        place = (str(x.layer), str(x.head), labels[x.start], labels[x.end])
        table.add_row(*place, number(x.before), number(x.after), in_words()[x.column])
    if table.row_count:
        console.print(table)
