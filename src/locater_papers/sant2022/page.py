"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locater_papers.engine.arms_page import (
    Entries,
    Part,
    Said,
    Sections,
    arms_table,
    carried_in,
    in_sections,
    in_short,
    numbers_of,
)
from locater_papers.engine.figures import Panel, Series, draw


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    sections: Sections = (
        (_kinds, ("a2", "a5", "a6")), (_layouts, ("b4",)), (_relevance, ("c3", "c5", "c6")), (_models, ("d1",)), (_training, ()),
    )  # fmt: skip
    return in_sections(document, sections)


def lead(document: Mapping[str, Any]) -> list[str]:
    """The answer in plain words; only what was measured."""
    found = numbers_of(document)
    more = {"window": found["a5"]["window"]} if "a5" in found else {}
    said: Said = (
        (("a1", "a3", "a4"), lambda v: "Multiformer gives the heads of one layer different views: all keys, a window, or keys shortened "
         f"by a convolution. Each kind is what it says, to {max(v['a1'], v['a3'], v['a4']):.0e}."),
        (("b4", "b5"), lambda v: f"Mixed layouts have at most {v['b4']:.2f} of the scores of full attention at 1,000 tokens. They stay "
         f"quadratic (growth with exponent {v['b5']:.2f} at 16,000): compressed heads save a factor and not a power."),
        (("a5", "window"), lambda v: f"A published window of {v['window']:.0f} is aligned to blocks: some tokens see {v['a5']:.0f} "
         f"tokens to one side, not {v['window'] // 2:.0f}."),
        (("c5", "c6", "d2"), lambda v: "How much a head counts is measured by its share of what the layer adds. That depends on the "
         "basis of the stream (shares move by "
         f"{v['c5']:.2f} in a built case), and heads that undo each other count most. In trained models it orders heads about as "
         f"leaving them out does (rank correlation {v['d2']:.2f})."),
        (("e1", "e2", "e3"), lambda v: "Trained as a masked language model, local and compressed heads together differ in report loss by "
         f"{v['e1']:+.3f} from local heads alone, {v['e2']:+.3f} from compressed ones alone, and the better mix by {v['e3']:+.3f} from "
         "softmax attention, as seen at this size."),
        (("e5",), lambda v: f"Does even relevance go with a lower loss? Over arms the rank correlation of unevenness with loss is "
         f"{v['e5']:+.2f}, as seen at this size."),
    )  # fmt: skip
    return in_short(document, said, more)


def _kinds(found: Entries) -> Part:
    window, sums = found["a5"], found["a6"]
    lines = [
        "## a. Kinds of heads", "",
        f"A local head: keys outside of the window change nothing, keys inside at least {found['a2']['inside']:.2g}. The public code "
        "aligns windows to blocks of a third: a",
        f"window of {window['window']} shows {window['keys']} keys, between {window['least']} and {window['most']} tokens to a side; "
        f"it has {window['common']:.0%} of its pairs in common with",
        f"a centred one, which is what `multiformer` has here. Rows of a compressed head's map sum to anything, {sums['least']:.1f} to "
        f"{sums['most']:.1f} with kernels as they",
        "are at first: its weights have either sign, and entropy says nothing about them.",
    ]  # fmt: skip
    return lines, {}


def _layouts(found: Entries) -> Part:
    held = found["b4"]
    lines = [
        "## b. Layouts and their cost", "", "![cost](figure:layouts)", "",
        f"{held['layers']} layers of {held['heads']} heads. Scores as a share of those of full attention, by number of tokens:", "",
        "| layout | full, local, compressed heads | " + " | ".join(f"{T:,}" for T in held["lengths"]) + " | growth |",
        "|---" * (len(held["lengths"]) + 3) + "|",
    ]  # fmt: skip
    for row in held["layouts"]:
        kinds = ", ".join(str(row["kinds"][k]) for k in "flc")
        lines.append(
            f"| {row['layout']} | {kinds} | "
            + " | ".join(f"{x:.3f}" for x in row["share"].values())
            + f" | {row['growth']:.2f} |"
        )
    lines += [
        "",
        f"Growth: log2 of the scores when T doubles to {held['lengths'][-1]:,}; 1 is linear. Windows of {held['window']}; kernels "
        "(taps, stride) of (5, 2), in the last",
        "four layers of the full mix (7, 3).",
    ]
    panel = Panel(
        "scores over those of full attention", "tokens", "share",
        [
            Series(row["layout"], [(float(T), x) for T, x in row["share"].items()], "dashed" if row["layout"] in ("local",
                "compressed") else "line", n)
            for n, row in enumerate(r for r in held["layouts"] if r["layout"] != "full")
        ],
        x_scale="log", y_limits=(0, 1.4),
    )  # fmt: skip
    return lines, {"layouts": draw([panel])}


def _relevance(found: Entries) -> Part:
    c3, c5, c6 = found["c3"], found["c5"], found["c6"]
    lines = [
        "## c. The measure of relevance", "",
        "r_h is the median over samples of |W_O^h o_h|₁, as a share over heads.", "",
        f"- Shares of one sample sum to 1; medians need not: {1 + c3['mean']:.2f} on average where samples lean on different heads.",
        f"- A head that writes to one channel has {c5['as_it_is']:.2f}, beside one as strong that writes to all; with the stream "
        f"turned, {c5['turned']:.2f}. Absolute sums favour",
        "  heads that spread what they write.",
        f"- Two heads that undo each other can have {c6['relevance']:.2f} of the relevance; without them the layer changes by "
        f"{c6['change']:.0e}.",
    ]  # fmt: skip
    return lines, {}


def _models(found: Entries) -> Part:
    held = found["d1"]
    lines = [
        "## d. Relevance in trained models", "", "![relevance](figure:relevance)", "",
        f"Two halves of {held['samples']} samples of {held['length']} tokens. Agreement: rank correlation over the heads of a layer of "
        "relevance with the change of the last states",
        "when a head is left out, mean over layers.", "",
        "| model | heads of a layer | variation of relevance | agreement | agreement, least and most of a layer |", "|---|---|---|---|---|",
    ]  # fmt: skip
    panels = []
    for entry in held["models"]:
        both = [f"{sum(entry[name]) / len(entry[name]):.2f}" for name in ("variation", "agreement")]
        flat = [x for half in entry["by_layer"] for x in half]
        lines.append(
            f"| {entry['model']} | {entry['heads']} | {both[0]} | {both[1]} | {min(flat):.2f}, {max(flat):.2f} |"
        )
        layers = [
            [(a + b) / 2 * entry["heads"] for a, b in zip(*pair, strict=True)]
            for pair in zip(*entry["relevance"], strict=True)
        ]
        dots = Series("a head each", [(float(n), x) for n, layer in enumerate(layers) for x in layer], "dots", 0)
        even = Series("even", [(0.0, 1.0), (float(len(layers) - 1), 1.0)], "dashed", 4)
        panels.append(Panel(entry["model"], "layer", "relevance, 1 is even", [dots, even], y_limits=(0, 3)))
    lines += [f"Left out: {name} ({why})." for name, why in held["left_out"].items()]
    return lines, {"relevance": draw(panels)}


def _training(found: Entries) -> Part:
    held = carried_in(found)
    if held is None:
        return [], {}
    points = {
        arm["arm"]: [(end["unevenness"], end["loss"]) for end in arm["ends"] if end.get("unevenness") is not None]
        for arm in held["arms"]
    }
    lines = [
        "## e. Mixed heads, trained", "", "![relevance and loss](figure:training)", "",
        f"A masked language model of {held['layers']} layers and {held['heads']} heads, mechanisms at the better of two rates,",
        "variations at one. Figures by seed. Unevenness is the variation of relevance over the heads of a layer, mean over layers.",
        "In the default mix heads are full, local, compressed, full.", "",
        *arms_table(held["arms"], {"loss": "report loss", "unevenness": "unevenness of relevance"}),
    ]  # fmt: skip
    series = [Series(name, held, "dots", n) for n, (name, held) in enumerate(points.items()) if held]
    if not series:
        return [line for line in lines if "figure:" not in line], {}
    return lines, {"training": draw([Panel("a dot per seed", "unevenness of relevance", "report loss", series)])}
