"""Residuals against depth as lines of Markdown and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locater_papers.dong2021.depth_claims import STATED
from locater_papers.dong2021.encoders import BRANCH_OUT, VARIANTS
from locater_papers.engine.arms_page import Entries, Part
from locater_papers.engine.figures import Panel, Series, draw


def section(entries: Entries) -> Part:
    """Lines of Markdown and figures by name."""
    lines: list[str] = []
    figures: dict[str, str] = {}
    if "c1" in entries:
        lines += _start_lines(entries["c1"])
        figures["depth"] = draw([_start_panel(m, entries["c1"]["curves"][m], m == "BERT") for m in STATED])
    if "c20" in entries:
        lines += _trained_lines(entries["c20"])
        figures["depth-trained"] = draw([_trained_panel(entry) for entry in entries["c20"]["trained"]])
    return lines, figures


def _line(name: str, variant: str, values: list[float]) -> Series:
    number = list(VARIANTS).index(variant)
    # it may lie on "no skip"
    return Series(name, list(enumerate(values)), "dashed" if variant == "neither" else "line", number)


def _start_panel(model: str, curves: Mapping[str, Mapping[str, list[float]]], named: bool) -> Panel:
    """Names in one panel are enough, and in the others they would cover lines."""
    lines = [_line(v if named else "", v, curves[v]["mean"]) for v in VARIANTS]
    if BRANCH_OUT in curves:
        lines.append(Series(BRANCH_OUT, list(enumerate(curves[BRANCH_OUT]["mean"])), "dashed", 4))
    dots = [Series("", sorted(STATED[model][v].items()), "dots", i) for i, v in enumerate(VARIANTS)]
    return Panel(
        f"{model} at initialisation; dots: the paper's",
        "layer",
        "relative residual",
        [*lines, *dots],
        y_limits=(0, 1.1),
    )


def _start_lines(held: Mapping[str, Any]) -> list[str]:
    how, curves = held["settings"], held["curves"]
    lines = [
        "## c. Residual against depth", "", "![residual against depth](figure:depth)", "",
        f"Relative residual, mean over {how['draws']} draws of weights and {how['samples']} samples of {how['length']} tokens (± standard "
        "deviation over draws), the paper's single draw in brackets. 0: all tokens are equal.", "",
        "| model | variant | layer 1 | layer 2 | layer 6 | layer 12 |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, variants in curves.items():
        for variant, curve in variants.items():
            stated = STATED[name].get(variant, {})
            cells = [
                f"{curve['mean'][t]:.3f} ± {curve['sd'][t]:.3f}" + (f" ({stated[t]:.3f})" if t in stated else "")
                for t in (1, 2, 6, 12)
            ]
            lines.append(f"| {name} | {variant} | {' | '.join(cells)} |")
    lines += [
        "", "no skip: attention's own is out, the MLP keeps its. no MLP: as the paper cut it, which for ALBERT leaves activation, skip and",
        f"norm of the MLP in; `{BRANCH_OUT}` takes all but the norm.",
    ]  # fmt: skip
    return lines


def _trained_panel(entry: Mapping[str, Any]) -> Panel:
    means = {v: [(a + b) / 2 for a, b in zip(*entry["curves"][v], strict=True)] for v in VARIANTS}
    mask = "causal" if entry["causal"] else "no mask"
    lines = [_line(v, v, values) for v, values in means.items()]
    return Panel(f"{entry['model']}, trained, {mask}", "layer", "relative residual", lines, y_limits=(0, 1.1))


def _trained_lines(held: Mapping[str, Any]) -> list[str]:
    names = [entry["model"] for entry in held["trained"]]
    lines = [
        "", "![trained models](figure:depth-trained)", "",
        f"Trained models at hand: {', '.join(names)}. Where there is a norm at the end, the last point is after it.",
    ]  # fmt: skip
    lines += [f"Left out: {name} ({why})." for name, why in held["left_out"].items()]
    return lines
