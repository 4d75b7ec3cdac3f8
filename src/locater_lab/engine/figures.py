"""Figures as plain SVG: panels of lines, dots and cells side by side, and strips of small images. No library; legible
on light and dark pages.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from jaxtyping import UInt8
from torch import Tensor

WIDTH, HEIGHT = 400, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 46  # room around the plot
COLOURS = ("#3b6ea8", "#c0562f", "#4f8a4b", "#8a5aa5", "#7a7a7a")
Scale = Literal["linear", "log"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points with a name; drawn as a line, a dashed line, dots or rings. Equal `colour` numbers share a colour."""

    name: str
    points: Sequence[Point]
    style: Literal["line", "dashed", "dots", "rings"] = "line"
    colour: int = 0


@dataclass(frozen=True)
class Panel:
    """One plot: axes fit the points unless limits are given."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    x_scale: Scale = "linear"
    x_limits: Point | None = None
    y_limits: Point | None = None
    y_scale: Scale = "linear"
    legend: Literal["", "top left", "bottom left", "top right", "bottom right"] = ""  # "": where the fewest points are
    clip: bool = False  # hide what is outside of the limits
    x_ticks: Sequence[float] = ()  # (): where numbers are round


@dataclass(frozen=True)
class Cells:
    """A table of numbers from -1 to 1 as coloured cells, first row at the bottom."""

    title: str
    x: str
    y: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Contour:
    """Where numbers on a field's grid pass a level; None is no number."""

    values: Sequence[Sequence[float | None]]
    level: float
    colour: str = "#222"
    style: Literal["line", "dashed", "dotted"] = "line"


@dataclass(frozen=True)
class Field:
    """Numbers from -1 to 1 over a plane with two logarithmic axes: coloured cells around the grid's points, lines and
    words on top.

    Cells at 0 have the colour `clear`, cells without a number are grey. `lines` are contours on the same grid, `words`
    are (x, y, text).
    """

    title: str
    x: str
    y: str
    columns: Sequence[float]
    rows: Sequence[float]
    values: Sequence[Sequence[float | None]]
    lines: Sequence[Contour] = ()
    words: Sequence[tuple[float, float, str]] = ()
    clear: str = "#dcebd6"


def draw(panels: Sequence[Panel | Cells | Field], columns: int = 0) -> str:
    """Panels as one SVG document, side by side unless `columns` says how many stand in a row.

    >>> draw([Panel("a", "x", "y", [Series("s", [(0.0, 1.0), (1.0, 2.0)])])]).startswith("<svg")
    True
    """
    columns = columns or len(panels)
    width, height = WIDTH * columns, HEIGHT * math.ceil(len(panels) / columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        inside = (
            _cells(panel) if isinstance(panel, Cells) else _field(panel) if isinstance(panel, Field) else _plot(panel)
        )
        place = f"{number % columns * WIDTH} {number // columns * HEIGHT}"
        parts += [f'<g transform="translate({place})">', *_frame(panel), *inside, "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _frame(panel: Panel | Cells | Field) -> list[str]:
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<text x="{LEFT}" y="18" font-weight="600">{escape(panel.title)}</text>',
        f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x)}</text>',
        f'<text transform="translate(13 {centre}) rotate(-90)" text-anchor="middle">{escape(panel.y)}</text>',
    ]


def _plot(panel: Panel) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    low_x, high_x = panel.x_limits or _limits([p[0] for p in points], panel.x_scale)
    low_y, high_y = panel.y_limits or _limits([p[1] for p in points], panel.y_scale)
    x = _axis(low_x, high_x, LEFT, WIDTH - RIGHT, panel.x_scale)
    y = _axis(low_y, high_y, HEIGHT - BOTTOM, TOP, panel.y_scale)
    parts = []
    for tick in panel.x_ticks or _ticks(low_x, high_x, panel.x_scale):
        parts.append(_line(x(tick), HEIGHT - BOTTOM, x(tick), TOP))
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{_number(tick)}</text>')
    for tick in _ticks(low_y, high_y, panel.y_scale):
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick)))
        parts.append(f'<text x="{LEFT - 5}" y="{y(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    drawn = [[(x(a), y(b)) for a, b in series.points] for series in panel.series]
    lines = [part for series, at in zip(panel.series, drawn, strict=True) for part in _series(series, at)]
    if panel.clip:  # a document inside shows nothing beyond its edges
        box = f"{LEFT} {TOP} {WIDTH - LEFT - RIGHT} {HEIGHT - TOP - BOTTOM}"
        place = dict(zip(("x", "y", "width", "height"), box.split(), strict=True))
        lines = [
            f'<svg {" ".join(f"{k}={chr(34)}{v}{chr(34)}" for k, v in place.items())} viewBox="{box}">',
            *lines,
            "</svg>",
        ]
    parts += lines
    return parts + _legend(panel.series, [point for at in drawn for point in at], panel.legend)


def _series(series: Series, at: list[Point]) -> list[str]:
    colour = COLOURS[series.colour % len(COLOURS)]
    if series.style == "dots":
        return [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colour}"/>' for a, b in at]
    if series.style == "rings":
        ring = f'r="2.6" fill="#fff" stroke="{colour}" stroke-width="1.4"'
        return [f'<circle cx="{a:.1f}" cy="{b:.1f}" {ring}/>' for a, b in at]
    dashes = ' stroke-dasharray="5 3"' if series.style == "dashed" else ""
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>']


def _legend(series: Sequence[Series], taken: list[Point], where: str = "") -> list[str]:
    """In the corner that is given, or else where the fewest points are."""
    shown = [s for s in series if s.name]
    if not shown:
        return []
    wide, high = 30 + 6.5 * max((len(s.name) for s in shown), default=0), 14 * len(shown) + 6
    corners = {
        f"{v} {h}": (x, y)
        for h, x in (("left", LEFT + 4), ("right", WIDTH - RIGHT - wide))
        for v, y in (("top", TOP + 2), ("bottom", HEIGHT - BOTTOM - high))
    }
    left, top = min(
        [corners[where]] if where else corners.values(),
        key=lambda c: sum(c[0] <= a <= c[0] + wide and c[1] <= b <= c[1] + high for a, b in taken),
    )
    parts = [f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high}" fill="#fff" fill-opacity="0.8"/>']
    for number, s in enumerate(shown):
        y = top + 14 + 14 * number
        parts += _series(
            s, [(left + 10, y - 4)] if s.style in ("dots", "rings") else [(left + 3, y - 4), (left + 17, y - 4)]
        )
        parts.append(f'<text x="{left + 22:.1f}" y="{y:.1f}">{escape(s.name)}</text>')
    return parts


def _cells(panel: Cells) -> list[str]:
    wide, high = (WIDTH - LEFT - RIGHT) / len(panel.columns), (HEIGHT - TOP - BOTTOM) / len(panel.rows)
    parts = []
    for i, (name, row) in enumerate(zip(panel.rows, panel.values, strict=True)):
        y = HEIGHT - BOTTOM - (i + 1) * high
        parts.append(f'<text x="{LEFT - 5}" y="{y + high / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        for j, value in enumerate(row):
            x = LEFT + j * wide
            ink = "#fff" if abs(value) > 0.6 else "#222"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{_shade(value)}"/>'
            )
            middle, base = x + wide / 2, y + high / 2 + 4
            parts.append(
                f'<text x="{middle:.1f}" y="{base:.1f}" text-anchor="middle" fill="{ink}" font-size="10">{value:.2f}</text>'
            )
    for j, name in enumerate(panel.columns):
        parts.append(
            f'<text x="{LEFT + (j + 0.5) * wide:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{escape(name)}</text>'
        )
    return parts


def _field(panel: Field) -> list[str]:
    x = _axis(
        panel.columns[0] ** 1.5 / panel.columns[1] ** 0.5,
        panel.columns[-1] ** 1.5 / panel.columns[-2] ** 0.5,
        LEFT,
        WIDTH - RIGHT,
        "log",
    )
    y = _axis(
        panel.rows[0] ** 1.5 / panel.rows[1] ** 0.5,
        panel.rows[-1] ** 1.5 / panel.rows[-2] ** 0.5,
        HEIGHT - BOTTOM,
        TOP,
        "log",
    )
    wide, high = (WIDTH - LEFT - RIGHT) / len(panel.columns), (HEIGHT - TOP - BOTTOM) / len(panel.rows)
    parts = []
    for row, values in zip(panel.rows, panel.values, strict=True):
        for column, value in zip(panel.columns, values, strict=True):
            fill = (
                "#e9e9e9"
                if value is None
                else panel.clear
                if value == 0
                else _shade(math.copysign(0.12 + 0.88 * abs(value), value))
            )
            at = f'x="{x(column) - wide / 2:.1f}" y="{y(row) - high / 2:.1f}"'
            parts.append(f'<rect {at} width="{wide + 0.3:.1f}" height="{high + 0.3:.1f}" fill="{fill}"/>')
    for line in panel.lines:
        dashes = {"line": "", "dashed": ' stroke-dasharray="6 3"', "dotted": ' stroke-dasharray="1.5 2.5"'}[line.style]
        path = " ".join(
            f"M{x(a):.1f},{y(b):.1f}L{x(c):.1f},{y(d):.1f}"
            for (a, b), (c, d) in contour(panel.columns, panel.rows, line)
        )
        parts.append(f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="1.8"{dashes}/>')
    parts += [
        f'<text x="{x(a):.1f}" y="{y(b):.1f}" text-anchor="middle" font-weight="600">{escape(text)}</text>'
        for a, b, text in panel.words
    ]
    for tick in _powers(panel.columns):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{tick:g}</text>')
    for tick in _powers(panel.rows):
        parts.append(f'<text x="{LEFT - 5}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    return parts


def _powers(values: Sequence[float]) -> list[float]:
    """Powers of four among the values' range."""
    low, high = (math.log(v, 4) for v in (values[0], values[-1]))
    return [4.0**k for k in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]


def contour(columns: Sequence[float], rows: Sequence[float], line: Contour) -> list[tuple[Point, Point]]:
    """Segments between the points where the level is passed on the four edges of each cell of the grid; logarithmic in
    between.

    >>> contour([1.0, 4.0], [1.0, 4.0], Contour([[0.0, 1.0], [0.0, 1.0]], 0.5))
    [((2.0, 1.0), (2.0, 4.0))]
    """
    found = []
    for i in range(len(rows) - 1):
        for j in range(len(columns) - 1):
            corners = [(i, j), (i, j + 1), (i + 1, j + 1), (i + 1, j)]
            held = [line.values[a][b] for a, b in corners]
            if any(value is None for value in held):
                continue
            passed = []
            for (a, b), (c, d), u, v in zip(corners, corners[1:] + corners[:1], held, held[1:] + held[:1], strict=True):
                assert u is not None
                assert v is not None
                if (u < line.level) != (v < line.level):
                    share = (line.level - u) / (v - u)
                    passed.append((_between(columns[b], columns[d], share), _between(rows[a], rows[c], share)))
            found += [(passed[k], passed[k + 1]) for k in range(0, len(passed) - 1, 2)]
    return found


def _between(low: float, high: float, share: float) -> float:
    return low if low == high else low * (high / low) ** share


def _shade(value: float) -> str:
    """White at 0, blue at 1, red at -1."""
    end = (33, 84, 145) if value >= 0 else (168, 62, 38)
    share = min(1.0, abs(value))
    return "#" + "".join(f"{round(255 + (c - 255) * share):02x}" for c in end)


def _axis(low: float, high: float, start: float, stop: float, scale: Scale) -> Callable[[float], float]:
    f: Callable[[float], float] = math.log if scale == "log" else float
    a, b = f(low), f(high)
    return lambda value: start + (f(value) - a) / ((b - a) or 1.0) * (stop - start)


def _number(tick: float) -> str:
    """As short as it can be: 1e-7, not 1e-07."""
    return (
        f"{tick:g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
        if not 1e-3 <= abs(tick) < 1e5 and tick
        else f"{tick:g}"
    )


def _limits(values: Sequence[float], scale: Scale = "linear") -> Point:
    low, high = min(values), max(values)
    if scale == "log":
        room = (high / low) ** 0.06
        return low / room, high * room
    room = (high - low) * 0.06 or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, scale: Scale) -> list[float]:
    if scale == "log":
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        if first > last:  # no power of ten in between
            return [low] if low == high else _ticks(low, high, "linear")
        return [10.0**k for k in range(first, last + 1, 1 + (last - first) // 8)]
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= 6)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e4e4e4"/>'


# ---- small images in lines of runs and on pages: a strip of them as a PNG in base64, strips in one drawing ----


STRIP_SCALE, STRIP_LABELS, STRIP_TOP, STRIP_GAP = 2, 190, 10, 8  # points per pixel, and room around the strips


def png_strip(images: UInt8[Tensor, "count height width channels"]) -> str:
    """The images side by side as a PNG, in base64; one channel is grey, three are colours.

    >>> import torch
    >>> png_size(png_strip(torch.zeros(3, 28, 20, 1, dtype=torch.uint8)))
    (60, 28)
    """
    count, height, width, channels = images.shape
    rows = images.transpose(0, 1).reshape(height, -1).tolist()
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)  # each row without a filter
    colours = {1: 0, 3: 2}[channels]
    header = struct.pack(">IIBBBBB", count * width, height, 8, colours, 0, 0, 0)
    parts = [_png_chunk(b"IHDR", header), _png_chunk(b"IDAT", pixels), _png_chunk(b"IEND", b"")]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_size(strip: str) -> tuple[int, int]:
    """Width and height of a PNG in base64."""
    width, height = struct.unpack(">II", base64.b64decode(strip)[16:24])
    return width, height


def picture_rows(strips: Mapping[str, str]) -> str:
    """Strips below each other, each with its name, as SVG."""
    sizes = [png_size(strip) for strip in strips.values()]
    width = STRIP_LABELS + STRIP_SCALE * max(width for width, _ in sizes) + STRIP_GAP
    y, parts = STRIP_TOP, list[str]()
    for (name, strip), (across, down) in zip(strips.items(), sizes, strict=True):
        parts.append(
            f'<text x="{STRIP_LABELS - 8}" y="{y + STRIP_SCALE * down / 2 + 4:g}" text-anchor="end">{escape(name)}</text>'
        )
        parts.append(
            f'<image x="{STRIP_LABELS}" y="{y}" width="{STRIP_SCALE * across}" height="{STRIP_SCALE * down}" '
            f'style="image-rendering: pixelated" href="data:image/png;base64,{strip}"/>'
        )
        y += STRIP_SCALE * down + STRIP_GAP
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222">'
    )
    return "\n".join([frame, f'<rect width="{width}" height="{y}" fill="#fff"/>', *parts, "</svg>", ""])
