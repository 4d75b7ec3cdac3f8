"""Heads by layers as a figure of matplotlib, or as a chart of altair where matplotlib is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from locater.errors import LocaterError
from locater.report.drawn import Drawn


def plot(drawn: Drawn) -> Any:
    """A map with a cell per head: a matplotlib Figure, or an altair Chart."""
    if find_spec("matplotlib") is not None:
        from locater.report.plots_matplotlib import figure

        return figure(drawn)
    if find_spec("altair") is not None:
        from locater.report.plots_altair import chart

        return chart(drawn)
    raise LocaterError("a plot needs matplotlib or altair: pip install 'locater[plot]'")
