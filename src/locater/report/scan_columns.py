"""Numbers of a scan that are drawn: what they are called, what they mean, and which of them tell most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from locater.errors import LocaterError
from locater.markup import quantile

Read = Callable[[Any], float | None]  # from a row of a head
VARIES = 0.25  # of the colours: a map that uses less of them is blank


class Quantity(NamedTuple):
    """A number per head, as it is drawn. `least` is the smallest end of the colour scale, so that noise stays pale."""

    name: str
    symbol: str
    words: str
    diverging: bool
    least: float
    meaning: str
    read: Read

    @property
    def label(self) -> str:
        return f"{self.symbol} {self.words}".strip()


def column(name: str) -> Read:
    return lambda row: row[name]


def root_of_F(row: Any) -> float | None:
    return None if row.F is None else row.F**0.5


def symmetry(row: Any) -> float | None:
    return row.S / row.F if row.S is not None and row.F else None


def quantities(length: int) -> dict[str, Quantity]:
    """By name, in the order of the page's menu, for `length` tokens in view. Names are columns of a scan, and `sqrtF`
    and `symmetry`, which are computed from them.
    """
    uniform = f"{length**-0.5:.3g}"
    table = (
        (
            *("localization", "Λ", "localization by position", True, 0.1),
            "How much of whether a token's signal gets through is explained by its position. 0: position does not "
            "matter. Towards 1: near tokens win. Negative: far tokens win.",
        ),
        (
            *("M", "M", "mean self-logit", True, 1.0),
            "Mean logit of a token with itself. Around 2 and above, the theory lets attention localize; below -1 a "
            "token looks away from tokens like itself.",
        ),
        (
            *("sqrtF", "√F", "spread of logits", False, 0.5),
            "How far logits spread over keys. Near 0 attention is uniform (rank collapse); far above √(2 log T) "
            "each row locks onto single tokens (entropy collapse).",
        ),
        (
            *("concentration", "κ", "concentration of the spectrum", True, 0.1),
            "1 or -1: all eigenvalues are equal. 0: they spread around zero, or the map only rotates.",
        ),
        (
            *("symmetry", "S/F", "symmetry", True, 0.2),
            "1: the query-key map is symmetric, tokens look at each other. -1: antisymmetric, one-way. "
            "Trained maps sit near 0.",
        ),
        (
            *("expected_entropy", "", "expected entropy (nats)", False, math.log(length)),
            "Entropy of a row of attention if logits were normal over keys. 0 is one-hot.",
        ),
        (
            *("residual_kept", "", "differences kept by attention", False, 0.2),
            "Share of the differences between tokens that attention alone passes on. "
            f"Near {uniform}, as uniform attention over {length} tokens, the head mixes them into one: layer upon "
            "layer, that is rank collapse. 1: each row copies one token. Skip connections keep the stream itself; "
            "this is about what the head adds to it.",
        ),
        (
            *("key_bias", "", "key bias", False, 0.2),
            "Spread of the part of a logit that depends on the key alone: every query is drawn to the same keys.",
        ),
        (
            *("stable_rank", "", "stable rank", False, 4.0),
            "How many directions carry the map, each by its square against that of the largest: 1 is a single one, the "
            "head size is all of them.",
        ),
        (
            *("effective_rank", "", "effective rank", False, 4.0),
            "How many directions the map has, each counted by its share of all singular values: never less than the "
            "stable rank, and near the head size where all count alike.",
        ),
        (
            *("spectral_norm", "", "spectral norm of W", False, 1.0),
            "Largest stretch of the query-key map, before the logit scale.",
        ),
        (
            *("skew", "", "skew g₁", True, 0.75),
            "Beyond 0.75 a few directions dominate and the exact mixture replaces the closed form.",
        ),
    )
    derived = {"sqrtF": root_of_F, "symmetry": symmetry}
    return {entry[0]: Quantity(*entry, derived.get(entry[0]) or column(entry[0])) for entry in table}


def in_words() -> dict[str, str]:
    """What a quantity is called in a sentence, by its name: words, and the symbol of the tables."""
    return {x.name: f"{x.words} {x.symbol}".strip() for x in quantities(2).values()}


def quantity_named(name: str, length: int, columns: Sequence[str]) -> Quantity:
    """A quantity of the page, or any other of the scan's numeric `columns`."""
    known = quantities(length)
    if name in known:
        return known[name]
    if name not in columns:
        derived = [x for x in known if x not in columns]
        raise LocaterError(f"column {name!r}: there is none of this name; there are {', '.join([*columns, *derived])}")
    return Quantity(name, "", name.replace("_", " "), False, 0.0, "", column(name))


def telling(rows: Sequence[Any], length: int) -> Quantity:
    """The quantity to open on: the first whose map is not blank, or the one that varies most."""
    spans = {name: _span(rows, quantity) for name, quantity in quantities(length).items()}
    best = next((name for name, span in spans.items() if span >= VARIES), max(spans, key=lambda name: spans[name]))
    return quantities(length)[best]


def _span(rows: Sequence[Any], quantity: Quantity) -> float:
    numbers = _known(rows, quantity)
    return (quantile(numbers, 0.98) - quantile(numbers, 0.02)) / _scale(numbers, quantity)


def _known(rows: Sequence[Any], quantity: Quantity) -> list[float]:
    return [x for x in map(quantity.read, rows) if x is not None]


def _scale(numbers: Sequence[float], quantity: Quantity) -> float:
    return max(quantity.least, quantile([abs(x) for x in numbers], 0.98))


# ---- two scans of the same heads ----


class Change(NamedTuple):
    """One number of one head in both scans. `size` is the change over the range that the number has in both."""

    layer: int
    head: int
    column: str
    before: float
    after: float
    size: float


def ranges(rows: Sequence[Any], length: int) -> dict[str, float]:
    """The range of each quantity over rows: what a change of it is divided by."""
    return {name: _scale(_known(rows, quantity), quantity) for name, quantity in quantities(length).items()}


def changes(a: Sequence[Any], b: Sequence[Any], length: int, within: Mapping[str, float] | None = None) -> list[Change]:
    """How much each quantity of each head changed from `a` to `b`, which are rows of the same heads; largest first.

    `within` are the ranges to measure by, for scans of a longer series; without it those of `a` and `b`.
    """
    table = []
    scales = within or ranges([*a, *b], length)
    for name, quantity in quantities(length).items():
        scale = scales[name]
        for x, y in zip(a, b, strict=True):
            before, after = quantity.read(x), quantity.read(y)
            if before is not None and after is not None:
                table.append(Change(x.layer, x.head, name, before, after, abs(after - before) / scale))
    return sorted(table, key=lambda change: -change.size)


def by_column(table: Sequence[Change]) -> dict[str, float]:
    """Size of the change of each column (98th percentile over heads), largest first."""
    sizes: dict[str, list[float]] = {}
    for change in table:
        sizes.setdefault(change.column, []).append(change.size)
    ranked = {name: quantile(numbers, 0.98) for name, numbers in sizes.items()}
    return dict(sorted(ranked.items(), key=lambda item: -item[1]))


def by_head(table: Sequence[Change]) -> list[Change]:
    """The largest change of each head, largest first."""
    best: dict[tuple[int, int], Change] = {}
    for change in table:
        best.setdefault((change.layer, change.head), change)
    return list(best.values())
