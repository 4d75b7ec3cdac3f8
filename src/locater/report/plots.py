"""One number of every head as a map: the grid that notebooks draw, a figure of matplotlib, or a chart of altair where
matplotlib is not installed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from locater.errors import LocaterError
from locater.markup import HIGH, LOW, MOST, Grid, colour_range
from locater.report.columns import COLUMNS, HeadQuantity, Row, numeric_columns, opening_quantity, quantity_named
from locater.report.pages import short_name

Document = Mapping[str, Any]
PALE = "#f4f2ec"  # the colour of zero


@dataclass(frozen=True)
class HeadMap:
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

    @property
    def grid(self) -> Grid:
        """Numbers by layer and head. A head that was not measured has none."""
        places = {layer: place for place, layer in enumerate(dict.fromkeys(layer for layer, _ in self.values))}
        widths = [0] * len(places)
        for layer, head in self.values:
            widths[places[layer]] = max(widths[places[layer]], head + 1)
        grid: list[list[float | None]] = [[None] * width for width in widths]
        for (layer, head), value in self.values.items():
            grid[places[layer]][head] = value
        return grid


def map_of_scan(document: Document, column: str | None = None) -> HeadMap:
    """A column of a scan; without a name the one that the page opens on."""
    rows, length = document["heads"], document["assumptions"]["length"]
    quantity = (
        opening_quantity(rows, length) if column is None else quantity_named(column, length, numeric_columns(rows))
    )
    return _of_quantity(short_name(document["source"]), quantity, rows)


def map_of_measured(title: str, rows: Sequence[Row], column: str | None = None) -> HeadMap:
    """A column of measured heads, of a probe or an observation; without a name the entropy."""
    name, columns = column or "entropy", numeric_columns(rows)
    if column is not None and name not in columns:
        raise LocaterError(f"column {name!r}: there is none of this name; there are {', '.join(columns)}")
    known = next((x for x in COLUMNS if x.name == name), None)
    label, least = (known.label, known.least) if known else (name.replace("_", " "), 0.0)
    return HeadMap(title, label, least, False, {(row["layer"], row["head"]): row[name] for row in rows})


def map_of_comparison(document: Document, a: Document, b: Document, column: str | None = None) -> HeadMap:
    """The differences B - A of a column; without a name of the one that changed most."""
    names = short_name(a["source"]), short_name(b["source"])
    if not document["aligned"]:
        raise LocaterError(
            f"{names[0]} and {names[1]} have different heads, which cannot be subtracted: "
            "plot comparison.a and comparison.b"
        )
    name = column or next(iter(document["changes"]["columns"]), "sqrtF")
    quantity = quantity_named(name, a["assumptions"]["length"], numeric_columns(a["heads"]))
    values = {}
    for x, y in zip(a["heads"], b["heads"], strict=True):
        before, after = quantity.read(x), quantity.read(y)
        values[x["layer"], x["head"]] = None if before is None or after is None else after - before
    return HeadMap(f"{names[1]} - {names[0]}", f"{quantity.label}, B - A", quantity.least / 2, True, values)


def _of_quantity(title: str, quantity: HeadQuantity, rows: Sequence[Row]) -> HeadMap:
    values = {(row["layer"], row["head"]): quantity.read(row) for row in rows}
    return HeadMap(title, quantity.label, quantity.least, quantity.diverging, values)


def plot(heads: HeadMap) -> Any:
    """A map with a cell per head: a matplotlib Figure, or an altair Chart."""
    if find_spec("matplotlib") is not None:
        return _figure(heads)
    if find_spec("altair") is not None:
        return _chart(heads)
    raise LocaterError("a plot needs matplotlib or altair: pip install 'locater[plot]'")


def _range_of_colours(heads: HeadMap) -> tuple[float, bool]:
    """Where the colours end, and whether they diverge from zero."""
    most, negative = colour_range([x for x in heads.values.values() if x is not None], heads.least)
    return most, heads.diverging or negative


@cache
def _figure_class() -> Any:
    """A figure of matplotlib that notebooks show by itself: it belongs to no window and no list of open figures."""
    from matplotlib.figure import Figure

    class HeadFigure(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=120)
            return file.getvalue()

    return HeadFigure


def _figure(heads: HeadMap) -> Any:
    """A cell per head, layers from top to bottom. A head without a number is grey."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    grid, layers = heads.grid, heads.layers
    across = max([1, *map(len, grid)])
    table = [[math.nan if x is None else x for x in (*row, *[None] * (across - len(row)))] for row in grid]
    most, signed = _range_of_colours(heads)
    colours = [LOW, PALE, HIGH] if signed else [PALE, MOST]
    size = min(12.0, 2.5 + 0.32 * across), min(14.0, 1.4 + 0.28 * len(grid))
    drawing = _figure_class()(figsize=size, layout="constrained")
    axes = drawing.add_subplot()
    axes.set_facecolor("#bbbbbb")
    image = axes.imshow(
        table or [[math.nan]],
        cmap=LinearSegmentedColormap.from_list("locater", colours),
        vmin=-most if signed else 0,
        vmax=most,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set(xlabel="head", ylabel="layer", title=heads.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    places = range(0, len(layers), max(1, len(layers) // 24))
    axes.set_yticks(list(places), [layers[place] for place in places])
    drawing.colorbar(image, ax=axes, label=heads.label, extend="max" if not signed else "both")
    return drawing


def _chart(heads: HeadMap) -> Any:
    """A cell per head, layers from top to bottom; a head without a number is grey."""
    import altair

    most, signed = _range_of_colours(heads)
    scale = altair.Scale(
        domain=[-most, 0, most] if signed else [0, most],
        range=[LOW, PALE, HIGH] if signed else [PALE, MOST],
        clamp=True,
    )
    rows = [{"layer": layer, "head": head, "value": value} for (layer, head), value in heads.values.items()]
    encoding = {
        "x": altair.X("head:O", axis=altair.Axis(labelAngle=0)),
        "y": altair.Y("layer:O"),
        "color": altair.condition(
            "isValid(datum.value)",
            altair.Color("value:Q", scale=scale, legend=altair.Legend(title=heads.label)),
            altair.value("#bbbbbb"),
        ),
        "tooltip": ["layer:O", "head:O", altair.Tooltip("value:Q", title=heads.label, format=".4g")],
    }
    return altair.Chart(altair.InlineData(values=rows), title=heads.title).mark_rect().encode(**encoding)
