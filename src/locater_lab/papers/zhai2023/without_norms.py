"""Training without norms and without warm-up, which is what sigma-Reparam is for, on a grid of rates that should have the
best inside: study f, planned (docs/results/zhai2023-plan.md) and not run yet.

An arm is tuned with seed 0 over eight rates and judged by five other seeds at the best. A run that diverges counts as a
guess among the tokens of the vocabulary, so that an arm that fails is not left out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from locater_lab.engine.arms import open_at_edges, study_of_arms, table_of_arms
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.mechanism_runs import BASE
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Arm, Runs

RATES = tuple(2.5e-4 * 2**i for i in range(8))  # up to 0.032
SEEDS = 6  # the first of which chooses
GUESS = math.log(BASE.vocabulary)
COMPETITIVE = 0.05  # nats
SETTINGS: dict[str, dict[str, Any]] = {
    "norms and warm-up": {},
    "no norms": {"norm": "none"},
    "no warm-up": {"warmup": 0.0},
}
CONTROLS = {"plain": (), "sigma-Reparam": ("sigmareparam",)}
ARMS = {
    (control, setting): Arm(f"{control}, {setting}", "f", replace(BASE, control=texts, **changes), RATES, SEEDS)
    for setting, changes in SETTINGS.items()
    for control, texts in CONTROLS.items()
}
PLAIN, REPARAM = "plain", "sigma-Reparam"
BEST = "each at the best of eight rates, other seeds, as seen at this size"

WITHOUT_CLAIMS = (
    Claim(
        "f1", "With sigma-Reparam a model without norms is about as good as a plain one with them",
        f"report loss with sigma-Reparam and no norms, less that of the plain model with norms, {BEST}", "at most", COMPETITIVE,
        where="abstract", bound="ours",
    ),
    Claim(
        "f2", "With sigma-Reparam a model without warm-up is about as good as a plain one with it",
        f"report loss with sigma-Reparam and no warm-up, less that of the plain model with warm-up, {BEST}", "at most", COMPETITIVE,
        where="abstract", bound="ours",
    ),
    Claim("f3", "Without norms sigma-Reparam lowers the loss", f"change of report loss without norms, {BEST}", "at most", 0.0, by="ours"),
    Claim("f4", "Without warm-up sigma-Reparam lowers the loss", f"change of report loss without warm-up, {BEST}", "at most", 0.0, by="ours"),
    Claim("f5", "With both it costs nothing", f"change of report loss with norms and warm-up, {BEST}", "at most", 0.0, by="ours"),
)  # fmt: skip


def losses(runs: Runs, arm: Arm) -> list[float] | None:
    """Of the seeds that judge, a guess where a run diverged; None while a run is missing."""
    if any(runs.of(arm.row(rate, 0)) is None for rate in arm.rates):
        return None
    best = arm.rate(runs)
    if best is None:  # diverged at every rate
        return [GUESS] * (SEEDS - arm.choosing)
    lines = [runs.of(arm.row(best, seed)) for seed in range(arm.choosing, SEEDS)]
    if any(line is None for line in lines):
        return None
    return [
        min(line["report_loss"], GUESS) if line["status"] == "done" else GUESS for line in lines if line is not None
    ]


def change(runs: Runs, arm: Arm, against: Arm) -> Measurement | None:
    ours, base = losses(runs, arm), losses(runs, against)
    if ours is None or base is None:
        return None
    return open_at_edges(runs, (arm, against), by_seed([a - b for a, b in zip(ours, base, strict=True)]))


def judge_without(runs: Runs) -> Results:
    whole = ARMS[PLAIN, "norms and warm-up"]
    pairs = {
        "f1": (ARMS[REPARAM, "no norms"], whole),
        "f2": (ARMS[REPARAM, "no warm-up"], whole),
        "f3": (ARMS[REPARAM, "no norms"], ARMS[PLAIN, "no norms"]),
        "f4": (ARMS[REPARAM, "no warm-up"], ARMS[PLAIN, "no warm-up"]),
        "f5": (ARMS[REPARAM, "norms and warm-up"], whole),
    }
    arms = table_of_arms(runs, ARMS.values())
    return Results({key: change(runs, *pair) for key, pair in pairs.items()}, {"without": arms} if arms else {})


WITHOUT_STUDY = study_of_arms("without norms and without warm-up", WITHOUT_CLAIMS, tuple(ARMS.values()), judge_without)
