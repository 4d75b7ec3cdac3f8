"""One number of every head, ready to be drawn: in a notebook's heat map or a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError
from locater.markup import Grid
from locater.report.pages import short_name
from locater.report.probe_columns import COLUMNS
from locater.report.scan_columns import Quantity, quantity_named, telling

if TYPE_CHECKING:
    from locater.observing.observation import Observation
    from locater.results.comparison import Comparison
    from locater.results.probe import Probe
    from locater.results.scan import Scan


@dataclass(frozen=True)
class Drawn:
    """A number per head, by (layer, head) in the model's order. `least` is the smallest end of the colour scale."""

    title: str
    label: str
    least: float
    diverging: bool  # colours on both sides of zero, even where no number is negative
    values: Mapping[tuple[int, int], float | None]

    @property
    def layers(self) -> list[str]:
        """Names of the rows of a map."""
        return list(dict.fromkeys(str(layer) for layer, _ in self.values))


def of_scan(scan: Scan, column: str | None = None) -> Drawn:
    """A column of a scan; without a name the one that the page opens on."""
    length = scan.assumptions["length"]
    quantity = telling(scan.rows, length) if column is None else quantity_named(column, length, _numeric(scan.rows))
    return _of_quantity(short_name(scan.source), quantity, scan.rows)


def of_probe(probe: Probe, column: str | None = None) -> Drawn:
    """A column of a probe; without a name the entropy."""
    return _of_measured(short_name(probe.source), probe.rows, column)


def of_observation(observation: Observation, column: str | None = None) -> Drawn:
    """A column of an observation; without a name the entropy."""
    return _of_measured(type(observation.model).__name__, observation.rows, column)


def of_comparison(comparison: Comparison, column: str | None = None) -> Drawn:
    """The differences B - A of a column; without a name of the one that changed most."""
    a, b = comparison.a, comparison.b
    if not comparison.aligned:
        raise LocaterError(
            f"{short_name(a.source)} and {short_name(b.source)} have different heads, which cannot be subtracted: "
            "plot comparison.a and comparison.b"
        )
    name = column or next(iter(comparison.column_changes()), "sqrtF")
    quantity = quantity_named(name, a.assumptions["length"], _numeric(a.rows))
    values = {}
    for x, y in zip(a.rows, b.rows, strict=True):
        before, after = quantity.read(x), quantity.read(y)
        values[x.layer, x.head] = None if before is None or after is None else after - before
    title = f"{short_name(b.source)} - {short_name(a.source)}"
    return Drawn(title, f"{quantity.label}, B - A", quantity.least / 2, True, values)


def grid_of(drawn: Drawn) -> Grid:
    """Numbers by layer and head. A head that was not measured has none."""
    places = {layer: place for place, layer in enumerate(dict.fromkeys(layer for layer, _ in drawn.values))}
    widths = [0] * len(places)
    for layer, head in drawn.values:
        widths[places[layer]] = max(widths[places[layer]], head + 1)
    grid: list[list[float | None]] = [[None] * width for width in widths]
    for (layer, head), value in drawn.values.items():
        grid[places[layer]][head] = value
    return grid


def _of_quantity(title: str, quantity: Quantity, rows: Sequence[Any]) -> Drawn:
    values = {(row.layer, row.head): quantity.read(row) for row in rows}
    return Drawn(title, quantity.label, quantity.least, quantity.diverging, values)


def _of_measured(title: str, rows: Sequence[Any], column: str | None) -> Drawn:
    name, columns = column or "entropy", _numeric(rows)
    if name not in columns:
        raise LocaterError(f"column {name!r}: there is none of this name; there are {', '.join(columns)}")
    known = next((x for x in COLUMNS if x.name == name), None)
    label, least = (known.label, known.least) if known else (name.replace("_", " "), 0.0)
    return Drawn(title, label, least, False, {(row.layer, row.head): row[name] for row in rows})


def _numeric(rows: Sequence[Any]) -> list[str]:
    """Columns with a number per head."""
    return [f.name for f in fields(rows[0]) if f.type in ("float", "float | None")] if rows else []
