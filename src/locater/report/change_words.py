"""Sentences about what changed between two scans of the same heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from locater.numerics import known_median
from locater.report.scan_columns import Change, in_words, quantities
from locater.report.tables import number

if TYPE_CHECKING:
    from locater.results.comparison import ComparedTensors, Comparison

NAMED_COLUMNS, NAMED_CHANGES = 3, 6  # columns and heads that sentences name
NAMED_TENSORS = 3
UNREAD = "Compared are queries, keys and norms; values, output maps, MLPs and embeddings were not read."
NOTABLE = 0.01  # of the range of a number: smaller changes are not named


def changes_sentences(comparison: Comparison) -> list[str]:
    """Which numbers changed most over heads, and which heads changed most and how; empty where heads differ."""
    if not comparison.aligned:
        return []
    columns = [name for name, size in comparison.column_changes().items() if size >= NOTABLE]
    heads = [change for change in comparison.head_changes() if change.size >= NOTABLE]
    if comparison.equal:
        return _equal_words(comparison.tensors)
    if not heads:
        return [f"No number of any head changed by more than {NOTABLE:.0%} of its range. {UNREAD}"]
    named = "; ".join(_column_words(comparison, name) for name in columns[:NAMED_COLUMNS])
    listed = "; ".join(_by_column(heads[:NAMED_CHANGES]))
    most = [f"Changed most over heads: {named}."] if named else []
    return [*most, f"Heads that changed most (layer.head): {listed}."]


def _equal_words(tensors: ComparedTensors | None) -> list[str]:
    """What was compared, where no head differs."""
    if tensors is None:
        return [f"Every number of every head is equal. {UNREAD}"]
    if not tensors.apart:
        return [f"Identical: all {tensors.compared:,} tensors have equal bytes."]
    count = tensors.compared + len(tensors.only_a) + len(tensors.only_b)
    named = ", ".join(tensors.apart[:NAMED_TENSORS])
    more = f" and {len(tensors.apart) - NAMED_TENSORS:,} more" if len(tensors.apart) > NAMED_TENSORS else ""
    apart = f"{len(tensors.apart):,} of {count:,} tensors differ{'s' * (len(tensors.apart) == 1)}: {named}{more}."
    return [f"Every number of every head is equal, which says nothing of values, output maps and MLPs. {apart}"]


def _column_words(comparison: Comparison, name: str) -> str:
    """`spread of logits √F (median 0.61 in A, 1.92 in B)`."""
    read = quantities(comparison.a.assumptions["length"])[name].read
    a, b = (number(known_median(read(row) for row in scan.rows)) for scan in (comparison.a, comparison.b))
    return f"{in_words()[name]} (median {a} in A, {b} in B)"


def _by_column(heads: Sequence[Change]) -> list[str]:
    """The number of each head that changed most, by number.

    >>> _by_column([Change(1, 2, "sqrtF", 0.5, 1.25, 0.6)])
    ['spread of logits √F: 1.2 from 0.50 to 1.25']
    """
    parts: dict[str, list[str]] = {}
    for x in heads:
        numbers = f"from {number(x.before)} to {number(x.after)}"
        parts.setdefault(in_words()[x.column], []).append(f"{x.layer}.{x.head} {numbers}")
    return [f"{words}: {', '.join(changes)}" for words, changes in parts.items()]
