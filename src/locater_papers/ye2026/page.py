"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locater_papers.engine.arms_page import Entries, Part, Said, Sections, in_sections, in_short, numbers_of
from locater_papers.engine.figures import Panel, Series, draw
from locater_papers.ye2026.stacks import LEARNED


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    sections: Sections = ((_recurrences, ("a5",)), (_recall, ("b3",)), (_composing, ("c1",)), (_stacks, ("d1",)))
    lines, figures = in_sections(document, sections)
    return [*lines, "", *_out_of_reach()], figures


def lead(document: Mapping[str, Any]) -> list[str]:
    """What separates full from linear attention at this size; only what was measured and decided."""
    numbers = numbers_of(document)
    said: Said = (
        (("a1", "a2", "a3", "a5"), lambda v: "Linear attention knows the past through one state of fixed size, and the package's three "
         f"kinds are such recurrences to the last digit. What passes from past to future has rank {numbers['a5']['ranks']['delta']} at "
         f"most there, {numbers['a5']['ranks']['softmax']} for softmax of the same head size."),
        (("b1", "b4", "b6"), lambda v: "A state of d_k rows holds d_k pairs exactly, by the delta rule. Past that there is no cliff: 2 d_k "
         f"pairs that are merely added up are still told apart in {100 * v['b4']:.0f} % of cases, and correcting the state does "
         f"{'better' if v['b6'] > 0 else 'worse'} than adding ({v['b6']:+.2f})."),
        (("c1", "c3", "c4"), lambda v: "Composing functions needs a state that holds a whole function, not one point, when the last "
         "function is listed first. Not only then: counted over all functions on three points, listing them forward with the start at the "
         f"end needs {v['c4']:.0f} times the states that a pointer does. It is the start in front that makes it easy."),
        (("c5", "c6", "c7"), lambda v: "L + 1 layers of full attention compose L functions, by construction; so do delta layers whose keys "
         "have a channel for every pair, and not with a quarter of them. The theorem is about states that are small against the prompt."),
        (("d1", "d3"), lambda v: f"Trained at this size, a stack of full layers answers {100 * v['d1']:.0f} % at all hops; the number of "
         f"full layers has a rank correlation of {v['d3']:.2f} with that" + (": linear layers do as well here." if v["d3"] <= 0 else ".")),
        (("d1", "d2"), lambda v: f"Trained at this size, stacks of full layers answer {100 * v['d1']:.0f} % at all hops; with one full "
         f"layer less {100 * (v['d1'] + v['d2']):.0f} %."),
        (("some",), lambda v: f"Trained on {numbers['d1']['functions']} hops, not every seed learns, not even with full layers alone. "
         f"{_counts(numbers['d1'])}"),
    )  # fmt: skip
    some = {"some": 1.0} if "d1" in numbers and not numbers["d1"].get("brief") and _is_unsure(numbers["d1"]) else None
    return in_short({"claims": [entry for entry in document["claims"] if entry["decided"]]}, said, some)


def _is_unsure(held: Mapping[str, Any]) -> bool:
    """Whether a seed of the all-full stack has not learned."""
    full = max(held["right"], key=lambda layout: layout.count("S"))
    return min(seed[-1] for seed in held["right"][full]) < LEARNED


def _counts(held: Mapping[str, Any]) -> str:
    """Seeds that learned, by stack.

    >>> _counts({"right": {"LS": [[1.0, 0.2], [1.0, 0.95]], "SS": [[1.0, 1.0], [1.0, 1.0]]}})
    'Seeds that answer 90 % at the last hop: LS 1 of 2, SS 2 of 2.'
    """
    each = (
        f"{layout} {sum(seed[-1] >= LEARNED for seed in seeds)} of {len(seeds)}"
        for layout, seeds in held["right"].items()
    )
    return f"Seeds that answer {100 * LEARNED:.0f} % at the last hop: {', '.join(each)}."


def _recurrences(found: Entries) -> Part:
    held = found["a5"]
    ranks = ", ".join(f"`{name}` {rank}" for name, rank in held["ranks"].items())
    return [
        "## a. Recurrences", "",
        f"Heads of size {held['size']}, {held['tokens']} tokens, loops over tokens against the package. Rank of the block of the map that",
        f"leads from the first half of the tokens to the second: {ranks}.",
    ], {}  # fmt: skip


def _recall(found: Entries) -> Part:
    held = found["b3"]
    first = Panel(
        f"pairs recalled, d_k = {held['size']}", "pairs / d_k", "share recalled",
        [Series(name, [(x, y) for x, y in points], "line", i) for i, (name, points) in enumerate(held["curves"].items())],
        x_scale="log", y_limits=(0, 1.05), legend="bottom left",
    )  # fmt: skip
    second = Panel(
        "squared error over the bound 1 - d_k / n", "pairs / d_k", "ratio",
        [Series(name, [(x, y) for x, y in points], "line", i + 1) for i, (name, points) in enumerate(held["bounds"].items())],
        legend="top right",
    )  # fmt: skip
    loads = [x for x, _ in next(iter(held["curves"].values()))]
    lines = [
        "## b. What a state can hold", "",
        "Pairs are written, then all are asked for. A pair is recalled where the answer is nearest to its own value; keys are random.", "",
        "| pairs / d_k | " + " | ".join(f"{x:g}" for x in loads) + " |", "|---" * (len(loads) + 1) + "|",
    ]  # fmt: skip
    lines += [
        f"| {name} | " + " | ".join(f"{y:.2f}" for _, y in points) + " |" for name, points in held["curves"].items()
    ]
    return [*lines, "", "![recall against load](figure:recall)"], {"recall": draw([first, second])}


def _composing(found: Entries) -> Part:
    held = found["c1"]
    m = held["points"]
    lines = [
        "## c. Composing by hand", "",
        f"States that any left-to-right machine needs between functions, counted over all triples of functions on {m} points",
        f"(m = {m}, m^m = {m**m}): two beginnings need different states where some continuation has different answers.", "",
        "| order of the prompt | states between functions |", "|---|---|",
    ]  # fmt: skip
    lines += [f"| {name} | {', '.join(map(str, counts))} |" for name, counts in held["states"].items()]
    points, functions = held["task"]
    return [
        *lines,
        "",
        f"Layers by hand: {functions} functions on {points} points; one layer binds x to f(x), one makes each hop.",
    ], {}


def _stacks(found: Entries) -> Part:
    held = found["d1"]
    layers = range(1, held["functions"] + 1)
    lines = [
        "## d. Trained stacks", "",
        f"{held['functions']} functions on {held['points']} points, {held['pairs']} pairs; keys of all heads have {held['rows']} channels "
        f"together; width {held['width']}, {held['steps']} steps on {held['device']}. L is a `delta` layer, S a softmax layer. Share of "
        "right answers after each layer, by seed; guessing gives "
        f"{1 / held['points']:.2f}. Each layer's stream is asked for the hop it should have reached.", "",
        "| stack | " + " | ".join(f"{k} hop{'s' * (k > 1)}" for k in layers) + " |", "|---" * (held["functions"] + 1) + "|",
    ]  # fmt: skip
    for layout, seeds in held["right"].items():
        cells = (", ".join(f"{seed[k - 1]:.2f}" for seed in seeds) for k in layers)
        lines.append(f"| {layout} | {' | '.join(cells)} |")
    if held.get("brief"):
        lines += [
            "", "This run is too short to learn the task: nothing is concluded from it. In full, three hops on a GPU, two without one:", "",
            "    locater reproduce ye2026 --claim d --json d.json",
            "    locater reproduce ye2026 --from quick.json --from d.json --json ... --report ...",
        ]  # fmt: skip
        return lines, {}
    series = [
        Series(layout, [(float(k), sum(seed[k - 1] for seed in seeds) / len(seeds)) for k in layers], "line", i)
        for i, (layout, seeds) in enumerate(held["right"].items())
    ]
    panel = Panel("right answers by hops", "hops", "mean over seeds", series, y_limits=(0, 1.05), legend="bottom left")
    if _is_unsure(held):
        lines += [
            "", _counts(held) + " Differences between stacks are not judged where a seed with full layers alone has not learned: training, "
            "not what a stack can represent, may be what they show.",
        ]  # fmt: skip
    return [*lines, "", "![right answers by hops](figure:stacks)"], {"stacks": draw([panel])}


def _out_of_reach() -> list[str]:
    return [
        "## Not tested", "",
        "- The theorem sets L - 1 full layers with 2^(3 L^2) linear ones against L + 1 full ones, for prompts without end. It is about",
        "  what can be represented; no stack of that kind is built here, and a trend at one size neither proves nor refutes it.",
        "- The 2-Sum task, which the paper is said to use for sparse attention, and the growing tables of the original task.",
        "- It says nothing of hybrids with more full layers, or of models that write out their steps.",
    ]  # fmt: skip
