"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from locater.papers.figures import Panel, Series, draw

Entries = Mapping[str, Mapping[str, Any]]
Part = tuple[list[str], dict[str, str]]


def lead(document: Mapping[str, Any]) -> list[str]:
    """What was asked and what was found, from what was measured."""
    v = {entry["id"]: entry["measured"] for entry in document["claims"] if entry["measured"] is not None}
    said: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, float]], str]], ...] = (
        (("a1", "a4"), lambda v: "Softmax shares out every query's attention, and promises keys nothing: in random draws the least heard "
         f"key got {v['a4']:.0e} of 1/S. Normalized over queries first, then over keys, every key gets 1/S or more: {v['a1']:.2f} times "
         "that in the same draws, and no larger bound is true."),
        (("a6", "a8"), lambda v: "The price: whatever is added to all logits of one key cancels, and the promise is about sums alone: one "
         f"query can be {100 * v['a8']:.0f} % of what a key gets."),
        (("b2", "b4"), lambda v: "It cannot be causal: with a causal mask on rows alone, earlier weights change by up to "
         f"{v['b2']:.2f} when the last query does. Sums over the queries seen so far leak nothing and keep the promise, which each token "
         "then owes to itself."),
        (("c1", "c3", "c4"), lambda v: f"In a trained encoder {100 * v['c1']:.2f} % of keys are explained away in the promise's sense. "
         "What double normalization does change is the other end: the loudest key of a head falls to "
         f"{100 * v['c3']:.0f} % of what it got, and {100 * v['c4']:.0f} % of all weight moves."),
        (("c5",), lambda v: f"In causal models {100 * v['c5']:.1f} % of keys are."),
        (("d1",), lambda v: f"Trained, it changes the loss of a masked language model by {v['d1']:+.4f} nats against softmax."),
        (("d2",), lambda v: f"The hybrid, which learns how much of each, changes it by {v['d2']:+.4f} nats."),
        (("d3", "d4"), lambda v: f"Keys explained away after training: {100 * v['d4']:.2f} % with softmax, {100 * v['d3']:.2f} % doubly "
         "normalized."),
    )  # fmt: skip
    lines = [f"- {tell(v)}" for needs, tell in said if v.keys() >= set(needs)]
    return ["## In short", "", *lines, ""] if lines else []


def page(document: Mapping[str, Any]) -> Part:
    """Lines of Markdown, with (figure:NAME) where a figure's link goes, and the figures by name."""
    found = {entry["id"]: entry["numbers"] for entry in document["claims"] if entry["measured"] is not None}
    lines, figures = list[str](), dict[str, str]()
    sections: tuple[tuple[Callable[[Entries], Part], tuple[str, ...]], ...] = ((_promise, ("a1", "a7")), (_models, ()), (_training, ()))
    for section, needs in sections:
        if found.keys() >= set(needs):
            more, drawn = section(found)
            lines += ["", *more] if more else []
            figures |= drawn
    return lines, figures


def _promise(found: Entries) -> Part:
    a1, a7 = found["a1"], found["a7"]
    lines = [
        "## a. What a key is promised", "",
        f"Random logits, {a1['keys']} queries and keys; the least column sum times the number of keys, so that 1 is the promise. Keys",
        "explained away are those that get less than it under softmax.", "",
        "| standard deviation of logits | softmax, least | doubly normalized, least | explained away by softmax |", "|---|---|---|---|",
        *(f"| {r['size']:g} | {r['softmax']:.2g} | {r['doubly']:.3g} | {r['away']:.1%} |" for r in a1["rows"]), "",
        "More rounds of the same two steps go on to maps whose columns all sum to 1 (logits of standard deviation 5):", "",
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
            Panel(f"{model}{', prefix sums' if causal else ''}", "share of keys", "column sum", series, y_scale="log", y_limits=(1e-4, 1e2))
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
    held = next((found[key] for key in ("d1", "d2") if key in found), None)
    if held is None:
        return [], {}
    lines = [
        "## d. Training", "", "Masked language models; report loss by seed, the rest is the mean of seeds.", "",
        "| arm | rate | report loss | explained away | least column sum | entropy |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for each in held["arms"]:
        losses = ", ".join(f"{end['loss']:.4f}" for end in each["ends"])
        rest = " | ".join(_of(each, name, digits) for name, digits in (("explained_away", 4), ("column_least", 3), ("entropy", 2)))
        lines.append(f"| {each['arm']} | {each['rate']:g} | {losses} | {rest} |")
    return lines, {}


def _of(each: Mapping[str, Any], name: str, digits: int) -> str:
    values = [end[name] for end in each["ends"] if end.get(name) is not None]
    return f"{sum(values) / len(values):.{digits}f}" if values else "-"
