"""Sentences about a probe, for its page, the terminal and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from locater.report.probe_columns import KINDS
from locater.report.tables import counted

if TYPE_CHECKING:
    from locater.observing.stream import SeenLayer
    from locater.results.probe import Probe

ALIKE = 0.1  # share of the stream that differs between tokens, under which they are nearly the same
CLOSER = 0.8  # share of the difference that is left, under which tokens have come closer


def data_sentence(probe: Probe) -> str:
    """How many heads were measured, and on what."""
    a = probe.assumptions
    heads, layers = counted(len(probe.rows), "head"), counted(len({row.layer for row in probe.rows}), "attention layer")
    data = f" of {a['data']}" if a.get("data") else ""
    other = (
        counted(a["statistics_sequences"], "other sequence")
        if a["held_out"]
        else "the same sequences: there were no others"
    )
    sequences = counted(a["measured_sequences"], "sequence")
    return (
        f"{heads} in {layers}, measured on {sequences} of {a['length']} tokens{data}. "
        f"Predictions use the mean and covariance of what each layer reads, taken from {other}."
    )


def agreement_sentence(probe: Probe) -> str:
    """How well the predicted entropy agrees with the measured one, compared with weights alone."""
    predicted, prior = probe.agreement.get("predicted_entropy"), probe.agreement.get("prior_entropy")
    if predicted is None:
        return "Too few heads have both a measured and a predicted entropy to say how well the predictions agree."
    alone = {
        key: "" if prior is None or prior[key] is None else f" (weights alone: {_short(prior[key])})"
        for key in ("error", "spearman")
    }
    text = f"Predicted entropy is off by {_short(predicted['error'])} nats on average{alone['error']}"
    if predicted["spearman"] is None:
        return f"{text}; all heads are alike, so their order says nothing."
    order = f"{_short(predicted['spearman'])}{alone['spearman']}, where 1 is the same order"
    return f"{text} and ranks the heads with a Spearman correlation of {order}."


def agreement_of(probe: Probe, column: str) -> str:
    """`Spearman 0.96, mean error 0.17`, or nothing where too few heads have both numbers."""
    scores = probe.agreement.get(column)
    if scores is None:
        return ""
    order = "Spearman undefined" if scores["spearman"] is None else f"Spearman {scores['spearman']:.2f}"
    return f"{order}, mean error {scores['error']:.2g}"


def collapse(probe: Probe) -> str:
    """Whether tokens become alike between blocks, and where most of their difference is lost."""
    stacks = list(dict.fromkeys(point.stack for point in probe.streams))
    sentences = (
        _collapse_of([point for point in probe.streams if point.stack == stack], several=len(stacks) > 1)
        for stack in stacks
    )
    return " ".join(filter(None, sentences))


def _collapse_of(points: Sequence[SeenLayer], several: bool) -> str:
    known = [(point.block, point.residual) for point in points if point.residual is not None]
    if len(known) < 2:
        return ""
    (_, first), (_, last), (at, least) = known[0], known[-1], min(known[1:], key=lambda pair: pair[1])
    verdict = "Tokens stay apart"
    if least < ALIKE:
        verdict = "Tokens become alike"
    elif last < CLOSER * first:
        verdict = "Tokens come closer"
    where = f" in {points[0].stack}" if several else ""
    text = (
        f"{verdict}{where}: the share of the stream that differs between them goes "
        f"from {_short(first)} to {_short(last)} over the blocks"
    )
    ratios = [(after / before, block) for (_, before), (block, after) in pairwise(known) if before]
    if ratios and min(ratios)[0] < CLOSER:
        text += f", and block {min(ratios)[1]} keeps least of it, {_short(min(ratios)[0])}"
    if least < min(first, last):
        text += f" (least {_short(least)}, after block {at})"
    return f"{text}; 0 is rank collapse."


def notes(probe: Probe) -> list[str]:
    """What was assumed, and what the kinds of numbers are."""
    kinds = sorted(set(probe.assumptions["how"].values()), key=list(KINDS).index)
    return [
        f"Statistics: {probe.assumptions['tokens']}.",
        *(f"{kind.capitalize()}: {KINDS[kind]}." for kind in kinds),
        *(f"{note[0].upper()}{note[1:]}." for note in probe.assumptions["notes"]),
    ]


def _short(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}" if abs(x) >= 0.01 or x == 0 else f"{x:.1g}"
