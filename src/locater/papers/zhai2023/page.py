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
        (("a1", "a2"), lambda v: "The theorem is right: no random layer has less entropy than the spectral norms of its weights and tokens "
         "allow, and one layer has exactly that."),
        (("c1", "c2", "c3"), lambda v: f"On trained models it is empty: the median bound is {_tiny(v['c1'])} nats. Even with the logits "
         f"themselves at hand, their norm explains {100 * v['c2']:.2g} % of the entropy and their range {100 * v['c3']:.0f} %."),
        (("b6",), lambda v: "It is so by design, not by bad luck: with gamma = 1, normalised tokens and the best case for them, it "
         f"promises {v['b6']:.0e} nats."),
        (("c4", "c5"), lambda v: "As an order it holds up: over heads, entropy falls with the norm of logit rows (rank correlation "
         f"{v['c5']:.2f} or stronger in every model), and less tightly with the spectral norm of the weights ({v['c4']:.2f})."),
        (("b2", "b3"), lambda v: "One step of power iteration a training step lags behind: the worst map's norm is "
         f"{100 * v['b2']:.0f} % too low at times, the median map's {100 * v['b3']:.1f} %."),
        (("d1", "d2", "d3"), lambda v: f"What is promised to training comes true here: it survives rates {v['d1']:.0f} times as hot, with "
         f"{v['d3']:.1f} nats of entropy where the plain model has {v['d2']:.3f}."),
        (("d4",), lambda v: f"At the best rates it changes the loss by {v['d4']:+.3f} nats."),
        (("e1",), lambda v: f"Begun with gamma = 1 its loss is {v['e1']:+.4f} nats of that with each map's own norm."),
    )  # fmt: skip
    lines = [f"- {tell(v)}" for needs, tell in said if v.keys() >= set(needs)]
    return ["## In short", "", *lines, ""] if lines else []


def _tiny(x: float) -> str:
    return f"{x:.1g}" if x > 0 else "less than 1e-300"


def page(document: Mapping[str, Any]) -> Part:
    """Lines of Markdown, with (figure:NAME) where a figure's link goes, and the figures by name."""
    found = {entry["id"]: entry["numbers"] for entry in document["claims"] if entry["measured"] is not None}
    lines, figures = list[str](), dict[str, str]()
    sections: tuple[tuple[Callable[[Entries], Part], tuple[str, ...]], ...] = (
        (_floor, ("a1", "a7")), (_reparam, ("b2", "b5", "b6")), (_models, ("c1",)), (_hot, ("d1",)), (_tuned, ("d4",)), (_gamma, ()),
    )  # fmt: skip
    for section, needs in sections:
        if found.keys() >= set(needs):
            more, drawn = section(found)
            lines += ["", *more] if more else []
            figures |= drawn
    return lines, figures


def _floor(found: Entries) -> Part:
    a1, a7 = found["a1"], found["a7"]
    panel = Panel(
        "least entropy of a row", "s, norm of its centred logits, or their range", "nats",
        [
            Series("norm s, 256 tokens", [(c["s"], c["256"]) for c in a1["curve"]], "line", 0),
            Series("norm s, 16 tokens", [(c["s"], c["16"]) for c in a1["curve"]], "line", 1),
            Series("range s, 256 tokens", [(c["s"], c["range"]) for c in a1["curve"]], "dashed", 0),
        ],
        x_scale="log", y_limits=(0, 6),
    )  # fmt: skip
    lines = [
        "## a. The floor", "", "![floor](figure:floor)", "",
        "What a bound on logits says of entropy. A bound s on the l2 norm of a row, less its mean, is the theorem's; it is enough for one",
        "logit to stand out by about s. A bound on the range is what caps and normalised queries and keys give.", "",
        f"In random layers the theorem's bound is {a1['median_share']:.1%} of that of the row's own norm (median). Of 64 logits within a",
        f"range of 2 the least entropy has {a7['high']} high ones; one high logit would have {a7['one']:.3f} nats.",
    ]  # fmt: skip
    return lines, {"floor": draw([panel])}


def _reparam(found: Entries) -> Part:
    b2, b5, b6 = found["b2"], found["b5"], found["b6"]
    panel = Panel(
        "sigma against the exact norm, worst map", "step", "share by which it is too low",
        [
            Series(f"rate {rate}", [(float(n), x) for n, x in enumerate(held)], "line", i)
            for i, (rate, held) in enumerate(b2["curve"].items())
        ],
        y_limits=(-0.02, 0.6),
    )  # fmt: skip
    lines = [
        "## b. The reparametrization", "", "![power iteration](figure:power)", "",
        f"A model of two layers, {b2['steps']} steps of AdamW, one step of power iteration each, against an SVD. The estimate is never too",
        "high; where it is too low by a share e, the map acts with gamma / (1 - e). It lags where training grows a new direction.",
        "",
        "| rate | worst map, from step 10 on | median map, mean of the first steps | worst map, last step |", "|---|---|---|---|",
        *(f"| {r['rate']:g} | {r['largest']:.1%} | {r['median']:.2%} | {r['last']:.1%} |" for r in b2["rows"]), "",
        f"Were sigma a constant for gradients, the cosine of W and its gradient would be up to {b5['sigma_held']:.2f} in place of 0.", "",
        f"b6: with gamma = 1, s is {b6['s']:.0f} at the least; one nat would be promised from gamma = {b6['gamma_for_one_nat']:.2f} down.",
    ]  # fmt: skip
    return lines, {"power": draw([panel])}


def _models(found: Entries) -> Part:
    c1 = found["c1"]
    tiny = 1e-6
    panel = Panel(
        "entropy of heads and what bounds it", "entropy, nats", "bound, nats",
        [
            Series("range of logits", [(p[0], max(p[2], tiny)) for p in c1["points"]], "dots", 0),
            Series("norm of logits", [(p[0], max(p[1], tiny)) for p in c1["points"]], "dots", 1),
            Series("equal", [(0.05, 0.05), (5.0, 5.0)], "dashed", 4),
        ],
        y_scale="log", x_limits=(0.0, 5.2), y_limits=(tiny, 10.0), legend="bottom right",
    )  # fmt: skip
    lines = [
        "## c. On trained heads", "", "![bounds](figure:bounds)", "",
        f"Each dot is a head, on {c1['tokens']} tokens; bounds under 1e-6 are drawn there. Medians over heads; rank correlations with",
        "entropy.", "",
        "| model | entropy | s of the theorem | its bound | norm of rows | its bound | bound by range | correlation, weights | logits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in c1["rows"]:
        bounds = f"{r['s']:,.0f} | {_tiny(r['theorem'])} | {r['norm']:.1f} | {r['row']:.1g} | {r['range']:.2f}"
        lines.append(f"| {r['model']} | {r['entropy']:.2f} | {bounds} | {r['spectral']:.2f} | {r['norm_order']:.2f} |")
    return lines, {"bounds": draw([panel])}


def _hot(found: Entries) -> Part:
    d1 = found["d1"]
    names = {"none": "plain", "sigma-reparam": "sigma-Reparam"}
    panels = [
        Panel(
            title, "learning rate", what,
            [
                Series(said, [(r["rate"], max(r[key], 1e-3)) for r in d1["rows"] if r["control"] == name and r[key] is not None], "line", i)
                for i, (name, said) in enumerate(names.items())
            ],
            x_scale="log", x_limits=(0.004, 0.15), y_scale=scale, y_limits=limits,  # type: ignore[arg-type]
        )
        for title, what, key, scale, limits in (
            ("hot rates: loss", "report loss, nats", "loss", "linear", None),
            ("hot rates: entropy", "entropy, nats", "entropy", "log", (1e-3, 10.0)),
        )
    ]  # fmt: skip
    lines = [
        "## d. Training", "", "![hot rates](figure:hot)", "",
        f"Runs of {d1['steps']} steps, two seeds each. Highest rate survived, by seed: "
        + "; ".join(f"{names[name]} {', '.join(f'{x:g}' for x in held)}" for name, held in d1["survived"].items())
        + ".",
    ]  # fmt: skip
    return lines, {"hot": draw(panels)}


def _tuned(found: Entries) -> Part:
    return ["Each at its best of three rates:", "", *_table(found["d4"]["arms"], found["d4"]["entropy"])], {}


def _gamma(found: Entries) -> Part:
    held = next((found[key] for key in ("e1", "e2") if key in found), None)
    return ([], {}) if held is None else (["## e. Where gamma begins", "", *_table(held["arms"])], {})


def _table(arms: list[dict[str, Any]], entropies: Mapping[str, float] | None = None) -> list[str]:
    lines = ["| arm | rate | report loss, by seed | entropy | F |", "|---|---|---|---|---|"]
    for each in arms:
        losses = ", ".join(f"{end['loss']:.4f}" for end in each["ends"])
        entropy = f"{entropies[each['arm']]:.2f}" if entropies and each["arm"] in entropies else _of(each, "entropy")
        lines.append(f"| {each['arm']} | {each['rate']:g} | {losses} | {entropy} | {_of(each, 'F')} |")
    return lines


def _of(each: Mapping[str, Any], name: str) -> str:
    values = [end[name] for end in each["ends"] if end.get(name) is not None]
    return f"{sum(values) / len(values):.2f}" if values else "-"
