"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from locater_papers.engine.arms_page import (
    Entries,
    Part,
    Said,
    arms_table,
    carried_in,
    in_sections,
    in_short,
    numbers_of,
)
from locater_papers.engine.figures import Panel, Series, draw
from locater_papers.xiao2026.flattening import TOKENS
from locater_papers.xiao2026.signs import KEYS


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    return in_sections(
        document,
        ((_signs, ("a5", "a6", "a8", "a11")), (_flattening, ("b1", "b2")), (_models, ("c1",)), (_training, ())),
    )


def lead(document: Mapping[str, Any]) -> list[str]:
    """What one bit per channel keeps and what it costs; only what was measured."""
    numbers = numbers_of(document)
    said: Said = (
        (("a1", "a3"), lambda v: "Binary attention keeps one bit per channel of queries and keys, so that a logit is a count of equal bits "
         "times a scale. That much is exact, and so are the bound on logits and the least entropy that follow from it."),
        (("b2", "b3", "b4", "b6"), lambda v: f"Of random queries and keys, signs leave {v['b2']:.2f} of the spread of logits and a rank "
         f"correlation of {v['b6']:.2f} with the real ones; rows of {TOKENS} keys go from {v['b3']:.2f} to {v['b4']:.2f} nats."),
        (("c1", "c4", "c5"), lambda v: _models_said(v, numbers)),
        (("a11",), lambda v: "With rotary positions signs lose what these are for: moving all tokens by "
         f"{numbers['a11']['shift']} places changes logits by {v['a11']:.2f} of their spread, and real ones not at all. The paper's own "
         "models have no rotary positions."),
        (("d1",), lambda v: f"Trained from scratch on text, as seen at this size, it ends {v['d1']:+.3f} nats from softmax"
         + (f"; the learned bias changes the loss by {v['d2']:+.3f}." if "d2" in v else ".")),
    )  # fmt: skip
    return in_short(document, said)


def _models_said(v: Mapping[str, float], numbers: Entries) -> str:
    models = numbers["c1"]["models"]
    causal = {name: m for name, m in models.items() if m["causal"]}
    losses = ", ".join(f"{name} {m['loss']:.2f} to {m['binary_loss']:.2f}" for name, m in causal.items())
    undone = sorted(100 * (1 - m["restored_divergence"] / m["divergence"]) for m in causal.values())
    share = f"{undone[0]:.0f} %" if len(undone) == 1 else f"{undone[0]:.0f} to {undone[-1]:.0f} %"
    blame = "it is the order of keys that is lost more than the scale" if undone[-1] < 50 else "much of it is scale"
    return (
        f"Made binary as it is, a trained model moves its next token's distribution by up to {v['c4']:.2f} nats (loss: {losses}). Giving "
        f"logits their spread back undoes {share} of that: {blame}. The paper fine-tunes after the change."
    )


def _signs(found: Entries) -> Part:
    lines = [
        "## a. One bit, exactly", "",
        "The softmax of counts of equal bits, against bits packed into whole numbers. Entropy cannot fall below the floor, in nats for "
        f"{KEYS} keys:", "",
        "| channels | levels seen | levels at most | bound on a logit | floor | least entropy seen |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for c in found["a5"]["cases"]:
        lines.append(
            f"| {c['size']} | {c['levels']} | {c['most']} | {c['bound']:.2f} | {c['floor']:.3g} | {c['least_entropy']:.3f} |"
        )
    reach = "; ".join(
        f"d = {c['size']}, mu = {c['mu']:g}: {c['high_keys']} (floor {c['floor']:.3f})" for c in found["a6"]["rows"]
    )
    moved = ", ".join(f"{name} {value:.2g}" for name, value in found["a11"]["moved"].items())
    lines += [
        "", f"How many keys agree with the query in the sharpest row: {reach}.", "",
        f"a11: all positions moved by {found['a11']['shift']}, change of logits over their spread: {moved}.", "",
        "a8: share of entries whose sign passes no gradient, and what a normal of that rms would give:", "",
        "| rms | " + " | ".join(found["a8"]["by_rms"]) + " |", "|---" * (len(found["a8"]["by_rms"]) + 1) + "|",
    ]  # fmt: skip
    for title, key in (("cut", "cut"), ("normal", "normal")):
        lines.append(f"| {title} | " + " | ".join(f"{x[key]:.3f}" for x in found["a8"]["by_rms"].values()) + " |")
    return lines, {}


def _flattening(found: Entries) -> Part:
    law, sizes = found["b1"]["law"], found["b2"]["sizes"]
    grid = [i / 50 for i in range(-50, 51)]
    first = Panel(
        "arcsine law", "correlation of the entries", "mean product of signs",
        [Series("(2/π) asin r", [(r, 2 / math.pi * math.asin(r)) for r in grid], "line", 0),
         Series("measured", [(x["r"], x["mean"]) for x in law], "dots", 1)],
    )  # fmt: skip
    second = Panel(
        "how much of the order is kept", "channels of a head", "correlation with real logits",
        [Series("of ranks", [(x["size"], x["rank"]) for x in sizes], "line", 1),
         Series("of logits", [(x["size"], x["correlation"]) for x in sizes], "line", 0),
         Series("same strongest key", [(x["size"], x["top"]) for x in sizes], "line", 2)],
        x_scale="log", y_limits=(0, 1), legend="top right",
    )  # fmt: skip
    lines = [
        "## b. Gaussian queries and keys", "", "![the arcsine law, and what is kept of the order of keys](figure:flattening)", "",
        f"{TOKENS} keys, entries N(0, 1), no bias:", "",
        "| channels | spread of logits, binary / real | binary entropy | correlation | rank correlation | same strongest key |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for x in sizes:
        lines.append(
            f"| {x['size']} | {x['spread']:.3f} | {x['binary']:.3f} | {x['correlation']:.3f} | {x['rank']:.3f} | {x['top']:.2f} |"
        )
    if "b7" in found:
        worst, held = found["b7"]["worst"], found["b7"]["by_size"]
        lines += [
            "",
            f"b7: the rank correlation is farthest from 0.62 at d = {worst}, where many counts tie: {held[str(worst)]:.3f}.",
        ]
    return lines, {"flattening": draw([first, second])}


def _models(found: Entries) -> Part:
    models = found["c1"]["models"]
    lines = [
        "## c. Trained models made binary as they are", "",
        "Attention replaced, nothing trained after it, no bias. Text is the documentation inside Python. Entropy, strongest key and order "
        "are means over heads and the later half of the rows; ×π/2 gives logits the spread back that signs take from Gaussian ones.", "",
        "| model | head size | entropy | binary | same strongest key | rank correlation | outside of the gradient's window | loss | binary "
        "| ×π/2 | divergence | ×π/2 |", "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    panels = []
    for name, m in models.items():
        own = f"| {name} | {m['size']:.0f} "
        own += f"| {m['entropy']:.2f} | {m['binary_entropy']:.2f} | {m['top']:.2f} | {m['rank']:.2f} | {m['outside']:.2f} |"
        if m["causal"]:
            keys = ("loss", "binary_loss", "restored_loss", "divergence", "restored_divergence")
            lines.append(own + " " + " | ".join(f"{m[k]:.2f}" for k in keys) + " |")
        else:
            lines.append(own + f" - | - | - | cosine {m['cosine']:.2f} | {m['restored_cosine']:.2f} |")
        series = [
            Series(title, [(float(i), layer[key]) for i, layer in enumerate(m["layers"])], "line", number)
            for number, (title, key) in enumerate((("softmax", "entropy"), ("binary", "binary_entropy")))
        ]
        panels.append(Panel(name, "layer", "mean entropy, nats", series, y_limits=(0, 5)))
    lines += ["", "Divergence is that of the next token's distribution from the model's own, in nats: what is lost on text that the model",
              "itself would write. For the encoder, the cosine of pooled outputs with those of before.", "",
              "![entropy by layer](figure:models)"]  # fmt: skip
    return lines, {"models": draw(panels)}


def _training(found: Entries) -> Part:
    held = carried_in(found)
    if held is None:
        return [], {}
    columns = {"loss": "loss", "accuracy": "accuracy", "entropy": "entropy", "entropy_share": "share of its most"}
    return [
        "## d. Trained from scratch", "",
        "The paper starts from a trained model. Here nothing is trained before. Softmax and binary attention on text are at the better of",
        "two learning rates, other arms at one. Numbers by seed; verdicts wait for all seeds of an arm.", "",
        *arms_table(held["arms"], columns),
    ], {}  # fmt: skip
