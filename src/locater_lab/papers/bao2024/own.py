"""The paper's own experiment: one layer, one head, width 128, norms after the sums, words. Its runs; studies j and n.

The recipe is that of fairseq's language models. Its rate depends on the update alone (warm-up over 4,000 updates, then
the inverse square root), so a run of 3,000 updates is the beginning of a longer one. The weight of the penalty is not
at hand, so it is swept with seed 0. The sweep names two doses, one of the paper's form and one of ours, which are judged with other seeds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache

from locater_lab.engine.arms import Line
from locater_lab.engine.runs import Row, Runs
from locater_lab.train.plan import Plan

OWN = Plan(
    corpus=("wikipedia-2/train.txt.xz",),
    select=("wikipedia-2/valid.txt.xz",),
    report=("wikipedia-2/test.txt.xz",),
    words=True,
    layers=1,
    heads=1,
    width=128,
    hidden=128,
    mlp="gelu",
    norm="post",
    positions="sinusoidal",
    scale=0.0884,  # 128^-1/2: of embeddings in fairseq
    dropout=0.1,
    length=512,
    batch=64,  # 32,768 tokens
    steps=3000,
    rate=5e-4,
    schedule="inverse_sqrt",
    warmup=4000.0,
    decay=0.01,
    beta2=0.98,
    clip=0.0,
    observe=250,
    evaluate=250,
    checkpoint=0,
    compile=True,
)
LONG = replace(OWN, steps=12_000, observe=500, evaluate=500)
SEEDS = range(1, 11)  # that judge; seed 0 is the sweep's
LONG_SEEDS = range(1, 4)
MORE_ENTROPY = 0.1  # nats that a dose must add with seed 0 to be the best one
NO_COST = 0.005  # nats: about the difference of two compiled runs of the same plan
NONE = "none"


def penalty(form: str, strength: float, target: str = "2") -> str:
    """Both parts with the same strength.

    >>> penalty("measured", 1e-3)
    'locater(form=measured, shrink=0.001, hold=0.001, target=2)'
    """
    return f"locater(form={form}, shrink={strength:g}, hold={strength:g}, target={target})"


# "stored" is W_Q^T W_K as it stands, the paper's definition. No norm stands in front of this attention, so that it is
# also what the effective form was before it took the size of the tokens into account.
FORMS = ("measured", "stored")
STRENGTHS = (1e-3, 1e-2, 1e-4, 1e-1)
# The first plan had 20 arms. Those without a run after the first sitting were cut to what the choice needs, before any
# further run (docs/results/bao2024-own-plan.md).
DOSES = {f"{form}, {s:g}": penalty(form, s) for s in STRENGTHS for form in FORMS}
DOSES |= {"effective, 0.01": penalty("effective", 1e-2), "stored, 0.01, free": penalty("stored", 1e-2, "free")}
ARMS = {NONE: None, **DOSES}


@cache
def row(arm: str, seed: int, base: Plan = OWN, claim: str = "j") -> Row:
    control = ARMS[arm]
    return Row(claim, arm, replace(base, control=() if control is None else (control,), seed=seed))


def sweep() -> list[Row]:
    return [row(arm, 0) for arm in ARMS]


def ended(runs: Runs) -> dict[str, Line]:
    """Lines of the sweep that came to their end, those that there are so far."""
    lines = {each.arm: runs.of(each) for each in sweep()}
    return {arm: line for arm, line in lines.items() if line is not None and line["status"] == "done"}


def swept(runs: Runs) -> dict[str, Line] | None:
    """Lines of the sweep that came to their end; None while one of its runs is missing."""
    return None if runs.missing(sweep()) else ended(runs)


def published_dose(runs: Runs) -> str | None:
    """The dose of the stored form, which is the paper's, that judges the paper's claims."""
    return _dose(runs, [arm for arm in DOSES if arm.startswith("stored")])


def own_dose(runs: Runs) -> str | None:
    """The dose of our forms, on measured logits or in the units of the tokens."""
    return _dose(runs, [arm for arm in DOSES if not arm.startswith("stored")])


def best_dose(runs: Runs) -> str | None:
    """That of the two with the lower select loss in the sweep."""
    doses = [arm for arm in (published_dose(runs), own_dose(runs)) if arm is not None]
    lines = swept(runs) or {}
    return min(doses, key=lambda arm: lines[arm]["select_loss"], default=None)


def _dose(runs: Runs, arms: Collection[str]) -> str | None:
    """The least select loss among these doses, of those that raise entropy by `MORE_ENTROPY`; where none does, the one
    with the most entropy. None while the sweep is not whole, or its plain run failed.
    """
    lines = swept(runs)
    if lines is None or NONE not in lines:
        return None
    doses = {arm: line for arm, line in lines.items() if arm in arms}
    least = lines[NONE]["entropy"] + MORE_ENTROPY
    raising = {arm: line for arm, line in doses.items() if line["entropy"] >= least}
    if raising:
        return min(raising, key=lambda arm: raising[arm]["select_loss"])
    return max(doses, key=lambda arm: doses[arm]["entropy"], default=None)


def judged_rows(runs: Runs) -> dict[str, list[Row]]:
    """The plain arm and the two doses, by role, with the seeds that judge; nothing before the sweep is whole."""
    roles = {"none": NONE, "published": published_dose(runs), "ours": own_dose(runs)}
    if roles["published"] is None and roles["ours"] is None:
        return {}
    return {role: [row(arm, seed) for seed in SEEDS] for role, arm in roles.items() if arm is not None}


def rows_of(runs: Runs) -> list[Row]:
    """The sweep; then seed by seed, so that a sitting cut short leaves whole seeds."""
    by_role = judged_rows(runs)
    return [*sweep(), *(each for same_seed in zip(*by_role.values(), strict=True) for each in same_seed)]


def long_rows(runs: Runs) -> dict[str, list[Row]]:
    """The plain arm and the best dose, four times as long; nothing before the sweep is whole."""
    best = best_dose(runs)
    if best is None:
        return {}
    return {role: [row(arm, seed, LONG, "n") for seed in LONG_SEEDS] for role, arm in (("none", NONE), ("best", best))}


def long_rows_of(runs: Runs) -> list[Row]:
    return [each for same_seed in zip(*long_rows(runs).values(), strict=True) for each in same_seed]
