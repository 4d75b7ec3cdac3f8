"""LocAteR on what acts: the penalty on the logits of the tokens that a layer reads. Runs of studies k and m.

At hot rates (400 steps) each variant and each rival is run at three rates with seed 0. The best variant that keeps its
entropy, today's effective form and the best rival are then run with eight new seeds at two of the rates. The same
variant is trained at ordinary rates against no penalty, and in other settings. Study m trains on text that is seen
once, and waits for no choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from statistics import fmean

from locater_lab.engine.runs import Arm, Row, Runs
from locater_lab.papers.bao2024.arms import (
    BASE,
    BOTH,
    ELSEWHERE,
    LEARNED,
    PLAIN,
    RIVALS,
    SHORT,
    STABLE,
    with_controls,
)  # fmt: skip
from locater_lab.train.plan import Plan

RATES = (1.5e-2, 1e-1, 6e-3)  # of the grid; what decides most comes first
TESTED = (1.5e-2, 1e-1)  # of the seeds: the lowest rate at which the plain model fails, and the hottest
SEEDS = range(1, 9)  # that judge hot rates; seed 0 chooses
SETTING_SEEDS = 6
COLLAPSE = 1.0  # nats of mean entropy below which attention has collapsed: it is on fewer than e tokens
GUESS = math.log(BASE.vocabulary)  # the loss that counts for a run that diverges
MEASURED = {
    "scale, 0.01": "locater(form=measured, hold=0)",
    "both, 0.01": "locater(form=measured)",
    "limit 10": "locater(form=measured, hold=0, shrink=0.1, limit=10)",
    "scale, 0.1": "locater(form=measured, hold=0, shrink=0.1)",
    "limit 4": "locater(form=measured, hold=0, shrink=0.1, limit=4)",
    "both, 0.001": "locater(form=measured, shrink=0.001, hold=0.001)",
    "scale, 0.001": "locater(form=measured, hold=0, shrink=0.001)",
    "both, target 1": "locater(form=measured, target=1)",
    "mean only": "locater(form=measured, shrink=0)",
}
OTHER_FORMS = {
    "effective": "locater(target=2)",
    "effective, 0.1": "locater(target=2, shrink=0.1, hold=0.1)",
    "stored": "locater(form=stored)",
}
HOT_RIVALS = {name: STABLE[name] for name in ("sigma-reparam", "QK-norm", "QK-clip at 20", "soft-cap at 20")} | {
    "weight decay 0.3": RIVALS["weight decay 0.3"].base,
    "weight decay 1": replace(BASE, decay=1.0),
    "QK-clip at 50": with_controls(BASE, "qkclip(limit=50)"),
}
HOT_PLANS: dict[str, Plan] = {
    name: replace(plan, steps=SHORT, evaluate=0)
    for name, plan in {
        "none": BASE,
        **{name: with_controls(BASE, text) for name, text in {**MEASURED, **OTHER_FORMS}.items()},
        **HOT_RIVALS,
    }.items()
}


@cache
def hot_row(arm: str, rate: float, seed: int) -> Row:
    return Row("k", f"{arm}, hot", replace(HOT_PLANS[arm], rate=rate, seed=seed))


def grid() -> list[Row]:
    return [hot_row(arm, rate, 0) for arm in HOT_PLANS for rate in RATES]


def hot_loss(line: Mapping[str, object], which: str = "report_loss") -> float:
    """A run that diverges counts as a guess among all tokens."""
    return min(float(str(line[which])), GUESS) if line["status"] == "done" else GUESS


def hot_entropy(line: Mapping[str, object]) -> float:
    """A run that diverges counts as collapsed."""
    return float(str(line["entropy"])) if line["status"] == "done" else 0.0


def hot_lines(runs: Runs, arm: str, seed: int, rates: Iterable[float]) -> list[dict[str, object]] | None:
    """Lines of an arm and a seed, one for each rate; None while one is missing."""
    lines = [runs.of(hot_row(arm, rate, seed)) for rate in rates]
    known = [line for line in lines if line is not None]
    return known if len(known) == len(lines) else None


def chosen_variant(runs: Runs) -> str | None:
    """Of the measured variants whose entropy with seed 0 is above `COLLAPSE` at every rate, the one with the least
    select loss, mean over rates; where none is, the one with the most entropy at its worst rate. None while the grid of
    measured variants is not whole.
    """
    lines = {arm: hot_lines(runs, arm, 0, RATES) for arm in MEASURED}
    if any(each is None for each in lines.values()):
        return None
    least = {arm: min(hot_entropy(line) for line in each or ()) for arm, each in lines.items()}
    keeping = [arm for arm in MEASURED if least[arm] >= COLLAPSE]
    if not keeping:
        return max(least, key=least.__getitem__)
    return min(keeping, key=lambda arm: fmean(hot_loss(line, "select_loss") for line in lines[arm] or ()))


def chosen_rival(runs: Runs) -> str | None:
    """The rival with the least select loss with seed 0, mean over rates; None while one of their runs is missing."""
    lines = {arm: hot_lines(runs, arm, 0, RATES) for arm in HOT_RIVALS}
    if any(each is None for each in lines.values()):
        return None
    return min(lines, key=lambda arm: fmean(hot_loss(line, "select_loss") for line in lines[arm] or ()))


def hot_roles(runs: Runs) -> dict[str, str]:
    """The arms that are run with more seeds: by role, those that are known so far."""
    roles = {"measured": chosen_variant(runs), "effective": "effective", "rival": chosen_rival(runs)}
    return {role: arm for role, arm in roles.items() if arm is not None} if roles["measured"] else {}


def hot_seeds(runs: Runs) -> list[Row]:
    """Seed by seed, so that a sitting cut short leaves whole seeds."""
    roles = hot_roles(runs)
    return [hot_row(arm, rate, seed) for seed in SEEDS for arm in roles.values() for rate in TESTED]


# Ordinary rates and other settings

POST = Arm("post-norm, none", "k", replace(BASE, norm="post"), (1e-3, 2.5e-4), SETTING_SEEDS)
SETTINGS = {  # the plain arm of each
    "learned positions": LEARNED["none"],
    "masked": ELSEWHERE["masked"][0],
    "norms after the sums": POST,
    "images": ELSEWHERE["image"][0],
}


def ordinary(runs: Runs) -> Arm | None:
    """The chosen variant at its best of three rates."""
    arm = chosen_variant(runs)
    if arm is None:
        return None
    return Arm(f"measured LocAteR: {arm}", "k", with_controls(BASE, MEASURED[arm]), PLAIN.rates, PLAIN.seeds)


def guard(runs: Runs) -> list[Row]:
    """The penalty above a limit alone, at the plain arm's best rate; nothing while that is not known."""
    rate = PLAIN.rate(runs)
    plan = with_controls(BASE, MEASURED["limit 10"])
    return [] if rate is None else repeated("limit 10", replace(plan, rate=rate), PLAIN.seeds)


def setting_rows(runs: Runs, setting: str) -> dict[str, list[Row]]:
    """No penalty, the chosen variant and (behind post-norm) the effective form, at the plain arm's rate, by seed.
    Nothing while the rate or the variant is not known.
    """
    plain, arm = SETTINGS[setting], chosen_variant(runs)
    rate = plain.rate(runs)
    if rate is None or arm is None:
        return {}
    controls = {"none": (), "measured": (MEASURED[arm],)}
    if plain is POST:
        controls["effective"] = (OTHER_FORMS["effective"],)
    return {
        name: repeated(f"{setting}, {name}", replace(plain.base, control=texts, rate=rate), SETTING_SEEDS)
        for name, texts in controls.items()
    }


@cache
def repeated(arm: str, plan: Plan, seeds: int, claim: str = "k") -> list[Row]:
    return [Row(claim, arm, replace(plan, seed=seed)) for seed in range(seeds)]


def interleaved(groups: Iterable[list[Row]]) -> list[Row]:
    """First the first of each, then the second, ...; of groups of one length."""
    return list(chain.from_iterable(zip(*groups, strict=True)))


def rows_of(runs: Runs) -> list[Row]:
    arm = ordinary(runs)
    plain = [row for each in (PLAIN, BOTH, RIVALS["weight decay 0.3"]) for row in each.rows(runs)]
    rows = [*plain, *grid(), *hot_seeds(runs)]
    if arm is None:
        return rows
    rows += arm.rows(runs)
    for setting, none in SETTINGS.items():
        tried = [none.row(rate, 0) for rate in none.rates]
        rows += [*tried, *interleaved(setting_rows(runs, setting).values())]
    return [*rows, *guard(runs)]


# m: text that is seen once

ONCE = replace(BASE, corpus=("wikipedia/articles.txt.xz",), rate=2.5e-3)
ONCE_ARMS = {
    "none": (),
    "effective": (OTHER_FORMS["effective"],),
    "measured, scale": (MEASURED["scale, 0.01"],),
}


def once_rows() -> dict[str, list[Row]]:
    return {
        name: repeated(f"seen once, {name}", replace(ONCE, control=texts), SETTING_SEEDS, "m")
        for name, texts in ONCE_ARMS.items()
    }


def once_rows_of(runs: Runs) -> list[Row]:
    return interleaved(once_rows().values())
