"""The training runs behind claims c to f, h and i: which arms there are, the rows that each question asks for, and runs
compared seed by seed.

Every arm is tuned alone: three learning rates with the first seed, chosen by the select split; then more seeds at the
best, judged by the report split: eight for the arms that the page speaks of first, three for the others. Curves and the
stability test keep the plain arm's rate, or its neighbours, so that one thing changes at a time.

Comparisons take the seeds that both sides have finished: a sitting that was cut short leaves some. Which seeds there
are depends on the clock and not on what they say, so that the interval of those that there are holds its level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from locater_lab.engine import mechanism_runs
from locater_lab.engine.arms import Line, Quantity, value_of
from locater_lab.engine.claims import Measurement, by_seed
from locater_lab.engine.runs import Arm, Row, Runs, expected_rows
from locater_lab.train.plan import Plan

BASE = replace(mechanism_runs.BASE, evaluate=300)
LOCATER, MEAN, SCALE = "locater(target=2)", "locater(target=2, shrink=0)", "locater(hold=0)"
MASKED = replace(BASE, task="masked")
IMAGE = mechanism_runs.IMAGE
SORT = replace(
    BASE, task="sort", corpus=(), vocabulary=256, layers=2, width=128, length=64, batch=64, steps=2000, evaluate=500
)
IMAGE_RATES = (5e-4, 1.25e-3, 3e-3)
CURVE_SEEDS = 2
SHORT = 400  # steps of the stability test
HOT = (6e-3, 1.5e-2, 4e-2, 1e-1)
FLOORS, CEILINGS = (0.75, 0.9), (0.5, 0.35)  # shares of the largest entropy that a row can have
PULL = 3.0  # weight of the entropy penalty
MANY_SEEDS, FIRST_SEEDS = 8, 3  # of the arms that the page speaks of first; of every arm in the first plan


def with_controls(plan: Plan, *controls: str) -> Plan:
    return replace(plan, control=controls)


PLAIN = Arm("none", "c", BASE, seeds=MANY_SEEDS)
BOTH = Arm("LocAteR", "c", with_controls(BASE, LOCATER), seeds=MANY_SEEDS)
PARTS = {
    "mean only": Arm("mean only", "d", with_controls(BASE, MEAN), seeds=MANY_SEEDS),
    "scale only": Arm("scale only", "d", with_controls(BASE, SCALE), seeds=MANY_SEEDS),
    "raw tr W^2": Arm("raw tr W^2", "d", with_controls(BASE, "rawsquare")),
}
# the same with learned positions in place of rotary ones: does the mean matter more where distance is not in the
# logits?
LEARNED = {
    name: Arm(
        f"learned positions, {name}", "d", with_controls(replace(BASE, positions="learned"), *controls), seeds=seeds
    )
    for name, controls, seeds in (
        ("none", (), MANY_SEEDS),
        ("LocAteR", (LOCATER,), MANY_SEEDS),
        ("mean only", (MEAN,), MANY_SEEDS),
        ("scale only", (SCALE,), FIRST_SEEDS),
        ("mimetic", ("mimetic(target=2)",), FIRST_SEEDS),
    )
}
RIVALS = {
    arm.name: arm
    for arm in (
        Arm("mimetic", "e", with_controls(BASE, "mimetic(target=2)"), seeds=MANY_SEEDS),
        Arm("QK-norm", "e", replace(BASE, qk_norm=True), seeds=MANY_SEEDS),
        Arm("mimetic + LocAteR", "e", with_controls(BASE, "mimetic(target=2)", LOCATER)),
        Arm("QK-norm + LocAteR", "e", with_controls(replace(BASE, qk_norm=True), LOCATER)),
        Arm("sigma-reparam", "e", with_controls(BASE, "sigmareparam"), seeds=MANY_SEEDS),
        Arm("QK-clip at 20", "e", with_controls(BASE, "qkclip(limit=20)")),
        Arm("soft-cap at 20", "e", with_controls(BASE, "logitsoftcap(cap=20)")),
        Arm("weight decay 0.3", "e", replace(BASE, decay=0.3), seeds=MANY_SEEDS),
        Arm("weight decay 0.3 + LocAteR", "e", with_controls(replace(BASE, decay=0.3), LOCATER)),
    )
}
ELSEWHERE = {
    name: (Arm(f"{name}, none", "f", plan, rates), Arm(f"{name}, LocAteR", "f", with_controls(plan, LOCATER), rates))
    for name, plan, rates in (
        ("masked", MASKED, PLAIN.rates),
        ("image", IMAGE, IMAGE_RATES),
        ("sort", SORT, PLAIN.rates),
    )
}
TARGETS = {
    "both": {t: f"locater(target={t:g})" for t in (-2.0, 0.0, 1.0, 2.0, 4.0, 8.0)},
    "mean only": {t: f"locater(target={t:g}, shrink=0)" for t in (0.0, 2.0, 4.0, 8.0)},
}
STRENGTHS = {
    "both": {s: f"locater(target=2, shrink={s:g}, hold={s:g})" for s in (0.001, 0.003, 0.01, 0.03)},
    "scale only": {s: f"locater(hold=0, shrink={s:g})" for s in (0.001, 0.01, 0.1)},
    "raw tr W^2": {s: f"rawsquare(strength={s:g})" for s in (0.01, 0.1)},
}
ENTROPIES = {f"floor {x:g}": f"entropypenalty(floor={x:g}, weight={PULL:g})" for x in FLOORS}
ENTROPIES |= {f"ceiling {x:g}": f"entropypenalty(ceiling={x:g}, weight={PULL:g})" for x in CEILINGS}
STABLE = {"none": BASE, "LocAteR": BOTH.base} | {
    name: RIVALS[name].base for name in ("mimetic", "QK-norm", "QK-clip at 20", "soft-cap at 20", "sigma-reparam")
}
SAME = {  # spellings of one control
    "locater(target=2, shrink=0.01, hold=0.01)": LOCATER,
    "locater(hold=0, shrink=0.01)": SCALE,
    "rawsquare(strength=0.01)": "rawsquare",
}


def at_rate(arm: str, claim: str, control: str, rate: float, seed: int, *more: str) -> Row:
    """A run beside the plain arm: its rate, one control (and others). A control that a tuned arm has is spelled as it
    is there, so that both ask for the same run.
    """
    return Row(claim, arm, replace(with_controls(BASE, SAME.get(control, control), *more), rate=rate, seed=seed))


def curve_rows(controls: dict[float, str], arm: str, rate: float) -> dict[float, list[Row]]:
    """Rows of a curve: by its variable, one for each seed."""
    return {
        x: [at_rate(f"{arm} at {x:g}", "d", text, rate, seed) for seed in range(CURVE_SEEDS)]
        for x, text in controls.items()
    }


def entropy_rows(rate: float) -> dict[str, list[Row]]:
    """The mean held at 2, and entropy pushed up or down beside it."""
    return {
        name: [at_rate(name, "h", MEAN, rate, seed, text) for seed in range(CURVE_SEEDS)]
        for name, text in ENTROPIES.items()
    }


def stability_rows() -> dict[str, dict[float, list[Row]]]:
    short = {name: replace(plan, steps=SHORT, evaluate=0) for name, plan in STABLE.items()}
    return {
        name: {
            rate: [Row("i", f"{name}, hot", replace(plan, rate=rate, seed=seed)) for seed in range(CURVE_SEEDS)]
            for rate in HOT
        }
        for name, plan in short.items()
    }


def rows_for(letter: str, runs: Runs) -> Iterator[Row]:
    """The rows of a letter that can be named so far."""
    rate = PLAIN.rate(runs)
    if letter == "c":
        yield from chain(PLAIN.rows(runs), BOTH.rows(runs))
    elif letter == "d":
        yield from chain.from_iterable(arm.rows(runs) for arm in (*PARTS.values(), *LEARNED.values()))
        if rate is not None:
            curves = [curve_rows(controls, arm, rate) for arm, controls in (*TARGETS.items(), *STRENGTHS.items())]
            yield from (row for each in curves for rows in each.values() for row in rows)
    elif letter == "e":
        yield from chain.from_iterable(arm.rows(runs) for arm in RIVALS.values())
    elif letter == "f":
        yield from chain.from_iterable(arm.rows(runs) for pair in ELSEWHERE.values() for arm in pair)
    elif letter == "h" and rate is not None:
        yield from (row for rows in entropy_rows(rate).values() for row in rows)
    elif letter == "i":
        yield from (row for by_rate in stability_rows().values() for rows in by_rate.values() for row in rows)


ORDER = "cdehfi"  # of the runs: what decides most comes first


def rows_of(letters: Sequence[str], runs: Runs) -> list[Row]:
    """Rows for these letters and for those that they compare with, first things first."""
    wanted = {*letters, "c"}  # every question compares with the plain arm
    return [row for letter in ORDER if letter in wanted for row in rows_for(letter, runs)]


# The run plan, written before anything is trained

QUESTIONS = {
    "c": "LocAteR against no penalty, each at its best rate",
    "d": "mean, scale, both, raw tr W^2; curves over targets and strengths; the parts again with learned positions",
    "e": "rivals, each at its best rate; LocAteR on top of three of them",
    "h": "the mean held, entropy pushed up or down",
    "f": "masked language model, images, sorting",
    "i": "rates at which runs fail",
}


def all_rows() -> list[Row]:
    """All rows that there will be."""
    return expected_rows(lambda runs: rows_of(ORDER, runs))


def first_plan() -> list[Row]:
    """The rows as they were planned first, when every arm had three seeds at most."""
    return [row for row in all_rows() if row.plan.seed < FIRST_SEEDS]


def plan_table(step: float = 0.003, run: float = 2.0) -> list[str]:
    """The first plan as Markdown; seconds of a whole GPU that runs several at a time, at so many for a step and for a
    run's beginning and end.
    """
    rows = first_plan()
    lines = ["| claim | question | runs | steps | seconds |", "|---|---|---|---|---|"]
    total = 0.0
    for letter, question in QUESTIONS.items():
        own = [row for row in rows if row.claim == letter]
        seconds = sum(step * row.plan.steps + run for row in own)
        total += seconds
        lines.append(f"| {letter} | {question} | {len(own)} | {sum(row.plan.steps for row in own):,} | {seconds:.0f} |")
    return [*lines, f"| | | {len(rows)} | {sum(row.plan.steps for row in rows):,} | {total:.0f} |"]


# ---- seed by seed ----


CHOOSING_SEED = 0  # of rates, and of what is chosen between at one rate
FEWEST_SEEDS = 3  # seeds that a claim is judged by


def judging(rows: Iterable[Row]) -> list[Row]:
    """Without the seed that chose the rate, or the setting, of these runs."""
    return [row for row in rows if row.plan.seed != CHOOSING_SEED]


def finished_lines(runs: Runs, rows: Iterable[Row]) -> dict[int, Line]:
    """Lines by seed, of the runs that came to their end."""
    lines = {row.plan.seed: runs.of(row) for row in rows}
    return {seed: line for seed, line in lines.items() if line is not None and line["status"] == "done"}


def mean_of_rows(runs: Runs, rows: Iterable[Row], what: Quantity) -> Measurement | None:
    """The quantity itself; None with fewer than `FEWEST_SEEDS` seeds."""
    values = [value_of(line, what) for line in finished_lines(runs, rows).values()]
    return measure_seeds([x for x in values if x is not None])


def change_between(
    runs: Runs, rows: Iterable[Row], against: Iterable[Row], what: Quantity, more: Mapping[str, Any] | None = None
) -> Measurement | None:
    """Differences within a seed; None with fewer than `FEWEST_SEEDS` pairs."""
    return measure_seeds(list(differences(runs, rows, against, what).values()), more)


def differences(runs: Runs, rows: Iterable[Row], against: Iterable[Row], what: Quantity) -> dict[int, float]:
    """By seed, where both runs have finished and know the quantity."""
    ours, base = finished_lines(runs, rows), finished_lines(runs, against)
    values = {seed: (value_of(ours[seed], what), value_of(base[seed], what)) for seed in sorted(ours.keys() & base)}
    return {seed: a - b for seed, (a, b) in values.items() if a is not None and b is not None}


def measure_seeds(values: list[float], more: Mapping[str, Any] | None = None) -> Measurement | None:
    """Mean and interval over seeds; None with fewer than `FEWEST_SEEDS`.

    >>> measure_seeds([1.0, 2.0]), measure_seeds([1.0, 2.0, 3.0]).value
    (None, 2.0)
    """
    return by_seed(values, more) if len(values) >= FEWEST_SEEDS else None
