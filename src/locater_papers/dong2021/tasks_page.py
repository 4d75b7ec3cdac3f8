"""Accuracy of sums of paths as lines of Markdown and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locater_papers.dong2021.classifier import DEPTH
from locater_papers.dong2021.task_data import TASKS
from locater_papers.dong2021.tasks import FEW, HELD, MANY
from locater_papers.engine.arms_page import Entries, Part
from locater_papers.engine.figures import Panel, Series, draw


def section(entries: Entries) -> Part:
    """Lines of Markdown and figures by name."""
    held = {task.name: entries[f"f{1 + 5 * n}"] for n, task in enumerate(TASKS) if f"f{1 + 5 * n}" in entries}
    if not held:
        return [], {}
    lines = [
        "## f. What short and long paths carry", "", "![accuracy of sums of paths](figure:tasks)", "",
        "Token accuracy of sums of sampled paths by the number of attention layers on a path, mean over models and draws of paths. Paths",
        "compute attention from their own tokens, as in the paper; `attention held` keeps that of the whole model. Dashed: the whole",
        "model, and the most frequent class of each place, which needs no reading; the paper draws chance there. Both are in the table.",
        "",
    ]  # fmt: skip
    for name, entry in held.items():
        lines += [f"{name}: {entry['how']}" + (f"; {entry['text']}." if "text" in entry else "."), ""]
    lines += [
        "| task | whole model (paper) | without reading (paper's chance) | paths | "
        + " | ".join(map(str, range(DEPTH + 1)))
        + " |"
    ]
    lines += ["|---|---|---|---|" + "---|" * (DEPTH + 1)]
    for name, entry in held.items():
        whole, blind = (_mean([one[key] for one in entry["runs"]]) for key in ("entire", "guess"))
        for kind in (FEW, MANY, HELD):
            cells = " | ".join(f"{x:.2f}" for x in _curve(entry, kind))
            lines.append(
                f"| {name} | {whole:.3f} ({entry['entire']:g}) | {blind:.3f} ({entry['chance']:g}) | {kind} | {cells} |"
            )
    return lines, {"tasks": draw([_panel(name, entry) for name, entry in held.items()])}


def _panel(name: str, entry: Mapping[str, Any]) -> Panel:
    series = [
        Series(kind, list(enumerate(_curve(entry, kind))), "line", number)
        for number, kind in enumerate((FEW, MANY, HELD))
    ]
    for key, colour in (("entire", 3), ("guess", 4)):
        value = _mean([one[key] for one in entry["runs"]])
        series.append(Series("", [(0, value), (DEPTH, value)], "dashed", colour))
    return Panel(name, "length of the paths", "token accuracy", series, y_limits=(0, 1.4))  # the names are above 1


def _curve(entry: Mapping[str, Any], kind: str) -> list[float]:
    return [_mean(list(values)) for values in zip(*(one["curves"][kind] for one in entry["runs"]), strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
