"""Figures as plain SVG: panels of lines, dots and cells side by side. No library; legible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 400, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 46  # room around the plot
COLOURS = ("#3b6ea8", "#c0562f", "#4f8a4b", "#8a5aa5", "#7a7a7a")
Scale = Literal["linear", "log"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points with a name; drawn as a line, a dashed line or dots. Equal `colour` numbers share a colour."""

    name: str
    points: Sequence[Point]
    style: Literal["line", "dashed", "dots"] = "line"
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


@dataclass(frozen=True)
class Cells:
    """A table of numbers from -1 to 1 as coloured cells, first row at the bottom."""

    title: str
    x: str
    y: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]


def draw(panels: Sequence[Panel | Cells]) -> str:
    """Panels side by side as one SVG document.

    >>> draw([Panel("a", "x", "y", [Series("s", [(0.0, 1.0), (1.0, 2.0)])])]).startswith("<svg")
    True
    """
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        inside = _cells(panel) if isinstance(panel, Cells) else _plot(panel)
        parts += [f'<g transform="translate({number * WIDTH} 0)">', *_frame(panel), *inside, "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _frame(panel: Panel | Cells) -> list[str]:
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<text x="{LEFT}" y="18" font-weight="600">{escape(panel.title)}</text>',
        f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x)}</text>',
        f'<text transform="translate(13 {centre}) rotate(-90)" text-anchor="middle">{escape(panel.y)}</text>',
    ]


def _plot(panel: Panel) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    low_x, high_x = panel.x_limits or _limits([p[0] for p in points])
    low_y, high_y = panel.y_limits or _limits([p[1] for p in points])
    x = _axis(low_x, high_x, LEFT, WIDTH - RIGHT, panel.x_scale)
    y = _axis(low_y, high_y, HEIGHT - BOTTOM, TOP, "linear")
    parts = []
    for tick in _ticks(low_x, high_x, panel.x_scale):
        parts.append(_line(x(tick), HEIGHT - BOTTOM, x(tick), TOP))
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(low_y, high_y, "linear"):
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick)))
        parts.append(f'<text x="{LEFT - 5}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    drawn = [[(x(a), y(b)) for a, b in series.points] for series in panel.series]
    for series, at in zip(panel.series, drawn, strict=True):
        parts += _series(series, at)
    return parts + _legend(panel.series, [point for at in drawn for point in at])


def _series(series: Series, at: list[Point]) -> list[str]:
    colour = COLOURS[series.colour % len(COLOURS)]
    if series.style == "dots":
        return [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colour}"/>' for a, b in at]
    dashes = ' stroke-dasharray="5 3"' if series.style == "dashed" else ""
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>']


def _legend(series: Sequence[Series], taken: list[Point]) -> list[str]:
    """In the corner where the fewest points are."""
    shown = [s for s in series if s.name]
    wide, high = 30 + 6.5 * max((len(s.name) for s in shown), default=0), 14 * len(shown) + 6
    corners = [(x, y) for x in (LEFT + 4, WIDTH - RIGHT - wide) for y in (TOP + 2, HEIGHT - BOTTOM - high)]
    left, top = min(corners, key=lambda c: sum(c[0] <= a <= c[0] + wide and c[1] <= b <= c[1] + high for a, b in taken))
    parts = [f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high}" fill="#fff" fill-opacity="0.8"/>']
    for number, s in enumerate(shown):
        y = top + 14 + 14 * number
        parts += _series(s, [(left + 10, y - 4)] if s.style == "dots" else [(left + 3, y - 4), (left + 17, y - 4)])
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
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{_shade(value)}"/>')
            middle, base = x + wide / 2, y + high / 2 + 4
            parts.append(f'<text x="{middle:.1f}" y="{base:.1f}" text-anchor="middle" fill="{ink}" font-size="10">{value:.2f}</text>')
    for j, name in enumerate(panel.columns):
        parts.append(f'<text x="{LEFT + (j + 0.5) * wide:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{escape(name)}</text>')
    return parts


def _shade(value: float) -> str:
    """White at 0, blue at 1, red at -1."""
    end = (33, 84, 145) if value >= 0 else (168, 62, 38)
    share = min(1.0, abs(value))
    return "#" + "".join(f"{round(255 + (c - 255) * share):02x}" for c in end)


def _axis(low: float, high: float, start: float, stop: float, scale: Scale) -> Callable[[float], float]:
    f: Callable[[float], float] = math.log if scale == "log" else float
    a, b = f(low), f(high)
    return lambda value: start + (f(value) - a) / ((b - a) or 1.0) * (stop - start)


def _limits(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, scale: Scale) -> list[float]:
    if scale == "log":
        return [10.0**k for k in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= 6)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e4e4e4"/>'
