"""Products of attention maps as lines of Markdown and a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from locater_papers.dong2021.map_products import Medians, decades
from locater_papers.dong2021.products import SIX
from locater_papers.engine.arms_page import Entries, Part
from locater_papers.engine.figures import Panel, Series, draw

BERT = "BERT base"

STATED = {
    "initial": {1: 1.6e-1, 2: 3e-3, 3: 6e-5},  # then a plateau near 2e-6
    "trained": dict(enumerate((4e-1, 2e-1, 9e-2, 4e-2, 1.7e-2, 8e-3, 5e-3, 2e-3, 5e-4, 3e-4, 1.3e-4, 6e-5), 1)),
}  # medians of the paper's figure, by number of factors


def section(entries: Entries) -> Part:
    """Lines of Markdown and figures by name."""
    if "d1" not in entries:
        return [], {}
    held = entries["d1"]
    start = [entry["medians"] for entry in held["bert"]]
    lines = [
        "## d. Products of attention maps", "", "![products of attention maps](figure:products)", "",
        "Median over products of k maps, one head from each of k layers; dots are the paper's, of BERT. Decades per layer:", "",
        "| model | mask | at initialisation | trained |", "|---|---|---|---|",
        f"| {BERT} | none | {_of([decades(keyed(m)) for m in start])} | not at hand (paper: 0.35) |",
    ]  # fmt: skip
    for entry in held["pairs"]:
        slopes = held["decades"][entry["model"]]
        mask = "causal" if entry["causal"] else "none"
        lines.append(f"| {entry['model']} | {mask} | {_of(slopes['initial'])} | {_of(slopes['trained'])} |")
    lines += ["", *(f"Left out: {name} ({why})." for name, why in held["left_out"].items())]
    if "d5" in entries:
        floor = median(entries["d5"]["float32"])
        lines += [f"In float32 the product of {SIX} maps of {BERT} ends at {floor:.1e}; in float64 it goes on falling."]
    return lines, {"products": draw([_start_panel(start), *(_pair_panel(entry) for entry in held["pairs"])])}


def _start_panel(start: Sequence[Mapping[Any, float]]) -> Panel:
    """BERT base, all draws as one line, beside the paper's two."""
    own = Series("at initialisation", _points([keyed(m) for m in start]), "line", 0)
    dots = [Series(f"paper, {state}", _points([STATED[state]]), "dots", i) for i, state in enumerate(STATED)]
    return _panel(f"{BERT} at initialisation", [own, *dots])


def _pair_panel(entry: Mapping[str, Any]) -> Panel:
    states = (("at initialisation", "initial"), ("trained", "trained"))
    lines = [
        Series(name, _points([keyed(m) for m in entry[state]]), "line", i) for i, (name, state) in enumerate(states)
    ]
    return _panel(f"{entry['model']}, {'causal' if entry['causal'] else 'no mask'}", lines)


def _panel(title: str, series: list[Series]) -> Panel:
    """All on one scale, that of BERT base unless a model is deeper."""
    deepest = max(12.0, *(x for each in series for x, _ in each.points))
    return Panel(
        title,
        "maps in the product",
        "log10 of the relative residual",
        series,
        x_limits=(0.5, deepest + 0.5),
        y_limits=(-16, 1),
    )


def _points(found: Sequence[Mapping[int, float]]) -> list[tuple[float, float]]:
    return [(float(k), math.log10(max(1e-16, median(m[k] for m in found)))) for k in found[0]]


def keyed(found: Mapping[Any, float]) -> Medians:
    """Keys of JSON are strings."""
    return {int(k): x for k, x in found.items()}


def _of(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{(low + high) / 2:.2f} ± {(high - low) / 2:.2f}"
