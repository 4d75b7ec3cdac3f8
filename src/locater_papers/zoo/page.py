"""The zoo's page: one table, one picture per measure, from the JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from locater_papers.engine.arms import uniform_first
from locater_papers.engine.arms_page import Part, failed, failed_said, numbers_of
from locater_papers.engine.mechanism_runs import BASE
from locater_papers.engine.sink_runs import arm_means, sinks_section
from locater_papers.engine.strips import strips
from locater_papers.zoo.sinks import AWAY

Entry = Mapping[str, Any]
# measure: heading in the table, digits, title of its picture
MEASURES = {
    "entropy": ("entropy", 2, "entropy of attention, nats (rows made to sum to 1)"),
    "row_mass": ("row mass", 2, "mean sum of a row"),
    "first_mass": ("first token", 3, "share of rows on the first token"),
    "sink_rate": ("sink rate", 2, "share of heads with a sink on the first token"),
    "spike_ratio": ("spike", 0, "largest |h| over the median"),
    "residual": ("residual", 3, "rank residual after the last block"),
    "gap": ("gap", 3, "1 - s2/s1 of maps"),
    "M": ("M", 2, "mean self-logit M"),
    "F": ("Frobenius²", 1, "Frobenius² of query-key maps, logit units"),
}


def lead(document: Entry) -> list[str]:
    """The order of mechanisms, and which do something else than lower the loss."""
    held = _numbers(document, "a1")
    if held is None:
        return []
    plain = held["causal"][0]
    ranked = sorted(held["causal"], key=lambda arm: _mean(arm["ends"], "loss"))
    ahead = [arm for arm in ranked if max(_changes(arm, plain, "loss"), default=0.0) < 0]
    behind = [arm for arm in ranked if min(_changes(arm, plain, "loss"), default=0.0) > 0]
    lines = [
        "## What came out", "",
        f"One causal language model of {BASE.layers} layers and width {BASE.width}, {plain['seeds']} seeds, every mechanism at the better "
        f"of two learning rates{_untuned(held['causal'])}, {plain['device']}. What is said is of this size alone. Losses are "
        f"nats per token on text that chose nothing; softmax has {_mean(plain['ends'], 'loss'):.4f}, "
        f"perplexity {math.exp(_mean(plain['ends'], 'loss')):.2f}.", "",
        f"- Lower loss than softmax with every seed: {_named(ahead, plain)}.",
        f"- Higher loss with every seed: {_named(behind, plain)}.",
    ]  # fmt: skip
    lost = failed_said(failed(ranked, plain))
    lines += [f"- {lost}"] if lost else []
    first = min(held["causal"], key=lambda arm: _mean(arm["ends"], "first_mass"))
    lines.append(
        f"- The first token has {_mean(plain['ends'], 'first_mass'):.3f} of a row under softmax (uniform attention would give it "
        f"{uniform_first(BASE.length):.3f}) and least under {first['arm']}, {_mean(first['ends'], 'first_mass'):.3f}; "
        f"{_mean(plain['ends'], 'sink_rate'):.0%} of softmax heads have a sink there."
    )
    quiet = min(held["causal"], key=lambda arm: _mean(arm["ends"], "spike_ratio"))
    lines.append(
        f"- Largest activation over the median: {_mean(plain['ends'], 'spike_ratio'):.0f} under softmax, least under {quiet['arm']}, "
        f"{_mean(quiet['ends'], 'spike_ratio'):.0f}."
    )
    masked = held["masked"]
    if masked:
        other = "; ".join(
            f"{arm['arm'].removesuffix(', masked')} {_span(_changes(arm, masked[0], 'loss'))}" for arm in masked[1:]
        )
        lines.append(f"- Encoders, masked tokens, against softmax ({_mean(masked[0]['ends'], 'loss'):.4f}): {other}.")
    return [*lines, *_sinks_said(document), ""]


def _sinks_said(document: Entry) -> list[str]:
    """What study f saw, in a line."""
    found = numbers_of(document)
    weight, share = arm_means(found), arm_means(found, "first_mass")
    if not weight.keys() >= {"softmax", *AWAY.values()}:
        return []
    left = ", ".join(f"{name} {weight[name]:.3f}" for name in AWAY.values())
    return [
        "- Where a head has nothing to add most of the time (one layer, made-up source), softmax gives its first token "
        f"{weight['softmax']:.3f}. What others give it, as they act: {left}. The map behind the gate still has {share['gated']:.2f} of its "
        "rows there: the gate closes."
    ]


def page(document: Entry) -> Part:
    held, steps = _numbers(document, "a1"), _numbers(document, "e1")
    lines: list[str] = []
    figures: dict[str, str] = {}
    if held is not None:
        for title, kind in (
            ("Causal language model", "causal"),
            ("Masked language model: mechanisms that cannot be causal", "masked"),
        ):
            if held[kind]:
                lines += ["", f"## {title}", "", *table(held[kind], (steps or {}).get(kind, {}))]
        lines += ["", *_reading(steps), "", "## One picture per measure", ""]
        plain = held["causal"][0]
        whole = [arm for arm in held["causal"] if len(arm["ends"]) == arm["seeds"]]
        lost = failed(whole, plain)
        shown = [arm for arm in whole if arm["arm"] not in lost]
        lines += [f"Left out of the pictures, with a seed that failed: {', '.join(lost)}.", ""] if lost else []
        figures["loss"] = strips("report loss against softmax", "nats, a dot for each seed", _loss_rows(shown, plain))
        for name, (_, _, title) in MEASURES.items():
            rows = {arm["arm"]: [x[name] for x in arm["ends"]] for arm in shown if _is_known(arm, name)}
            figures[name] = strips(title, "a dot for each seed", rows)
        if steps is not None:
            base = steps["causal"]["softmax"]
            figures["step"] = strips(
                f"time of a step over that of softmax ({base:.2f} ms), {steps['device']}", "ratio",
                {name: [x / base] for name, x in steps["causal"].items()},
            )  # fmt: skip
        for name in figures:
            lines += [f"![{name}](figure:{name})", ""]
    elif steps is not None:
        lines += ["", "## Time of a step", "", *_reading(steps), "", "| | ms |", "|---|---|"]
        lines += [f"| {name} | {x:.2f} |" for kind in ("causal", "masked") for name, x in steps[kind].items()]
    more, drawn = sinks_section(numbers_of(document), "f")
    return [*lines, *(["", *more] if more else [])], figures | drawn


def table(arms: Sequence[Entry], steps: Mapping[str, float]) -> list[str]:
    """A row per mechanism; means over seeds, the loss against softmax with its range."""
    heads = " | ".join(head for head, _, _ in MEASURES.values())
    lines = [
        f"| mechanism | rate | loss | against softmax | perplexity | {heads} | step |",
        "|---|" + "---|" * (len(MEASURES) + 5),
    ]
    plain = arms[0]
    for arm in arms:
        name = arm["arm"].removesuffix(", masked")
        loss = _mean(arm["ends"], "loss")
        change = "-" if arm is plain else _span(_changes(arm, plain, "loss"))
        numbers = (
            f"{_mean(arm['ends'], key):,.{digits}f}" if _is_known(arm, key) else "-"
            for key, (_, digits, _) in MEASURES.items()
        )
        step = f"{steps[name] / steps['softmax']:.2f}" if name in steps else "-"
        lines.append(
            f"| {name} | {arm['rate']:g} | {loss:.4f} | {change} | {math.exp(loss):.2f} | {' | '.join(numbers)} | {step} |"
        )
    return lines


def _reading(steps: Entry | None) -> list[str]:
    text = (
        "Entropy is that of rows made to sum to 1, and has no meaning where weights are negative (-); in a stack it is that of the layers "
        "that have one. Row mass: what a row sums to. First "
        "token: its share of a row's absolute weight. Sink rate: heads whose first token is given more than 0.3 of rows on average. Spike: "
        "largest entry of the stream over the median one, any half-block. Residual: distance of the tokens from their mean after the last "
        "block. Gap: 1 - s2/s1 of a map. M, Frobenius²: moments of query-key maps in logit units, where heads are read (not of "
        "differential and qk_norm). The norm of differential heads makes what they add as large at first as that of a trained head, beside "
        "embeddings of 0.02: part of its loss may be this start. Where channels have maps of their own (kernels on values), maps are those "
        "of the mean channel."
    )
    if steps is not None:
        text += f" Step: time over that of softmax, {steps['device']}, {steps['model']}, in turns."
    return [text]


def _numbers(document: Entry, id: str) -> Entry | None:
    return numbers_of(document).get(id)


def _mean(ends: Sequence[Entry], name: str) -> float:
    return fmean(x[name] for x in ends)


def _is_known(arm: Entry, name: str) -> bool:
    return all(x.get(name) is not None for x in arm["ends"])


def _changes(arm: Entry, plain: Entry, name: str) -> list[float]:
    if arm["arm"] == plain["arm"]:
        return []
    return [x[name] - y[name] for x, y in zip(arm["ends"], plain["ends"], strict=False)]


def _loss_rows(arms: Sequence[Entry], plain: Entry) -> dict[str, list[float]]:
    return {arm["arm"]: _changes(arm, plain, "loss") for arm in arms if arm["arm"] != plain["arm"]}


def _named(arms: Sequence[Entry], plain: Entry) -> str:
    """With the mean change of loss over the seeds that both have."""
    return ", ".join(f"{arm['arm']} ({fmean(_changes(arm, plain, 'loss')):+.4f})" for arm in arms) or "none"


def _untuned(arms: Sequence[Entry]) -> str:
    found = [f"{arm['arm']}: {arm['seeds']} seeds at one rate" for arm in arms if len(arm["rates"]) == 1]
    return f" ({'; '.join(found)})" if found else ""


def _span(values: Sequence[float]) -> str:
    return f"{fmean(values):+.4f} ({min(values):+.4f} to {max(values):+.4f})"
