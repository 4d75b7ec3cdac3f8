"""What the papers on mechanisms train: one model, one text, the same seeds.

A mechanism with its default settings is trained at two learning rates with the first seed, then with two more seeds at
the better one. Variations of it, and of the blocks around it, are trained at the higher rate, which softmax prefers,
with two seeds; those that fail there with both seeds (norms after the sums) at two lower rates. All runs go to one
file, and papers that need the same plan share its run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from locater_lab.engine.reproduction import Paper
from locater_lab.engine.runs import Arm, Row, Runs, expected_rows
from locater_lab.mechanisms import mechanisms
from locater_lab.train.plan import Plan

BASE = Plan(
    corpus=("speeches.tar.xz",),
    vocabulary=4096,
    layers=6,
    width=256,
    heads=4,
    length=256,
    steps=1500,
    batch=32,
    observe=0,
    evaluate=500,
    checkpoint=0,
    compile=True,
)
MASKED = replace(BASE, task="masked")
IMAGE = replace(BASE, task="image", corpus=(), vocabulary=256, images="fashion.npz", batch=128)
RATES, IMAGE_RATES = (1e-3, 2.5e-3), (2e-4, 5e-4)
AT_THIS_SIZE = "as seen at this size"
COOL_RATES = (2.5e-4, 1e-3)  # of what fails at the higher rate with every seed
TUNED, VARIED = f"each at the better of two rates, {AT_THIS_SIZE}", f"variations at one rate, {AT_THIS_SIZE}"
MASSIVE = 1000.0  # medians from which on a largest entry is a spike
NO_SPIKE = f"the plain model's largest entry is below {MASSIVE:,.0f} medians, so that there is no spike"
NO_SINK = "the plain model gives its first token no more than uniform attention does, so that there is no sink"


def changes_in_words(attention: str, changes: Mapping[str, Any]) -> list[str]:
    """How an arm differs from the plain one, in words."""
    return ([attention] if attention != "softmax" or not changes else []) + [
        f"{key}={value}" for key, value in changes.items()
    ]


def arm(
    attention: str = "softmax", base: Plan = BASE, name: str | None = None, *, claim: str = "zoo", **changes: Any
) -> Arm:
    """A way to train: a mechanism at two rates with three seeds, or a variation at one rate with two.

    >>> arm("gated(per=element)").name, arm(mlp="none").name, arm("softmax", MASKED).name
    ('gated(per=element)', 'mlp=none', 'softmax, masked')
    """
    tuned = not changes and base.task != "image" and attention in {m.name for m in mechanisms()}
    words = changes_in_words(attention, changes) + ([base.task] if base.task != "causal" else [])
    rates = IMAGE_RATES if base.task == "image" else RATES
    return Arm(
        name or ", ".join(words),
        claim,
        replace(base, attention=attention, **changes),
        rates if tuned else rates[1:],
        3 if tuned else 2,
    )


def at_lower_rates(arm: Arm) -> Arm:
    """The same arm at the better of two lower rates."""
    return replace(arm, rates=COOL_RATES)


SOFTMAX, SOFTMAX_MASKED, SOFTMAX_IMAGE = arm(), arm(base=MASKED), arm(base=IMAGE)


def rows_of(paper: Paper, runs: Runs) -> list[Row]:
    """The runs of a paper's studies, as far as they are known: other seeds wait for the better rate."""
    return [row for study in paper.studies if study.rows is not None for row in study.rows(runs)]


def plan_table(papers: Sequence[Paper]) -> list[str]:
    """The run plan as Markdown: the runs of each paper, and how many of them no paper above has."""
    lines = ["| paper | arms | runs | of them new | steps |", "|---|---|---|---|---|"]
    seen: dict[str, Row] = {}
    for paper in papers:
        rows = expected_rows(partial(rows_of, paper))
        new = [row for row in rows if row.key not in seen]
        seen |= {row.key: row for row in new}
        arms, steps = len({(row.claim, row.arm) for row in rows}), sum(row.plan.steps for row in new)
        lines.append(f"| {paper.name} | {arms} | {len(rows)} | {len(new)} | {steps:,} |")
    return [*lines, f"| | | | {len(seen)} | {sum(row.plan.steps for row in seen.values()):,} |"]
