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

NAMES = {"none": "plain", "sigma-reparam": "sigma-Reparam"}  # arms of bao2024
COLUMNS = {"entropy": ("entropy", 2), "F": ("F, variance of logits", 2)}


def lead(document: Mapping[str, Any]) -> list[str]:
    """What was asked and what was found, from what was measured."""
    said: Said = (
        (("a1", "a2"), lambda v: "The theorem is right: no random layer has less entropy than the spectral norms of its weights and tokens "
         "allow, and one layer has exactly that."),
        (("c1", "c2", "c3"), lambda v: f"On trained models it is empty: the median bound is {_tiny(v['c1'])} nats. Even with the logits "
         f"themselves at hand, their norm explains {100 * v['c2']:.2g} % of the entropy and their range {100 * v['c3']:.0f} %."),
        (("b6",), lambda v: "It is so by design, not by bad luck: with gamma = 1, normalised tokens and the best case for them, it "
         f"promises {v['b6']:.0e} nats."),
        (("c4", "c5"), lambda v: "As an order it holds up: over heads, entropy falls with the norm of logit rows (rank correlation "
         f"{v['c5']:.2f} in the model where it is weakest), and less tightly with the spectral norm of the weights ({v['c4']:.2f})."),
        (("b2", "b3"), lambda v: "One step of power iteration a training step lags behind: the worst map's norm is "
         f"{100 * v['b2']:.0f} % too low at times, the median map's {100 * v['b3']:.1f} %."),
        (("d1", "d2", "d3"), lambda v: f"What is promised to training comes true at this size: it survives rates {v['d1']:.0f} times "
         f"as hot, with {v['d3']:.1f} nats of entropy where the plain model has {v['d2']:.3f}."),
        (("d4",), lambda v: f"At the best rates it changes the loss by {v['d4']:+.3f} nats, as seen at this size."),
        (("e1",), lambda v: f"Begun with gamma = 1 its loss is {v['e1']:+.4f} nats from that with each map's own norm."),
    )  # fmt: skip
    return in_short(document, said)


def _short(x: float) -> str:
    """1e-6, not 1e-06."""
    return f"{x:g}".replace("e-0", "e-")


def _tiny(x: float) -> str:
    return f"{x:.1g}" if x > 0 else "less than 1e-300"


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    sections: Sections = (
        (_floor, ("a1", "a7")), (_reparam, ("b2", "b5", "b6")), (_models, ("c1",)), (_hot, ("d1",)), (_tuned, ("d4",)), (_gamma, ()),
    )  # fmt: skip
    return in_sections(document, sections)


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
        f"In random layers the theorem's bound is {a1['median_share']:.1%} of that of the row's own norm (median). Of {a7['tokens']} "
        "logits within a",
        f"range of {a7['range']:g} the least entropy has {a7['high']} high ones; one high logit would have {a7['one']:.3f} nats.",
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
        f"| rate | worst map, from step 10 on | median map, mean of the first {b2['first']} steps | worst map, last step |",
        "|---|---|---|---|",
        *(f"| {r['rate']:g} | {r['largest']:.1%} | {r['median']:.2%} | {r['last']:.1%} |" for r in b2["rows"]), "",
        f"Were sigma a constant for gradients, the cosine of W and its gradient would be up to {b5['sigma_held']:.2f} in place of 0.", "",
        f"b6: gamma = 1 lets s be {b6['s']:.0f}, even for tokens at right angles; one nat would be promised from gamma = "
        f"{b6['gamma_for_one_nat']:.2f} down.",
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
        f"Each dot is a head, on {c1['tokens']} tokens; bounds under {_short(tiny)} are drawn there. Medians over heads;",
        "rank correlations with entropy.", "",
        "| model | entropy | s of the theorem | its bound | norm of rows | its bound | bound by range | correlation, weights | logits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in c1["rows"]:
        bounds = f"{r['s']:,.0f} | {_tiny(r['theorem'])} | {r['norm']:.1f} | {r['row']:.1g} | {r['range']:.2f}"
        lines.append(f"| {r['model']} | {r['entropy']:.2f} | {bounds} | {r['spectral']:.2f} | {r['norm_order']:.2f} |")
    return lines, {"bounds": draw([panel])}


def _hot(found: Entries) -> Part:
    d1 = found["d1"]
    panels = [
        Panel(
            title, "learning rate", what,
            [
                Series(said, [(r["rate"], max(r[key], 1e-3)) for r in d1["rows"] if r["control"] == name and r[key] is not None], "line", i)
                for i, (name, said) in enumerate(NAMES.items())
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
        f"Runs of {d1['steps']} steps. Highest rate survived, by seed: "
        + "; ".join(f"{NAMES[name]} {', '.join(f'{x:g}' for x in held)}" for name, held in d1["survived"].items())
        + f". The hottest that was tried: {max(r['rate'] for r in d1['rows']):g}.",
    ]  # fmt: skip
    return lines, {"hot": draw(panels)}


def _tuned(found: Entries) -> Part:
    held = found["d4"]
    arms = []
    for arm in held["arms"]:
        # these runs keep it beside `measures`
        known = {"entropy": held["entropy"][arm["arm"]]} if arm["arm"] in held["entropy"] else {}
        arms.append({**arm, "arm": NAMES.get(arm["arm"], arm["arm"]), "ends": [end | known for end in arm["ends"]]})
    return ["Each at the best of its rates, as seen at this size:", "", *means_table(arms, COLUMNS)], {}


def _gamma(found: Entries) -> Part:
    held = carried_in(found, "begun")
    return ([], {}) if held is None else (["## e. Where gamma begins", "", *means_table(held["begun"], COLUMNS)], {})
