"""The report's own part: what the gate is, what it undoes, the paper's table and the runs, from the JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locater_papers.engine.arms import uniform_first
from locater_papers.engine.arms_page import (
    Entries,
    Part,
    Said,
    Sections,
    carried_in,
    failed,
    failed_said,
    in_sections,
    in_short,
    means_table,
    numbers_of,
    sinks_said,
)
from locater_papers.engine.figures import Panel, Series, draw
from locater_papers.engine.mechanism_runs import BASE
from locater_papers.engine.sink_runs import arm_means, sinks_section
from locater_papers.engine.strips import strips

UNIFORM = uniform_first(BASE.length)  # the first token's share of rows under uniform attention
NAMES = {
    "softmax": "no gate", "gated": "per head", "gated(per=element)": "per element",
    "gated(position=value, per=element)": "values, per element", "gated(position=key)": "keys, per head",
    "gated(position=query)": "queries, per head", "gated(from_input=False)": "without input, per head",
    "gated(score=ns_sigmoid, per=element)": "NS-sigmoid, per element", "gated(shared=True, per=element)": "shared, per element",
}  # fmt: skip


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    sections: Sections = (
        (_gates, ("a1", "a4", "a7")), (_nonlinear, ("b2", "b6", "b7")), (_table, ("c1",)), (_training, ()), (_hot, ("e1",)),
        (_sinks, ("f1",)),
    )  # fmt: skip
    return in_sections(document, sections)


def lead(document: Mapping[str, Any]) -> list[str]:
    """What the gate does and does not do, for a reader who knows nothing of the paper; only what was measured."""
    weight, share = arm_means(numbers_of(document)), arm_means(numbers_of(document), "first_mass")
    said: Said = (
        (("a1", "a2"), lambda v: "Gated attention multiplies what a head gives by a sigmoid of the token that asks. The paper's forms are "
         f"what they are said to be (errors up to {v['a1']:.0e}), and the gate of Qwen3-Next is one of them."),
        (("b1", "b2", "b5"), lambda v: f"Without a gate a head is linear in its tokens (R² = {1 - v['b1']:.2f}). A gate around 1/2 leaves "
         f"{v['b2']:.2f} of that; one that is as closed as in the paper's best model leaves {v['b5']:.2f}. What makes a head nonlinear is "
         "that its gate is closed, more than that there is one."),
        (("b7", "b8", "a9"), lambda v: "The paper explains the gain by W_V and W_O, which no longer merge. That is so per element. Per "
         f"head they merge as before (error {v['b8']:.0e}), and a gate that ignores the input adds no function at all "
         f"(error {v['a9']:.0e})."),
        (("c1", "c5", "c6"), lambda v: f"Yet in the paper's own table one gate per head has {v['c5']:.0%} of the gain and the gate without "
         f"input {v['c6']:.0%}: more than the merge is at work. Over the six variants of the table, sink and largest activation follow the "
         f"mean gate in the same order (rank correlation {v['c1']:.0f})."),
        (("d1", "d2"), lambda v: f"In training, as seen at this size, the gate changes the loss by {v['d1']:+.3f} nats per element and "
         f"{v['d2']:+.3f} per head."),
        (("d7", "d8"), lambda v: sinks_said(
            numbers_of(document), f"the gate changes its share by {v['d7']:+.4f} per element and {v['d8']:+.4f} per head", BASE.length)),
        (("d13",), lambda v: f"It changes the largest activation over the median by {v['d13']:+.1f}."),
        (("f1", "f2", "f3", "f4", "f7"), lambda v: "In one layer on a source where a head has nothing to add most of the time, the first "
         f"token has {share['softmax']:.2f} of rows under softmax. With a gate it has {share['gated(per=element)']:.2f} of the map behind "
         f"the gate per element and {share['gated']:.2f} per head, with gates on values "
         f"{share['gated(position=value, per=element)']:.2f}, with gates that ignore the input {share['gated(from_input=False)']:.2f}."),
        (("f1", "f10", "f11"), lambda v: f"What acts of that is {weight['gated(per=element)']:.3f} per element and {weight['gated']:.3f} "
         f"per head, where softmax gives {weight['softmax']:.2f}: gates close more than maps change."),
        (("e1",), lambda v: f"At a hot learning rate its loss is {v['e1']:+.2f} nats from that of the plain model."),
    )  # fmt: skip
    return in_short(document, said)


def _gates(found: Entries) -> Part:
    start, rows = found["a4"]["at_start"], found["a7"]["value_gate_rows"]
    lines = [
        "## a. What a gate computes", "",
        "A gate is g = sigmoid(x W_g), x the input of the layer. It may stand in four places of a head, and a fifth behind W_O:", "",
        "| place | per head | per element | rows of the map | can a query look away? |", "|---|---|---|---|---|",
    ]  # fmt: skip
    mass = {"output": ("sum to the gate", "yes"), "value": ("sum to a mean of gates", "from gated keys"), "key": ("sum to 1", "no"),
            "query": ("sum to 1", "no")}  # fmt: skip
    for place, (rows_of, away) in mass.items():
        errors = (f"{found['a1']['by_form'][f'{place}, per {per}']:.0e}" for per in ("head", "element"))
        lines.append(f"| {place} | {' | '.join(errors)} | {rows_of} | {away} |")
    lines += [
        "", f"Errors are relative, beside loops over heads and tokens. With gates on values rows summed to {rows[0]:.2f} to {rows[1]:.2f}.",
        f"Before training gates are {start['mean']:.2f} ± {start['sd']:.2f} (weights of deviation 0.02 at a width of 256), so that a new",
        "gate halves what attention adds.",
    ]  # fmt: skip
    if "a2" in found:
        read = found["a2"]["readings"]
        lines += [
            "", "Where the gate is in the weights of Qwen3-Next, by the output of a random layer of transformers: query and gate rows of",
            "`q_proj` read " + ", ".join(f"{name}: error {error:.0e}" for name, error in read.items()) + ". A converter that takes the "
            "wrong reading runs and is wrong.",
        ]  # fmt: skip
    return lines, {}


def _sinks(found: Entries) -> Part:
    return sinks_section(found, "f", NAMES)


def _nonlinear(found: Entries) -> Part:
    held = found["b2"]["curves"]
    first = Panel(
        "R² of a linear fit, gate around 1/2", "deviation of the gate's logits", "R²",
        [
            Series("fitted", list(zip(held["sharpness"], held["fitted"], strict=True)), "dots", 0),
            Series("formula of b4", list(zip(held["sharpness"], held["formula"], strict=True)), "line", 1),
        ],
        y_limits=(0, 1.05),
    )  # fmt: skip
    second = Panel(
        "R² of a linear fit, gates that close", "mean gate", "R²",
        [
            *_dotted(list(zip(held["gate"], held["closed"], strict=True))),
            Series(f"the paper's best: {held['best']:g}", [(held["best"], 0.0), (held["best"], 1.0)], "dashed", 4),
        ],
        y_limits=(0, 1.05), x_limits=(0, 0.55), legend="bottom right",
    )  # fmt: skip
    ranks = ", ".join(f"{name}: {x:.2f}" for name, x in found["b6"]["by_kind"].items())
    spans = ", ".join(f"{name}: {held[0]:.2f}" for name, held in found["b7"]["spans"].items())
    lines = [
        "## b. What the gate undoes", "", "![linearity](figure:linear)", "",
        "A head with its map held, fitted by a linear function of all its tokens. A gate without a bias leaves at least half of the",
        "variance linear, whatever its weights; a gate that is mostly closed does not.", "",
        f"Rank of a head's output over the head's size: {ranks}. The gate does not raise it.",
        f"Number of independent maps W_V diag(g) W_O that tokens see, over the head's size: {spans}.",
        "Per head it is one map, so that W_V and W_O merge; per element there are as many as the head has channels.",
    ]  # fmt: skip
    return lines, {"linear": draw([first, second])}


def _dotted(points: Sequence[tuple[float, float]]) -> list[Series]:
    return [Series("", points, "line", 0), Series("", points, "dots", 0)]


def _table(found: Entries) -> Part:
    rows = found["c1"]["rows"]
    lines = [
        "## c. The paper's table", "", "![table](figure:table)", "",
        "| variant | parameters added, millions | perplexity | mean gate | largest activation | first token | first token x gate |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        gate, acting = (
            (f"{r['gate']:.3f}", f"{r['gate'] * r['sink']:.3f}") if r["gate"] < 1 else ("-", f"{r['sink']:.3f}")
        )
        added = "-" if r["added"] is None else f"{r['added']:g}"
        lines.append(
            f"| {r['name']} | {added} | {r['perplexity']:.3f} | {gate} | {r['largest']:g} | {r['sink']:.3f} | {acting} |"
        )
    lines += ["", "The last column is ours: what is left of the sink once the gate has acted."]
    gated = [r for r in rows if r["gate"] < 1]
    first = Panel(
        "sink against mean gate", "mean gate", "first-token attention", _dotted([(r["gate"], r["sink"]) for r in gated])
    )
    second = Panel(
        "perplexity against mean gate",
        "mean gate",
        "perplexity",
        _dotted([(r["gate"], r["perplexity"]) for r in gated]),
    )
    return lines, {"table": draw([first, second])}


def _training(found: Entries) -> Part:
    held = carried_in(found)
    if held is None:
        return [], {}
    arms = [{**arm, "arm": NAMES.get(arm["arm"], arm["arm"])} for arm in held["arms"]]
    columns = {"first_mass": ("first token", 3), "sink_rate": ("sink rate", 2), "spike_ratio": ("spike", 1), "row_mass": ("row mass", 2),
               "gate": ("mean gate", 3)}  # fmt: skip
    lines = [
        "## d. Gates in training", "",
        f"One causal model of {BASE.layers} layers and width {BASE.width}. No gate and one gate per head are at the better of two learning",
        "rates, variations at the higher of the two. Beside losses, means over seeds. First token: its share of a row (uniform attention",
        f"over {BASE.length} tokens: {UNIFORM:.3f}). Spike: largest entry of the stream over the median.", "",
        *means_table(arms, columns),
    ]  # fmt: skip
    lost = failed(arms, arms[0])
    lines += ["", failed_said(lost) + " These arms are left out of the picture of losses."] if lost else []
    plain, *others = arms
    losses = {
        arm["arm"]: [end["loss"] - base["loss"] for end, base in zip(arm["ends"], plain["ends"], strict=False)]
        for arm in others
        if arm["arm"] not in lost
    }
    firsts = {arm["arm"]: [end["first_mass"] for end in arm["ends"] if end["first_mass"] is not None] for arm in arms}
    figures = {
        name: strips(title, x, {k: v for k, v in held.items() if v})
        for name, title, x, held in (
            ("training", "report loss against no gate", "nats", losses), ("first", "first token's share of rows", "share", firsts),
        )
        if any(held.values())
    }  # fmt: skip
    return [*lines, *(line for name in figures for line in ("", f"![{name}](figure:{name})"))], figures


def _hot(found: Entries) -> Part:
    held = found["e1"]
    losses = "; ".join(f"{name}: {', '.join(f'{x:.2f}' for x in values)}" for name, values in held["losses"].items())
    return [
        "## e. A hot learning rate",
        "",
        f"Report loss by seed after {held['steps']} steps at {held['rate']:g}. {losses}.",
    ], {}
