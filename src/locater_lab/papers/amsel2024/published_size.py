"""Encoders at the published size, d = 64: studies d (one layer), e (three layers), f (number of points) and g
(positions).

They are training runs on a GPU, kept as lines of JSON: one line for each arm, which has all of its seeds. The plan with
its bounds is docs/results/amsel2024-plan.md. The paper trains for 100,000 or 200,000 steps on batches of 256 sets and
shows the least loss of 5 seeds; these runs are shorter, and claims are judged by the loss of every seed on new points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from locater.errors import LocaterError, first_line
from locater_lab.engine.arms import mark_inconclusive
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.provenance import check_commit, versions
from locater_lab.engine.reproduction import Results, Setting, Study, round_numbers
from locater_lab.engine.runs import Runs
from locater_lab.papers.amsel2024.encoders import Encoder, train_encoders
from locater_lab.train.sweep import append_line

# The plan of the runs at the published size as data: arms, what the paper has, claims and their bounds.


WIDTH = 64
RANKS = (1, 2, 4, 8, 16, 32, 64)
POINTS = 1024  # of a step and a seed: 64 sets of 16
FEWER_STEPS = "as seen after fewer steps"


def _arm(rank: int, points: int = 16, of_step: int = POINTS, **changes: Any) -> Encoder:
    return Encoder(rank=rank, points=points, batch=of_step // points, **changes)


LONG, BRIEF = 12_000, 3_000
ONE_LAYER_ARMS = (
    *(_arm(r, copies=1, steps=LONG) for r in RANKS),
    *(_arm(r, copies=WIDTH, steps=BRIEF) for r in reversed(RANKS)),
)
LONGER_ARMS = tuple(_arm(r, copies=WIDTH, steps=LONG) for r in (64, 32, 1))  # as long as with one copy
# Encoders of several layers as first planned. They learned to answer with the length 0, a loss of 1.
FIRST_PLAN = {
    "e": tuple(_arm(r, copies=WIDTH, layers=3, steps=2_500, seeds=6) for r in (64, 4, 1)),
    "f": tuple(
        _arm(r, n, copies=WIDTH, layers=2, steps=1_500, seeds=6, rate=0.005) for r in (64, 1) for n in (4, 16, 64)
    ),
    "g": tuple(
        _arm(rank or WIDTH + positions, copies=8, layers=3, positions=positions, steps=2_000, seeds=6, rate=0.005)
        for positions in (0, 64)
        for rank in (0, 1)
    ),
}
# The second plan: lengths begin at 8, the rate is lower and there are more steps.
DEEP: dict[str, Any] = {"steps": 4_000, "seeds": 5, "rate": 0.005, "length": math.sqrt(WIDTH)}
SECOND_PLAN = {
    "e": tuple(_arm(r, copies=WIDTH, layers=3, **DEEP) for r in (64, 4, 1)),
    "f": tuple(_arm(r, n, POINTS // 2, copies=WIDTH, layers=2, **DEEP) for r in (64, 1) for n in (4, 16, 64)),
    "g": tuple(
        _arm(rank or WIDTH + positions, copies=8, layers=3, positions=positions, **DEEP)
        for positions in (0, 64)
        for rank in (0, 1)
    ),
}
LEARNED_NOTHING = 0.99  # a loss from which on an encoder has learned nothing: the answer 0 has a loss of 1
UNTRAINED = "the encoders that it compares learned nothing: they answer with the length 0, at a loss of 1"
TOO_SHORT = (
    "the loss is higher than published, after fewer steps than the paper's 100,000: longer training may lower it"
)

# What the paper's figures show, read off the pictures: least loss of 5 seeds, by layers, copies, points and rank.
PUBLISHED: Mapping[tuple[int, int, int], Mapping[int, float]] = {
    (1, 1, 16): {1: 0.87, 2: 0.87, 4: 0.87, 8: 0.87, 16: 0.87, 32: 0.70, 64: 0.015},
    (1, 64, 16): {1: 0.65, 32: 0.31, 64: 0.002},
    (3, 64, 16): {1: 0.52, 2: 0.38, 4: 0.055, 8: 0.042, 16: 0.053, 32: 0.055, 64: 0.0008},
    (5, 64, 16): {1: 0.42, 32: 0.014, 64: 0.002},
    (2, 64, 4): {1: 0.02},
    (2, 64, 16): {1: 0.63},
    (2, 64, 64): {1: 0.81},
    (2, 64, 256): {1: 1.16},
}

ONE_LAYER = (
    Claim(
        "d1", f"With d^2 parameters full rank is far better than half of it, {FEWER_STEPS}",
        "loss at rank 64 over loss at rank 32, one layer, one copy", "at most", 0.1, where="Figure 1", bound="ours",
    ),
    Claim(
        "d2", f"With d^3 parameters too, {FEWER_STEPS}",
        "loss at rank 64 over loss at rank 32, one layer, 64 copies", "at most", 0.1, where="Figure 1", bound="ours",
    ),
    Claim(
        "d3", f"With d^2 parameters rank one is as bad as published, {FEWER_STEPS}",
        "loss at rank 1, one layer, one copy", "about", 0.87, 0.05, where="Figure 1",
    ),
    Claim(
        "d4", f"With d^3 parameters rank one is as published, {FEWER_STEPS}",
        "loss at rank 1, one layer, 64 copies", "about", 0.65, 0.05, where="Figure 1",
    ),
    Claim(
        "d5", f"One full-rank head beats rank one with d times its parameters, {FEWER_STEPS}",
        "loss at rank 64 with one copy less loss at rank 1 with 64 copies", "at most", 0.0, where="Figure 1",
    ),
    Claim(
        "d6", f"More heads help rank one, {FEWER_STEPS}",
        "loss at rank 1, 64 copies less one copy", "at most", 0.0, where="Figure 1",
    ),
    Claim(
        "d7", f"One full-rank head comes as near as published, {FEWER_STEPS}",
        "loss at rank 64, one layer, one copy", "at most", 0.015, where="Figure 1",
    ),
    Claim(
        "d8", f"The W that one full-rank head learns is a multiple of -I, {FEWER_STEPS}",
        "angle of W to the identity in degrees, rank 64, one copy", "at least", 175.0, where="", bound="ours",
    ),
    Claim(
        "d9", f"The W of 64 full-rank heads are near it, {FEWER_STEPS}",
        "angle of W to the identity in degrees, rank 64, 64 copies", "about", 168.0, 5.0, where="", bound="ours",
    ),
)  # fmt: skip
DEPTH = (
    Claim(
        "e1", f"Three layers help rank one, {FEWER_STEPS}",
        "loss at rank 1, 64 copies, three layers less one layer", "at most", 0.0, where="Figure 1",
    ),
    Claim(
        "e2", f"Three layers make rank 4 good, {FEWER_STEPS}",
        "loss at rank 4 over loss at rank 1, three layers, 64 copies", "at most", 0.2, where="Figure 1", bound="ours",
    ),
    Claim(
        "e3", f"Full rank stays far better than rank one in three layers, {FEWER_STEPS}",
        "loss at rank 64 over loss at rank 1, three layers, 64 copies", "at most", 0.1, where="Figure 1", bound="ours",
    ),
)  # fmt: skip
NUMBER = (
    Claim(
        "f1", f"Rank one gets worse with more points, {FEWER_STEPS}",
        "loss at rank 1, two layers, 64 copies: N = 64 less N = 4", "at least", 0.3, where="", bound="ours",
    ),
    Claim(
        "f2", f"Full rank does not, {FEWER_STEPS}",
        "loss at rank 64, two layers, 64 copies, N = 64", "at most", 0.04, where="",
    ),
)  # fmt: skip
POSITIONS = (
    Claim(
        "g1", f"Positions in channels of their own help rank one, {FEWER_STEPS}",
        "loss at rank 1, three layers, 8 copies: with positions less without", "at most", 0.0, where="",
    ),
    Claim(
        "g2", f"Full rank with positions stays far better than rank one with them, {FEWER_STEPS}",
        "loss at full rank over loss at rank 1, three layers, 8 copies, positions", "at most", 0.1, where="", bound="ours",
    ),
)  # fmt: skip


NEEDS = (
    "training runs: --runs docs/results/amsel2024-runs.jsonl; `locater reproduce amsel2024 --claim d --runs FILE --jobs 1` "
    "makes those that it lacks, on a GPU"
)

Line = Mapping[str, Any]


def key_of(arm: Encoder) -> str:
    return json.dumps(arm.options, sort_keys=True)


def train_missing_arms(letter: str, arms: Sequence[Encoder], runs: Runs, setting: Setting) -> None:
    """Train the arms that have no line. One that breaks stops no other; the first of them is raised at the end."""
    if not torch.cuda.is_available():
        raise LocaterError("--jobs: the runs of amsel2024 at the published size need a GPU; --quick trains a small one")
    if runs.path is not None:
        check_commit(runs.path, versions("cuda").get("commit"))
    broken: list[str] = []
    for arm in arms:
        if key_of(arm) in runs.lines:
            continue
        try:
            result = {**train_encoders(arm, "cuda"), **versions("cuda")}
        except Exception as error:  # anything can end a run (compilers, memory); it has no line and is run again
            broken.append(f"{name_of(arm)}: {type(error).__name__}: {first_line(error)}")
            setting.log(broken[-1])
            continue
        line = round_numbers({"claim": letter, "arm": name_of(arm), "options": arm.options, **result}, 6)
        runs.lines[key_of(arm)] = line
        if runs.path is not None:
            append_line(runs.path, line)
        ends = losses_of(line)
        outcome = f"loss {min(ends):.4f} to {max(ends):.4f}" if ends else "a seed without a finite loss"
        setting.log(f"{name_of(arm)}: {outcome}, {line['seconds']:.0f} s")
    if broken:
        raise LocaterError(f"{len(broken)} arms broke and can be run again, the first: {broken[0]}")


def name_of(arm: Encoder) -> str:
    """In words, for a line of progress.

    >>> name_of(Encoder(rank=1, points=4, copies=64, layers=2))
    '2 layers, 4096 heads of rank 1, N = 4'
    """
    layers = "1 layer" if arm.layers == 1 else f"{arm.layers} layers"
    positions = ", positions" * bool(arm.positions)
    return f"{layers}, {arm.heads} heads of rank {arm.rank}, N = {arm.points}{positions}"


def losses_of(line: Line | None) -> list[float] | None:
    """By seed; None where a seed has none."""
    values = None if line is None else [math.nan if x is None else float(x) for x in line["loss"]]
    return values if values and all(map(math.isfinite, values)) else None


def comparison(
    a: list[float] | None, b: list[float] | None, how: Callable[[float, float], float]
) -> Measurement | None:
    """By the seeds that both have."""
    return None if a is None or b is None else by_seed([how(x, y) for x, y in zip(a, b, strict=False)])


def difference(x: float, y: float) -> float:
    return x - y


def ratio(x: float, y: float) -> float:
    return x / y


def mean_over_seeds(values: Sequence[float] | None) -> Measurement | None:
    return None if values is None else by_seed(values)


def rows_of(arms: Sequence[Encoder], runs: Runs) -> list[dict[str, Any]]:
    """What a page shows of each arm that has been trained: losses, what was published, cost, W of the first layer."""
    rows = []
    for arm in arms:
        line = runs.lines.get(key_of(arm))
        if line is None:
            continue
        losses = losses_of(line)
        published = PUBLISHED.get((arm.layers, arm.copies, arm.points), {}) if not arm.positions else {}
        means = {name: None if None in values else sum(values) / len(values) for name, values in line["heads"].items()}
        rows.append(
            {
                **{
                    name: arm.options[name]
                    for name in ("layers", "copies", "points", "rank", "positions", "steps", "rate")
                },
                "length": arm.length,
                "seeds": arm.seeds,
                "heads": arm.heads,
                "losses": losses,
                "mean_loss": sum(losses) / len(losses) if losses else None,
                "least": min(losses) if losses else None,
                "published": published.get(arm.rank),
                "milliseconds": 1000 * line["seconds"] / arm.steps,
                **means,
                "of_scores": None if means["frobenius"] is None else means["frobenius"] / math.sqrt(arm.rank),
                "device": line["device"],
            }
        )
    return rows


def line_of(arms: Sequence[Encoder], runs: Runs, **options: int) -> Line | None:
    """The line of the arm with these options; of several the longest that was trained."""
    fitting = (x for x in arms if all(x.options[name] == value for name, value in options.items()))
    known = [arm for arm in fitting if key_of(arm) in runs.lines]
    return runs.lines[key_of(max(known, key=lambda arm: arm.steps))] if known else None


def judge_one_layer(runs: Runs) -> Results:
    arms = ONE_LAYER_ARMS + LONGER_ARMS

    def loss(rank: int, copies: int) -> list[float] | None:
        return losses_of(line_of(arms, runs, rank=rank, copies=copies))

    def angle(copies: int) -> Measurement | None:
        of = line_of(arms, runs, rank=WIDTH, copies=copies)
        return None if of is None or None in of["heads"]["angle"] else by_seed(of["heads"]["angle"])

    measured = {
        "d1": comparison(loss(64, 1), loss(32, 1), ratio),
        "d2": comparison(loss(64, 64), loss(32, 64), ratio),
        "d3": mean_over_seeds(loss(1, 1)),
        "d4": mean_over_seeds(loss(1, 64)),
        "d5": comparison(loss(64, 1), loss(1, 64), difference),
        "d6": comparison(loss(1, 64), loss(1, 1), difference),
        "d7": mean_over_seeds(loss(64, 1)),
        "d8": angle(1),
        "d9": angle(64),
    }
    # a loss that is too high decides nothing; one that is low enough would have
    high = [c.id for c in ONE_LAYER if c.id in ("d1", "d2", "d4", "d7") and _above(c, measured[c.id])]
    return Results(mark_inconclusive(measured, high, TOO_SHORT), {"one_layer": rows_of(arms, runs)})


def _above(claim: Claim, measured: Measurement | None) -> bool:
    return measured is not None and measured.value > claim.stated + claim.tolerance


def judge_depth(arms: Sequence[Encoder], runs: Runs) -> dict[str, Measurement | None]:
    one = losses_of(line_of(ONE_LAYER_ARMS + LONGER_ARMS, runs, rank=1, copies=WIDTH))
    three = {rank: losses_of(line_of(arms, runs, rank=rank)) for rank in (1, 4, 64)}
    return {
        "e1": comparison(three[1], one, difference),
        "e2": comparison(three[4], three[1], ratio),
        "e3": comparison(three[64], three[1], ratio),
    }


def judge_number_of_points(arms: Sequence[Encoder], runs: Runs) -> dict[str, Measurement | None]:
    of = {n: losses_of(line_of(arms, runs, rank=1, points=n)) for n in (4, 64)}
    return {
        "f1": comparison(of[64], of[4], difference),
        "f2": mean_over_seeds(losses_of(line_of(arms, runs, rank=64, points=64))),
    }


def judge_positions(arms: Sequence[Encoder], runs: Runs) -> dict[str, Measurement | None]:
    with_, without = (losses_of(line_of(arms, runs, rank=1, positions=n)) for n in (WIDTH, 0))
    full = losses_of(line_of(arms, runs, rank=2 * WIDTH))
    return {"g1": comparison(with_, without, difference), "g2": comparison(full, with_, ratio)}


def judge_several_layers(
    letter: str, table: str, judge: Callable[..., dict[str, Measurement | None]], runs: Runs
) -> Results:
    """Claims on encoders of several layers: the arms of the second plan where there are any, else those of the first plan.
    All are open where one of the arms has learned nothing with most of its seeds.
    """
    again = any(key_of(arm) in runs.lines for arm in SECOND_PLAN[letter])
    arms = SECOND_PLAN[letter] if again else FIRST_PLAN[letter]
    measured = judge(arms, runs)
    ends = [losses for arm in arms if (losses := losses_of(runs.lines.get(key_of(arm))))]
    lost = any(sum(x > LEARNED_NOTHING for x in losses) > len(losses) / 2 for losses in ends)
    rows = rows_of(FIRST_PLAN[letter] + SECOND_PLAN[letter], runs)
    if lost:
        return Results(mark_inconclusive(measured, measured, UNTRAINED), {table: rows})
    high = [c.id for c in NUMBER if c.id == "f2" and _above(c, measured.get(c.id))]
    return Results(mark_inconclusive(measured, high, TOO_SHORT), {table: rows})


def _study(title: str, claims: tuple[Claim, ...], arms: Sequence[Encoder], judge: Callable[[Runs], Results]) -> Study:
    def measure(setting: Setting) -> Results:
        if setting.runs is None:
            return Results({})
        runs = Runs(setting.runs, setting.more_runs)
        if setting.jobs:
            train_missing_arms(claims[0].id[0], arms, runs, setting)
        results = judge(runs)
        tables = {name: rows for name, rows in results.tables.items() if rows}
        return Results(results.measured, tables)

    return Study(title, claims, measure, NEEDS, on_runs=True, needs_data=False)


STUDIES = (
    _study("one layer at the published size", ONE_LAYER, ONE_LAYER_ARMS + LONGER_ARMS, judge_one_layer),
    _study("three layers", DEPTH, SECOND_PLAN["e"], partial(judge_several_layers, "e", "three_layers", judge_depth)),
    _study(
        "number of points",
        NUMBER,
        SECOND_PLAN["f"],
        partial(judge_several_layers, "f", "points", judge_number_of_points),
    ),
    _study("positions", POSITIONS, SECOND_PLAN["g"], partial(judge_several_layers, "g", "positions", judge_positions)),
)
