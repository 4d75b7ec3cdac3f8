"""Heads by layers as a chart of altair."""

from __future__ import annotations

from typing import Any

import altair

from locater.markup import HIGH, LOW, MOST, colour_range
from locater.report.drawn import Drawn

PALE = "#f4f2ec"  # the colour of zero


def chart(drawn: Drawn) -> Any:
    """A cell per head, layers from top to bottom; a head without a number is grey."""
    most, negative = colour_range([x for x in drawn.values.values() if x is not None], drawn.least)
    signed = drawn.diverging or negative
    scale = altair.Scale(
        domain=[-most, 0, most] if signed else [0, most],
        range=[LOW, PALE, HIGH] if signed else [PALE, MOST],
        clamp=True,
    )
    rows = [{"layer": layer, "head": head, "value": value} for (layer, head), value in drawn.values.items()]
    encoding = {
        "x": altair.X("head:O", axis=altair.Axis(labelAngle=0)),
        "y": altair.Y("layer:O"),
        "color": altair.condition(
            "isValid(datum.value)",
            altair.Color("value:Q", scale=scale, legend=altair.Legend(title=drawn.label)),
            altair.value("#bbbbbb"),
        ),
        "tooltip": ["layer:O", "head:O", altair.Tooltip("value:Q", title=drawn.label, format=".4g")],
    }
    return altair.Chart(altair.InlineData(values=rows), title=drawn.title).mark_rect().encode(**encoding)
