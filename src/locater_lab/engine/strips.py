"""A figure for many arms: a row for each, a dot for each seed, a bar at their mean. Plain SVG, as in `figures.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from locater_lab.engine.figures import COLOURS

ROW, LABELS, PLOT, TOP, BOTTOM, RIGHT = 22, 190, 420, 34, 40, 20


def strips(title: str, x: str, rows: Mapping[str, Sequence[float]]) -> str:
    """Rows in the order given; a line marks zero.

    >>> strips("gain", "nats", {"a": [-0.1, 0.2]}).count("<circle")
    2
    """
    values = [value for held in rows.values() for value in held]
    step = _step((max(*values, 0.0) - min(*values, 0.0)) or 1.0)
    low, high = math.floor(min(*values, 0.0) / step) * step, math.ceil(max(*values, 0.0) / step) * step
    high += step * (high == low)  # all of them zero
    width, bottom = LABELS + PLOT + RIGHT, TOP + ROW * len(rows)

    def at(value: float) -> float:
        return LABELS + PLOT * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + BOTTOM}" width="{width}" height="{bottom + BOTTOM}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{bottom + BOTTOM}" fill="#fff"/>',
        f'<text x="{LABELS}" y="18" font-weight="600">{escape(title)}</text>',
        f'<text x="{LABELS + PLOT / 2}" y="{bottom + BOTTOM - 6}" text-anchor="middle">{escape(x)}</text>',
    ]
    for number in range(round((high - low) / step) + 1):
        tick = low + number * step
        stroke = "#555" if abs(tick) < step / 2 else "#e2e2e2"
        parts.append(f'<line x1="{at(tick):.1f}" y1="{TOP}" x2="{at(tick):.1f}" y2="{bottom}" stroke="{stroke}"/>')
        parts.append(f'<text x="{at(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{round(tick, 10):g}</text>')
    for number, (name, held) in enumerate(rows.items()):
        y, mean = TOP + ROW * (number + 0.5), sum(held) / len(held)
        parts.append(f'<text x="{LABELS - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<line x1="{at(mean):.1f}" y1="{y - 7}" x2="{at(mean):.1f}" y2="{y + 7}" stroke="{COLOURS[1]}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{at(value):.1f}" cy="{y}" r="3.5" fill="{COLOURS[0]}" fill-opacity="0.75"/>' for value in held
        ]
    return "\n".join([*parts, "</svg>", ""])


def _step(span: float) -> float:
    """Between ticks: 1, 2 or 5 of a power of ten, for five of them or a few more."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * digit for digit in (1, 2, 5, 10) if span / (power * digit) <= 7)
