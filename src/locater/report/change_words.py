"""Sentences about what changed between two scans of the same heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locater.missing import known_median
from locater.report.scan_columns import Change, in_words, quantities
from locater.report.tables import number

if TYPE_CHECKING:
    from locater.verbs.comparing import Comparison

NAMED_COLUMNS, NAMED_CHANGES = 3, 6  # columns and heads that sentences name
NOTABLE = 0.01  # of the range of a number: smaller changes are not named


def changes_sentences(comparison: Comparison) -> list[str]:
    """Which numbers changed most over heads, and which heads changed most and how; empty where heads differ."""
    if not comparison.aligned:
        return []
    columns = [name for name, size in comparison.column_changes().items() if size >= NOTABLE]
    heads = [change for change in comparison.head_changes() if change.size >= NOTABLE]
    if not heads:
        return [f"No number of any head changed by more than {NOTABLE:.0%} of its range."]
    named = "; ".join(_column_words(comparison, name) for name in columns[:NAMED_COLUMNS])
    listed = "; ".join(map(_head_words, heads[:NAMED_CHANGES]))
    return [*([f"Changed most over heads: {named}."] if named else []), f"Heads that changed most: {listed}."]


def _column_words(comparison: Comparison, name: str) -> str:
    """`spread of logits √F (median 0.61 in A, 1.92 in B)`."""
    read = quantities(comparison.a.assumptions["length"])[name].read
    a, b = (number(known_median(read(row) for row in scan.rows)) for scan in (comparison.a, comparison.b))
    return f"{in_words()[name]} (median {a} in A, {b} in B)"


def _head_words(change: Change) -> str:
    """`1.2: spread of logits √F rose from 0.52 to 15.60`, by layer and head."""
    verb = "rose" if change.after > change.before else "fell"
    numbers = f"{verb} from {number(change.before)} to {number(change.after)}"
    return f"{change.layer}.{change.head}: {in_words()[change.column]} {numbers}"
