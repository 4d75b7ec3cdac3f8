"""The three pictures of a head on docs/kinds-of-heads.md: spectrum, pattern, prediction. Plain SVG, of the size and style
of the other figures, on white, so that they are legible on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import torch
from torch import Tensor

from locater_lab.engine.figures import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Panel, Series, draw, png_strip

FRAME = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
    f'font-family="system-ui, sans-serif" font-size="11" fill="#222"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
)
ACROSS, DOWN = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
INK = (33, 84, 145)  # of weight 1


def spectrum(eigenvalues: Sequence[tuple[float, float]], M: float, F: float) -> str:
    """Eigenvalues of s W in the complex plane, both axes to one scale, their mean, and a circle: the root mean square of
    the singular values, which that of the eigenvalues would equal if W were normal.
    """
    size = len(eigenvalues)
    radius = math.sqrt(F / size)
    reach = 1.12 * max(radius, *(abs(part) for pair in eigenvalues for part in pair))
    wide = reach * ACROSS / DOWN
    turns = [2 * math.pi * step / 96 for step in range(97)]
    series = [
        Series("", [(-wide, 0.0), (wide, 0.0)], colour=4),
        Series("", [(0.0, -reach), (0.0, reach)], colour=4),
        Series("", [(radius * math.cos(turn), radius * math.sin(turn)) for turn in turns], "dashed", 2),
        Series("", eigenvalues, "dots"),
        Series("", [(M / size, 0.0)], "rings", 1),
    ]
    title = f"Spectrum: {size} eigenvalues of s W; M {M:.2f}, √F {math.sqrt(F):.2f}"
    limits = dict(x_limits=(-wide, wide), y_limits=(-reach, reach))
    return draw([Panel(title, "real part", "imaginary part", series, **limits)])  # type: ignore[arg-type]


def pattern(weights: Tensor, title: str) -> str:
    """One map (T, T): a row per token that looks, a column per token that is looked at. White is 0, dark 1; roots of
    weights, so that small ones are seen.
    """
    shade = weights.clamp(0, 1).sqrt()[..., None]
    pixels = 255 + (torch.tensor(INK) - 255) * shade
    png = png_strip(pixels.round().to(torch.uint8)[None])
    size, T = DOWN, len(weights)
    left = LEFT + (ACROSS - size) / 2
    parts = [
        f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>',
        f'<image x="{left:g}" y="{TOP}" width="{size}" height="{size}" preserveAspectRatio="none" style="image-rendering: pixelated" '
        f'href="data:image/png;base64,{png}"/>',
        f'<rect x="{left:g}" y="{TOP}" width="{size}" height="{size}" fill="none" stroke="#bbb"/>',
        _text(left + size / 2, HEIGHT - 8, "token that is looked at"),
        f'<text transform="translate({left - 32:g} {TOP + size / 2:g}) rotate(-90)" text-anchor="middle">token that looks</text>',
    ]
    for at in range(0, T, 16):
        place = (at + 0.5) / T * size
        parts.append(_text(left + place, TOP + size + 14, str(at)))
        parts.append(_text(left - 5, TOP + place + 4, str(at), "end"))
    return "\n".join([FRAME, *parts, "</svg>", ""])


def prediction(zones: Sequence[str], values: Mapping[str, Sequence[float | None]], title: str) -> str:
    """Where a head's weight lies: a group of bars per zone, a bar per series. None is a zone that a series cannot know."""
    group = ACROSS / len(zones)
    wide = group * 0.8 / len(values)

    def height(value: float) -> float:
        return value * DOWN

    parts = [f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = HEIGHT - BOTTOM - height(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:g}" x2="{WIDTH - RIGHT}" y2="{y:g}" stroke="#e4e4e4"/>')
        parts.append(_text(LEFT - 5, y + 4, f"{tick:g}", "end"))
    parts.append(f'<text transform="translate(13 {TOP + DOWN / 2:g}) rotate(-90)" text-anchor="middle">weight</text>')
    for number, zone in enumerate(zones):
        left = LEFT + number * group
        parts.append(_text(left + group / 2, HEIGHT - BOTTOM + 14, zone))
        for place, (colour, shares) in enumerate(zip(SERIES, values.values(), strict=True)):
            x, share = left + 0.1 * group + place * wide, shares[number]
            if share is None:
                parts.append(_text(x + wide / 2, HEIGHT - BOTTOM - 3, "?"))
                continue
            y = HEIGHT - BOTTOM - height(share)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{max(height(share), 0.6):.1f}" fill="{colour}"/>'
            )
    for number, (colour, name) in enumerate(zip(SERIES, values, strict=True)):
        x = LEFT + 8 + number * 105
        parts.append(f'<rect x="{x}" y="{HEIGHT - 17}" width="9" height="9" fill="{colour}"/>')
        parts.append(_text(x + 13, HEIGHT - 9, name, "start"))
    return "\n".join([FRAME, *parts, "</svg>", ""])


SERIES = (COLOURS[0], COLOURS[1], "#b9b9b9")


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
