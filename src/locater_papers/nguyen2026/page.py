"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from locater_papers.engine.arms_page import Entries, Part, Said, in_sections, in_short
from locater_papers.engine.figures import Panel, Series, draw


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    return in_sections(document, ((_mixture, ("a1",)), (_places, ("b1",)), (_samples, ("c1",))))


def lead(document: Mapping[str, Any]) -> list[str]:
    """What of the theory can be checked at this size, and what comes of it; only what was measured."""
    e = {entry["id"]: entry["spread"] for entry in document["claims"]}
    said: Said = (
        (("a1", "a2", "a3"), lambda v: "An attention layer is a mixture of experts in three levels, with a gate and without: the sums "
         f"agree with the package's layers to {max(v['a1'], v['a2'], v['a3']):.0e}."),
        (("b1", "b2", "b4"), lambda v: "Gates after attention and on values make the experts non-linear, gates on keys and queries do not, "
         f"as the paper says. But so does a gate after W_O (a linear fit explains {1 - v['b4']:.2f}), which it counts among those of no "
         "use: whether experts are linear does not tell the places apart."),
        (("b6", "b7"), lambda v: "An element-wise gate keeps W_V and W_O from being one matrix; a gate of one number per head does not "
         f"(change of {v['b7']:.0e} when they are turned against each other), though Qiu et al. (2025) report that such "
         "gates help nearly as much."),
        (("c1", "c2", "c4"), lambda v: "Fitted to teachers of their own kind, gated students gain on their experts with a slope of "
         f"{v['c1']:.2f} ± {e['c1']:.2f} in log n, {v['c2']:+.2f} ± {e['c2']:.2f} against ungated ones{_loud(v, e)}. At the largest sample "
         f"their experts are {math.exp(v['c4']):.1f} times as far from the truth: they have a gate more to learn. The theorem is about the "
         "worst teacher and samples without end; its exponents are out of reach of such an experiment."),
    )  # fmt: skip
    return in_short(document, said)


def _loud(v: Mapping[str, float], e: Mapping[str, float]) -> str:
    return f" ({v['c6']:+.2f} ± {e['c6']:.2f} with more noise)" if "c6" in v else ""


def _mixture(found: Entries) -> Part:
    return [
        "## a. The mixture, written out", "",
        "For token i and channel c, heads h, tokens j, channels m of a head, x_j the tokens, A the map, g the gate:", "",
        "    plain:   out_ic = Σ_h Σ_j A^h_ij Σ_m (x_j W_V^h)_m (W_O^h)_mc",
        "    gated:   out_ic = Σ_h Σ_m g^h_im [Σ_j A^h_ij (x_j W_V^h)_m] (W_O^h)_mc",
        "    values:  out_ic = Σ_h Σ_j A^h_ij Σ_m g^h_jm (x_j W_V^h)_m (W_O^h)_mc", "",
        "The paper's own notation was not at hand; this form is this project's. Every sum was made number by number and compared with the",
        "layers of this package, causal and not, with a key head for each query head and with fewer.",
    ], {}  # fmt: skip


def _places(found: Entries) -> Part:
    held = found["b1"]
    lines = [
        "## b. What a gate changes, by its place", "",
        f"One head of size {held['size']}, its map held. Linear: share of variance that a linear fit of the output explains, gate logits",
        "of standard deviation 1. Turned: relative change of the output when W_V, W_O become W_V R, R^T W_O; 0 where only their product",
        "counts.", "",
        "| place of the gate | linear | turned | rank of what the head adds |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in held["places"]:
        lines.append(f"| {row['place']} | {row['linear']:.3f} | {row['merged']:.2g} | {row['rank']} |")
    lines += ["", "No column has places 1 and 2, in both of their forms, on one side and 3, 4 and 5 on the other.", "",
              "![how linear a gated head is](figure:places)"]  # fmt: skip
    series = [
        Series(place, [(s, y) for s, y in points], "line", number)
        for number, (place, points) in enumerate(held["curves"].items())
    ]
    panel = Panel("how linear a gated head is", "standard deviation of gate logits", "explained by a linear fit", series, x_scale="log",
                  y_limits=(0.5, 1.02), legend="bottom left")  # fmt: skip
    return lines, {"places": draw([panel])}


def _samples(found: Entries) -> Part:
    held = found["c1"]
    panels = []
    for what, title in (("experts", "error of experts"), ("values", "error of predictions")):
        series = [
            Series(_name(row), list(zip(map(float, held["counts"]), row["errors"], strict=True)), "line" if row["heads"] == 2 else "dashed",
                   int(row["gated"]))
            for row in held["rows"] if row["of"] == what
        ]  # fmt: skip
        panels.append(
            Panel(title, "samples", "median over seeds", series, x_scale="log", y_scale="log", legend="top right")
        )
    lines = [
        "## c. Samples that experts take", "",
        f"Teachers of two heads, {held['seeds']} of them; students of the same kind, with two heads or with three, fitted by least squares",
        f"from near the truth; noise is {held['noise']:g} of the signal. The error of experts compares each teacher's head with the",
        "student's heads that attend most like it. A trend at this size; no rate follows from it.", "",
        "| student | slope of log error of experts | of predictions |", "|---|---|---|",
    ]  # fmt: skip
    by = {(row["gated"], row["heads"], row["of"]): row for row in held["rows"]}
    for gated, heads in dict.fromkeys((row["gated"], row["heads"]) for row in held["rows"]):
        cells = (by[gated, heads, what] for what in ("experts", "values"))
        told = " | ".join(f"{row['slope']:.2f} ± {row['spread']:.2f}" for row in cells)
        lines.append(f"| {_name(by[gated, heads, 'experts'])} | {told} |")
    if "c6" in found:
        loud = found["c6"]["slopes"]
        lines += [
            "",
            f"With a noise of {found['c6']['noise']:g}: slopes of {loud[0]:.2f} with a gate and {loud[1]:.2f} without, three heads.",
        ]
    lines += ["", "![errors against samples](figure:samples)"]
    return lines, {"samples": draw(panels)}


def _name(row: Mapping[str, Any]) -> str:
    return f"{'gated' if row['gated'] else 'no gate'}, {row['heads']} heads"
