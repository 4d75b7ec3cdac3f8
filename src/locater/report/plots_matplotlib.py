"""Heads by layers as a figure of matplotlib."""

from __future__ import annotations

import io
import math

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from locater.markup import HIGH, LOW, MOST, colour_range
from locater.report.drawn import Drawn, grid_of

PALE = "#f4f2ec"  # the colour of zero
SEQUENTIAL = LinearSegmentedColormap.from_list("locater", [PALE, MOST])
DIVERGING = LinearSegmentedColormap.from_list("locater-diverging", [LOW, PALE, HIGH])


class HeadFigure(Figure):
    """A figure that notebooks show by itself: it belongs to no window and no list of open figures."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=120)
        return file.getvalue()


def figure(drawn: Drawn) -> HeadFigure:
    """A cell per head, layers from top to bottom. A head without a number is grey."""
    grid = grid_of(drawn)
    across = max([1, *map(len, grid)])
    table = [[math.nan if x is None else x for x in (*row, *[None] * (across - len(row)))] for row in grid]
    most, negative = colour_range([x for row in grid for x in row if x is not None], drawn.least)
    signed = drawn.diverging or negative
    size = min(12.0, 2.5 + 0.32 * across), min(14.0, 1.4 + 0.28 * len(grid))
    drawing = HeadFigure(figsize=size, layout="constrained")
    axes = drawing.add_subplot()
    axes.set_facecolor("#bbbbbb")
    image = axes.imshow(
        table or [[math.nan]],
        cmap=DIVERGING if signed else SEQUENTIAL,
        vmin=-most if signed else 0,
        vmax=most,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set(xlabel="head", ylabel="layer", title=drawn.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    places = range(0, len(drawn.layers), max(1, len(drawn.layers) // 24))
    axes.set_yticks(list(places), [drawn.layers[place] for place in places])
    drawing.colorbar(image, ax=axes, label=drawn.label, extend="max" if not signed else "both")
    return drawing
