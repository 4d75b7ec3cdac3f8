"""Small pieces of HTML that notebooks show: a heat map of heads, a table, and the frame around them.

Only strings: nothing is fetched, nothing runs. Text has the colour of the notebook's own text, and the colours of a map
are more or less opaque over the notebook's own background, so that light and dark themes both work.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

Grid = Sequence[Sequence[float | None]]  # numbers by row and column, such as layer and head; None: no number

LOW, HIGH, MOST = "#d0702a", "#1f9aa1", "#5577dd"  # below zero, above zero, where nothing is below zero
WIDEST = 560  # pixels for the cells of a row
TITLES = 1_024  # up to this many cells show their number in a tooltip
RAMP, SHADES = 190.0, 24  # width of the legend in pixels, and its steps


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the others lies, taken from the list itself; 0 for an empty list.

    >>> quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, math.floor(len(ranked) * share))] if ranked else 0.0


def colour_range(values: Sequence[float], least: float = 0.0) -> tuple[float, bool]:
    """Where the colours end (at `least` or more), and whether they diverge from zero.

    They end at the 98th percentile of sizes: one extreme head does not hide the others.

    >>> colour_range([-2.0, 1.0, 0.5])
    (2.0, True)
    """
    low, high = quantile(values, 0.02), quantile(values, 0.98)
    most = max(least, abs(low), abs(high)) or 1.0
    return most, low < -0.02 * most


def short_number(x: float | None) -> str:
    """Three significant digits; a dash for no number.

    >>> short_number(0.12345), short_number(1234567.0), short_number(None)
    ('0.123', '1.23e+06', '-')
    """
    return "-" if x is None else f"{x:.3g}"


def range_words(values: Sequence[float | None]) -> str:
    """`-1 to 3.5`, or the number where all are the same.

    >>> range_words([3.5, None, -1.0]), range_words([2.0, 2.0]), range_words([None])
    ('-1 to 3.5', '2', '-')
    """
    known = [x for x in values if x is not None]
    ends = dict.fromkeys(short_number(x) for x in (min(known), max(known))) if known else ["-"]
    return " to ".join(ends)


def heat_map(
    values: Grid,
    label: str,
    *,
    rows: str = "layer",
    columns: str = "head",
    names: Sequence[str] | None = None,
    least: float = 0.0,
    diverging: bool | None = None,
) -> str:
    """A cell per number, with a legend, as SVG.

    `label` says what is shown, `rows` and `columns` what the two axes are, `names` how the rows are called (their
    numbers, without it). The colours end at `least` or more. They diverge from zero where some numbers are negative, or
    as `diverging` says. A cell without a number is empty and struck through.
    """
    most, negative = colour_range([x for row in values for x in row if x is not None], least)
    signed = negative if diverging is None else diverging
    names = names or [str(i) for i in range(len(values))]
    across = max([1, *(len(row) for row in values)])
    width = max(6.0, min(24.0, WIDEST / across))
    place = _Place(18 + 6.5 * max([len(rows), *map(len, names)]), 18.0, width, min(width, 20.0))
    titled = sum(map(len, values)) <= TITLES
    cells = []
    for j, row in enumerate(values):
        for i, x in enumerate(row):
            title = f"<title>{html.escape(f'{rows} {names[j]}, {columns} {i}: {short_number(x)}')}</title>"
            cells.append(f"<g>{_cell(x, most, signed, place, i, j)}{title if titled else ''}</g>")
    bottom = place.top + len(values) * place.height
    right = round(max(place.left + across * place.width, place.left + RAMP) + 4)
    high = round(bottom + 46)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{high}" viewBox="0 0 {right} {high}" '
        f'role="img" aria-label="{html.escape(label)}" style="max-width:100%;height:auto" '
        f'font-size="11" font-family="sans-serif" fill="currentColor">{_axes(names, across, rows, columns, place)}'
        f"{''.join(cells)}{_legend(label, most, signed, place.left, bottom + 10)}</svg>"
    )


class _Place(NamedTuple):
    """Where the first cell begins, and how large cells are, in pixels."""

    left: float
    top: float
    width: float
    height: float


def _cell(x: float | None, most: float, signed: bool, place: _Place, i: int, j: int) -> str:
    gap = 1 if place.width > 8 else 0.4
    left, top = place.left + i * place.width, place.top + j * place.height
    width, height = place.width - gap, place.height - gap
    box = f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    if x is None:
        line = f"M{left + 1:.1f} {top + height - 1:.1f}L{left + width - 1:.1f} {top + 1:.1f}"
        ink = 'stroke="currentColor" stroke-opacity=".4" stroke-width=".7"'
        return f'{box} fill="none" {ink}/><path d="{line}" {ink}/>'
    colour, opacity = _shade(x / most, signed)
    return f'{box} fill="{colour}" fill-opacity="{opacity:.2f}"/>'


def _shade(t: float, signed: bool) -> tuple[str, float]:
    """Colour and opacity of a number that is `t` of the largest."""
    opacity = 0.06 + 0.94 * min(1.0, max(0.0, abs(t) if signed else t)) ** 0.8
    return (LOW if t < 0 else HIGH) if signed else MOST, opacity


def _axes(names: Sequence[str], across: int, rows: str, columns: str, place: _Place) -> str:
    above, beside = place.top - 6, place.left - 6
    down = range(0, len(names), math.ceil(13 / place.height))
    along = range(0, across, math.ceil(20 / place.width))
    return (
        f"<g><title>{html.escape(f'{rows}s from top to bottom, {columns}s from left to right')}</title>"
        + _text(beside, above, rows, "end", bold=True)
        + "".join(_text(beside, place.top + (j + 0.5) * place.height + 4, names[j], "end") for j in down)
        + "".join(_text(place.left + (i + 0.5) * place.width, above, str(i), "middle") for i in along)
        + "</g>"
    )


def _legend(label: str, most: float, signed: bool, left: float, top: float) -> str:
    """A ramp of the colours with numbers at its ends, and what they are."""
    step, ramp = RAMP / SHADES, ""
    for i in range(SHADES):
        share = i / (SHADES - 1)
        colour, opacity = _shade(2 * share - 1 if signed else share, signed)
        box = f'<rect x="{left + i * step:.1f}" y="{top:.1f}" width="{step:.1f}" height="8"'
        ramp += f'{box} fill="{colour}" fill-opacity="{opacity:.2f}"/>'
    ends = [(-most, "start"), (0.0, "middle"), (most, "end")] if signed else [(0.0, "start"), (most, "end")]
    at = {"start": 0.0, "middle": RAMP / 2, "end": RAMP}
    numbers = (_text(left + at[anchor], top + 20, f"{x:.2g}", anchor) for x, anchor in ends)
    return ramp + "".join(numbers) + _text(left, top + 33, label, "start", bold=True)


def _text(x: float, y: float, words: str, anchor: str, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ' fill-opacity=".75"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{html.escape(words)}</text>'


def table(headings: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """A table of texts, which are escaped; columns named in `left` are aligned to the left.

    >>> table(["head", "M"], [["0", "<1"]])
    '<table><tr><th>head</th><th>M</th></tr><tr><td>0</td><td>&lt;1</td></tr></table>'
    """
    top = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    body = "".join(f"<tr>{''.join(map(_td, headings, line, [left] * len(line)))}</tr>" for line in lines)
    return f"<table><tr>{top}</tr>{body}</table>"


def range_table(columns: Mapping[str, Sequence[float | None]]) -> str:
    """A line per column: how many numbers it has, the lowest, the median and the highest."""
    known = {name: [x for x in values if x is not None] for name, values in columns.items()}
    lines = [
        [name, str(len(x)), *map(short_number, (min(x), median(x), max(x)) if x else (None,) * 3)]
        for name, x in known.items()
    ]
    return table(["", "numbers", "lowest", "median", "highest"], lines, left=[""])


def _td(heading: str, text: str, left: Sequence[str]) -> str:
    style = ' style="text-align:left"' if heading in left else ""
    return f"<td{style}>{html.escape(text)}</td>"


def display(title: str, sentences: Sequence[str], *parts: str) -> str:
    """A result in a notebook: its name and sentences about it, which are escaped, then pieces of HTML side by side."""
    text = html.escape(" ".join(filter(None, sentences)))
    name = f"<b>{html.escape(title)}</b>"
    boxes = "".join(f'<div style="max-width:100%;overflow-x:auto">{part}</div>' for part in parts if part)
    body = f'<div style="display:flex;flex-wrap:wrap;gap:8px 24px;align-items:flex-start">{boxes}</div>' * bool(boxes)
    return f"<div><p>{name}{'<br>' * bool(text)}{text}</p>{body}</div>"
