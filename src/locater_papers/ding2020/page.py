"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locater_papers.engine.arms_page import (
    Entries,
    Part,
    Said,
    Sections,
    carried_in,
    in_sections,
    in_short,
    means_table,
)
from locater_papers.engine.figures import Panel, Series, draw


def lead(document: Mapping[str, Any]) -> list[str]:
    """What was asked and what was found, from what was measured."""
    said: Said = (
        (("a1", "a4"), lambda v: "Softmax shares out every query's attention, and promises keys nothing: in random draws the least heard "
         f"key got {v['a4']:.0e} times 1/S. Normalized over queries first, then over keys, every key gets 1/S or more: {v['a1']:.2f} times "
         "that in the same draws, and no larger bound is true."),
        (("a6", "a8"), lambda v: "The price: whatever is added to all logits of one key cancels, and the promise is about sums alone: one "
         f"query can be {100 * v['a8']:.0f} % of what a key gets."),
        (("b2", "b4"), lambda v: "It cannot be causal: with a causal mask on rows alone, an earlier weight changes by "
         f"{v['b2']:.2f} when the last query does. Sums over the queries seen so far leak nothing and keep the promise, which each token "
         "then owes to itself."),
        (("c1", "c3", "c4"), lambda v: f"In a trained encoder {100 * v['c1']:.2f} % of keys are explained away in the promise's sense. "
         "What double normalization does change is the other end: the loudest key of a head falls to "
         f"{100 * v['c3']:.0f} % of what it got, and {100 * v['c4']:.0f} % of all weight moves."),
        (("c5",), lambda v: f"In causal models {100 * v['c5']:.1f} % of keys are explained away."),
        (("d1",), lambda v: f"Trained, it changes the loss of a masked language model by {v['d1']:+.4f} nats against softmax, as "
         "seen at this size."),
        (("d2",), lambda v: f"The hybrid, which learns how much of each, changes it by {v['d2']:+.4f} nats, as seen at this size."),
        (("d3", "d4"), lambda v: f"Keys explained away after training: {100 * v['d4']:.0f} % with softmax, {100 * v['d3']:.0f} % doubly "
         "normalized."),
    )  # fmt: skip
    return in_short(document, said)


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    sections: Sections = ((_promise, ("a1", "a7")), (_models, ()), (_training, ()))
    return in_sections(document, sections)


def _promise(found: Entries) -> Part:
    a1, a7 = found["a1"], found["a7"]
    lines = [
        "## a. What a key is promised", "",
        f"Random logits, {a1['keys']} queries and keys; the least column sum times the number of keys, so that 1 is the promise. Keys",
        "explained away are those that get less than it under softmax.", "",
        "| standard deviation of logits | softmax, least | doubly normalized, least | explained away by softmax |", "|---|---|---|---|",
        *(f"| {r['size']:g} | {r['softmax']:.2g} | {r['doubly']:.3g} | {r['away']:.1%} |" for r in a1["rows"]), "",
        f"More rounds of the same two steps go on to maps whose columns all sum to 1 (logits of standard deviation {a1['rough']:g}):", "",
        "| rounds | least column sum | largest column sum |", "|---|---|---|",
        *(f"| {r['rounds']} | {r['least']:.3f} | {r['largest']:.2f} |" for r in a1["rounds"]), "",
        "Padded queries have to stay out of the sums. Counted in, with something large in them, they break the promise: the least column",
        f"sum is {a7['counted']:.2g} times 1/S.",
    ]  # fmt: skip
    return lines, {}


def _models(found: Entries) -> Part:
    held = next((found[key] for key in ("c1", "c5") if key in found), None)
    if held is None:
        return [], {}
    panels = []
    for model, (plain, doubly) in held["quantiles"].items():
        count = len(plain) - 1
        causal = next(r["causal"] for r in held["rows"] if r["model"] == model)
        series = [
            Series(name, [(n / count, max(x, 1e-4)) for n, x in enumerate(values)], style, colour)  # type: ignore[arg-type]
            for name, values, style, colour in (
                ("softmax", plain, "line", 1), ("normalized twice", doubly, "line", 0),
                ("1/S", [1 / held["tokens"]] * len(plain), "dashed", 4),
            )
        ]  # fmt: skip
        panels.append(
            Panel(
                f"{model}{', prefix sums' if causal else ''}",
                "share of keys",
                "column sum",
                series,
                y_scale="log",
                y_limits=(1e-4, 1e2),
            )
        )
    lines = [
        "## c. Keys in trained models", "", "![column sums](figure:columns)", "",
        f"Column sums of all heads on {held['tokens']} tokens, sorted; 1 is the mean. Causal models are given the form with prefix sums.",
        "Below, means over heads under softmax, and in brackets with the same logits normalized twice; faint keys have a column sum under",
        f"{held['faint']:g}.", "",
        "| model | mask | under 1/S | faint | least column sum | largest | weight moved |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in held["rows"]:
        mask = "causal" if r["causal"] else "none"
        shares = f"{r['away']:.2%} ({r['away_doubly']:.2%}) | {r['faint']:.1%} ({r['faint_doubly']:.1%})"
        sums = f"{r['least']:.3f} ({r['least_doubly']:.3f}) | {r['largest']:.1f} ({r['largest_doubly']:.1f})"
        lines.append(f"| {r['model']} | {mask} | {shares} | {sums} | {r['moved']:.0%} |")
    return lines, {"columns": draw(panels)}


def _training(found: Entries) -> Part:
    held = carried_in(found)
    if held is None:
        return [], {}
    columns = {
        "explained_away": ("explained away", 4),
        "column_least": ("least column sum", 3),
        "entropy": ("entropy", 2),
    }
    return [
        "## d. Training", "", "Masked language models. Keys explained away are a share of all keys; after the loss, means over seeds.", "",
        *means_table(held["arms"], columns),
    ], {}  # fmt: skip
