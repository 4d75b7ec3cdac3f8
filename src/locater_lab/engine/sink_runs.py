"""Runs in which softmax attention has a sink: one layer on a made-up source (`locater train --task copy`), for claims
about sinks.

After three triggers the token before is copied; elsewhere the current token is all one needs, and a head has nothing to
add. The rate is one at which softmax has a sink with seeds 0, 1 and 2, looked for before the arms were fixed; seeds 3
to 7 chose nothing.

A sink has two measures. The share of the first token in a row made to sum to 1 is that of the papers: of the map behind
a gate. The weight is what acts, gates and row sums included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from locater_lab.engine.arms import Line, end_of, ends_table, uniform_first, value_of
from locater_lab.engine.claims import Measured, by_seed
from locater_lab.engine.mechanism_runs import changed
from locater_lab.engine.runs import Arm, Runs
from locater_lab.train.plan import Plan

COPY = Plan(
    task="copy", vocabulary=64, layers=1, width=64, heads=1, length=64, batch=32, steps=1000, positions="learned", observe=0, evaluate=500,
    checkpoint=0, precision="float32",
)  # fmt: skip
RATE, SEEDS = 6e-3, 8
UNIFORM = round(uniform_first(COPY.length), 4)  # the first token's weight where attention is even
SINK = 0.3  # and from where on it is a sink
LEFT = 0.1  # of the plain model's weight: what counts as taken away
SHORT = 0.1  # nats above the plain model: an arm that has not learned the source
HERE = "one layer on the copy source"
WEIGHT, SHARE, VALUE, SPIKE = (
    f"measures.{name}" for name in ("first_weight", "first_mass", "first_value", "spike_ratio")
)


def sink_arm(attention: str = "softmax", **changes: Any) -> Arm:
    """A mechanism, or a variation of the model, at the one rate.

    >>> sink_arm("gated").name, sink_arm(heads=4).name
    ('gated', 'heads=4')
    """
    return Arm(
        ", ".join(changed(attention, changes)), "sinks", replace(COPY, attention=attention, **changes), (RATE,), SEEDS
    )


PLAIN = sink_arm()


def left_of(runs: Runs, arm: Arm, against: Arm = PLAIN) -> Measured | None:
    """Weight on the first token over that of the plain model, seed by seed."""
    ends, plain = arm.ends(runs), against.ends(runs)
    values = [(value_of(a, WEIGHT), value_of(b, WEIGHT)) for a, b in zip(ends or (), plain or (), strict=False)]
    ratios = [a / b for a, b in values if a is not None and b]
    return by_seed(ratios) if ratios and len(ratios) == len(values) else None


def sink_tables(runs: Runs, arms: Iterable[Arm]) -> dict[str, Any]:
    """The tables that sinks.md.j2 reads: the arms with the seeds that there are, and how they were trained."""
    rows = ends_table(runs, arms, end_with_weights)
    if not rows:
        return {}
    return {
        "sinks": {
            "arms": rows,
            "means": {measure: _means(rows, measure) for measure in ("first_weight", "first_mass", "spike_ratio")},
            "trained": {"width": COPY.width, "tokens": COPY.length, "steps": COPY.steps, "rate": RATE},
            "even": UNIFORM,
            "far": SHORT,
        }
    }


def _means(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[str, float]:
    """A measure by arm, means over seeds; of arms that have it."""
    return {
        row["arm"]: fmean(end[measure] for end in row["ends"])
        for row in rows
        if all(end[measure] is not None for end in row["ends"])
    }


def end_with_weights(line: Line) -> dict[str, Any]:
    """What pages on sinks show of a run."""
    measures = line.get("measures") or {}
    return end_of(line) | {name: measures.get(name) for name in ("first_weight", "first_value")}
