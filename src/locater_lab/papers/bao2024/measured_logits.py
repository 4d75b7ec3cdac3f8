"""LocAteR on what acts: the penalty on the logits of the tokens that a layer reads. Runs and claims of studies k and m,
all of them, and their bounds, ours.

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
from typing import Any

from locater_lab.engine.arms import difference, study_of_runs
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Arm, Row, Runs
from locater_lab.papers.bao2024.arms import (  # fmt: skip
    BASE,
    BOTH,
    ELSEWHERE,
    LEARNED,
    PLAIN,
    RIVALS,
    SHORT,
    STABLE,
    change_between,
    finished_lines,
    judging,
    measure_seeds,
    with_controls,
)
from locater_lab.papers.bao2024.paper_experiment import NO_COST
from locater_lab.papers.bao2024.training import arm_rows
from locater_lab.train.plan import Plan

# ---- runs ----


GRID_RATES = (1.5e-2, 1e-1, 6e-3)  # of the grid; what decides most comes first
TESTED_RATES = (1.5e-2, 1e-1)  # of the seeds: the lowest rate at which the plain model fails, and the hottest
JUDGING_SEEDS = range(1, 9)  # that judge hot rates; seed 0 chooses
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
    "held": "locater(form=stored)",
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


def grid_rows() -> list[Row]:
    return [hot_row(arm, rate, 0) for arm in HOT_PLANS for rate in GRID_RATES]


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
    lines = {arm: hot_lines(runs, arm, 0, GRID_RATES) for arm in MEASURED}
    if any(each is None for each in lines.values()):
        return None
    least = {arm: min(hot_entropy(line) for line in each or ()) for arm, each in lines.items()}
    keeping = [arm for arm in MEASURED if least[arm] >= COLLAPSE]
    if not keeping:
        return max(least, key=least.__getitem__)
    return min(keeping, key=lambda arm: fmean(hot_loss(line, "select_loss") for line in lines[arm] or ()))


def chosen_rival(runs: Runs) -> str | None:
    """The rival with the least select loss with seed 0, mean over rates; None while one of their runs is missing."""
    lines = {arm: hot_lines(runs, arm, 0, GRID_RATES) for arm in HOT_RIVALS}
    if any(each is None for each in lines.values()):
        return None
    return min(lines, key=lambda arm: fmean(hot_loss(line, "select_loss") for line in lines[arm] or ()))


def hot_roles(runs: Runs) -> dict[str, str]:
    """The arms that are run with more seeds: by role, those that are known so far."""
    roles = {"measured": chosen_variant(runs), "effective": "effective", "rival": chosen_rival(runs)}
    return {role: arm for role, arm in roles.items() if arm is not None} if roles["measured"] else {}


def hot_seed_rows(runs: Runs) -> list[Row]:
    """Seed by seed, so that a sitting cut short leaves whole seeds."""
    roles = hot_roles(runs)
    return [hot_row(arm, rate, seed) for seed in JUDGING_SEEDS for arm in roles.values() for rate in TESTED_RATES]


# Ordinary rates and other settings

POST = Arm("post-norm, none", "k", replace(BASE, norm="post"), (1e-3, 2.5e-4), SETTING_SEEDS)
SETTINGS = {  # the plain arm of each
    "learned positions": LEARNED["none"],
    "masked": ELSEWHERE["masked"][0],
    "norms after the sums": POST,
    "images": ELSEWHERE["image"][0],
}


def ordinary_arm(runs: Runs) -> Arm | None:
    """The chosen variant at its best of three rates."""
    arm = chosen_variant(runs)
    if arm is None:
        return None
    return Arm(f"measured LocAteR: {arm}", "k", with_controls(BASE, MEASURED[arm]), PLAIN.rates, PLAIN.seeds)


def guard_rows(runs: Runs) -> list[Row]:
    """The penalty above a limit alone, at the plain arm's best rate; nothing while that is not known."""
    rate = PLAIN.rate(runs)
    plan = with_controls(BASE, MEASURED["limit 10"])
    return [] if rate is None else repeat_row("limit 10", replace(plan, rate=rate), PLAIN.seeds)


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
        name: repeat_row(f"{setting}, {name}", replace(plain.base, control=texts, rate=rate), SETTING_SEEDS)
        for name, texts in controls.items()
    }


@cache
def repeat_row(arm: str, plan: Plan, seeds: int, claim: str = "k") -> list[Row]:
    return [Row(claim, arm, replace(plan, seed=seed)) for seed in range(seeds)]


def interleave(groups: Iterable[list[Row]]) -> list[Row]:
    """First the first of each, then the second, ...; of groups of one length."""
    return list(chain.from_iterable(zip(*groups, strict=True)))


def measured_rows(runs: Runs) -> list[Row]:
    arm = ordinary_arm(runs)
    plain = [row for each in (PLAIN, BOTH, RIVALS["weight decay 0.3"]) for row in each.rows(runs)]
    rows = [*plain, *grid_rows(), *hot_seed_rows(runs)]
    if arm is None:
        return rows
    rows += arm.rows(runs)
    for setting, none in SETTINGS.items():
        tried = [none.row(rate, 0) for rate in none.rates]
        rows += [*tried, *interleave(setting_rows(runs, setting).values())]
    return [*rows, *guard_rows(runs)]


# m: text that is seen once

ONCE = replace(BASE, corpus=("wikipedia/articles.txt.xz",), rate=2.5e-3)
ONCE_ARMS = {
    "none": (),
    "effective": (OTHER_FORMS["effective"],),
    "measured, scale": (MEASURED["scale, 0.01"],),
}


def once_rows_by_arm() -> dict[str, list[Row]]:
    return {
        name: repeat_row(f"seen once, {name}", replace(ONCE, control=texts), SETTING_SEEDS, "m")
        for name, texts in ONCE_ARMS.items()
    }


def once_rows(runs: Runs) -> list[Row]:
    return interleave(once_rows_by_arm().values())


# ---- claims ----


AT_HOT_RATES = f"{SHORT} steps, rates {TESTED_RATES[0]:g} and {TESTED_RATES[1]:g}"
TUNED = "each at its best of three rates"
AT_RATE = "at the plain arm's best rate"
MEASURED_CLAIMS = (
    Claim(
        "k1", "On measured logits, LocAteR prevents entropy collapse at hot rates",
        f"least mean entropy over rates, {AT_HOT_RATES}", "at least", COLLAPSE, by="ours",
    ),
    Claim(
        "k2", "On unit tokens, LocAteR lets entropy collapse there",
        f"least mean entropy over rates, effective form, {AT_HOT_RATES}", "at most", COLLAPSE, by="ours",
    ),
    Claim(
        "k3", "On measured logits it ends lower there than on unit tokens",
        f"report loss of the measured form less that of the effective one, mean over rates, {AT_HOT_RATES}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k4", "No rival does better there",
        f"report loss of the measured form less that of the best rival, mean over rates, {AT_HOT_RATES}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k5", "At an ordinary rate, LocAteR on measured logits costs no loss",
        f"change of report loss by the same variant, {TUNED}", "at most", NO_COST, by="ours",
    ),
    Claim(
        "k6", "It raises entropy there", f"change of entropy by the same variant, {TUNED}", "at least", 0.0, by="ours",
    ),
    Claim(
        "k7", "It does better there than on unit tokens",
        f"report loss of the measured form less that of the effective one, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k8", "It does better there than more weight decay",
        f"report loss of the measured form less that of a weight decay of 0.3, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k9", "With learned positions, LocAteR on measured logits lowers the loss",
        f"change of report loss by the same variant, {AT_RATE}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k10", "In a masked language model, it lowers the loss",
        f"change of report loss by the same variant, {AT_RATE}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k11", "With norms after the sums, it lowers the loss",
        f"change of report loss by the same variant, {AT_RATE}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k12", "With norms after the sums, it does better than on unit tokens",
        f"report loss of the measured form less that of the effective one, {AT_RATE}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k13", "In an image classifier, it raises accuracy",
        f"change of test accuracy by the same variant, {AT_RATE}", "at least", 0.0, by="ours",
    ),
    Claim(
        "k14", "Above a limit alone, it leaves an ordinary run as it is",
        f"change of report loss by a penalty on V above 10, {AT_RATE}", "about", 0.0, NO_COST, by="ours",
    ),
)  # fmt: skip
ONCE_CLAIMS = (
    Claim(
        "m1", "On text that is seen once, LocAteR on measured logits lowers the loss",
        "change of report loss by the scale alone on measured logits, one rate", "at most", 0.0, by="ours",
    ),
    Claim(
        "m2", "On text that is seen once, LocAteR on unit tokens lowers the loss",
        "change of report loss by the effective form, one rate", "at most", 0.0, by="ours",
    ),
    Claim(
        "m3", "On text that is seen once, LocAteR on measured logits raises entropy",
        "change of entropy by the scale alone on measured logits, one rate", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def judge_measured_form(runs: Runs) -> Results:
    none, effective, decay = PLAIN, BOTH, RIVALS["weight decay 0.3"]
    arm, settings = ordinary_arm(runs), {name: setting_rows(runs, name) for name in SETTINGS}
    measured: dict[str, Measurement | None] = {**judge_hot_rates(runs), **judge_settings(runs, settings)}
    if arm is not None:
        variant = {"variant": chosen_variant(runs)}
        measured |= {
            "k5": difference(runs, arm, none, "report_loss", variant),
            "k6": difference(runs, arm, none, "entropy"),
            "k7": difference(runs, arm, effective, "report_loss"),
            "k8": difference(runs, arm, decay, "report_loss"),
        }
    guarded = guard_rows(runs)
    rate = PLAIN.rate(runs)
    if rate is not None:
        plain = [PLAIN.row(rate, seed) for seed in range(PLAIN.seeds)]
        measured["k14"] = change_between(runs, judging(guarded), plain, "report_loss")
    tables = {
        "acting_hot": hot_table(runs),
        "acting_ordinary": arm_rows(runs, ordinary_arms(arm), PLAIN),
        "acting_settings": settings_table(runs, settings),
    }
    return Results(measured, tables)


def ordinary_arms(arm: Arm | None) -> list[Arm]:
    return [PLAIN, BOTH, RIVALS["weight decay 0.3"], *([] if arm is None else [arm])]


# --- hot rates ---


def lines_by_seed(runs: Runs, arms: Iterable[str]) -> dict[int, list[list[dict[str, object]]]]:
    """By seed: for each arm its lines at the tested rates. Seeds that one of them lacks are left out."""
    by_seed = {seed: [hot_lines(runs, arm, seed, TESTED_RATES) for arm in arms] for seed in JUDGING_SEEDS}
    return {seed: [x for x in lines if x is not None] for seed, lines in by_seed.items() if None not in lines}


def judge_hot_rates(runs: Runs) -> dict[str, Measurement | None]:
    roles = hot_roles(runs)
    if "rival" not in roles:
        return {}

    def least_entropy(role: str) -> Measurement | None:
        seeds = lines_by_seed(runs, [roles[role]])
        return measure_seeds([min(map(hot_entropy, own)) for (own,) in seeds.values()], {"arm": roles[role]})

    def against(role: str) -> Measurement | None:
        pairs = lines_by_seed(runs, [roles["measured"], roles[role]]).values()
        values = [fmean(map(hot_loss, a)) - fmean(map(hot_loss, b)) for a, b in pairs]
        return measure_seeds(values, {"arm": roles["measured"], "against": roles[role]})

    return {
        "k1": least_entropy("measured"),
        "k2": least_entropy("effective"),
        "k3": against("effective"),
        "k4": against("rival"),
    }


def hot_table(runs: Runs) -> dict[str, Any]:
    """Losses and entropies of every arm of the grid, by rate, with all seeds that there are."""
    rows = [hot_cell(runs, arm, rate) for arm in HOT_PLANS for rate in sorted(GRID_RATES)]
    return {
        "rows": [row for row in rows if row["runs"]],
        "roles": hot_roles(runs),
        "steps": SHORT,
        "rates": sorted(GRID_RATES),
    }


def hot_cell(runs: Runs, arm: str, rate: float) -> dict[str, Any]:
    """An arm at a rate: its runs by seed (seed 0 chooses, the others judge), and their means."""
    lines = {seed: runs.of(hot_row(arm, rate, seed)) for seed in (0, *JUDGING_SEEDS)}
    known = {seed: line for seed, line in lines.items() if line is not None}
    cell: dict[str, Any] = {"arm": arm, "kind": kind_of(arm), "rate": rate, "runs": len(known)}
    if not known:
        return cell
    losses, entropies = ([of(line) for line in known.values()] for of in (hot_loss, hot_entropy))
    return cell | {
        "diverged": sum(line["status"] != "done" for line in known.values()),
        "loss": fmean(losses),
        "entropy": fmean(entropies),
        "least_entropy": min(entropies),
        "seeds": list(known),
        "losses": losses,
        "entropies": entropies,
    }


def kind_of(arm: str) -> str:
    """
    >>> kind_of("none"), kind_of("limit 4"), kind_of("held"), kind_of("QK-norm")
    ('none', 'measured', 'other form', 'rival')
    """
    if arm == "none":
        return arm
    return "measured" if arm in MEASURED else "other form" if arm in OTHER_FORMS else "rival"


# --- other settings ---


def judge_settings(runs: Runs, settings: Mapping[str, Mapping[str, list[Row]]]) -> dict[str, Measurement | None]:
    questions = (
        ("k9", "learned positions", "none", "report_loss"),
        ("k10", "masked", "none", "report_loss"),
        ("k11", "norms after the sums", "none", "report_loss"),
        ("k12", "norms after the sums", "effective", "report_loss"),
        ("k13", "images", "none", "accuracy"),
    )
    return {
        id: change_between(runs, judging(settings[name]["measured"]), settings[name][base], what)
        for id, name, base, what in questions
        if settings[name]
    }


def settings_table(runs: Runs, settings: Mapping[str, Mapping[str, list[Row]]]) -> list[dict[str, Any]]:
    """A row for each setting and arm, with the seeds that there are."""
    return [
        {"setting": setting, **setting_arm_row(runs, name, rows, arms["none"])}
        for setting, arms in settings.items()
        for name, rows in arms.items()
        if finished_lines(runs, rows)
    ]


def setting_arm_row(runs: Runs, name: str, rows: list[Row], plain: list[Row]) -> dict[str, Any]:
    lines = finished_lines(runs, rows).values()
    table: dict[str, Any] = {"arm": name, "rate": rows[0].plan.rate, "seeds": len(lines)}
    for key, what in (("loss", "report_loss"), ("entropy", "entropy"), ("accuracy", "accuracy")):
        values = [line[what] for line in lines if line[what] is not None]
        table[key] = fmean(values) if values else None
        measured = change_between(runs, rows, plain, what) if name != "none" else None
        table[f"{key}_change"] = None if measured is None else {"mean": measured.value, "half": measured.spread}
    return table


def judge_once(runs: Runs) -> Results:
    rows = once_rows_by_arm()
    none, effective, scale = rows["none"], rows["effective"], rows["measured, scale"]
    measured = {
        "m1": change_between(runs, scale, none, "report_loss"),
        "m2": change_between(runs, effective, none, "report_loss"),
        "m3": change_between(runs, scale, none, "entropy"),
    }
    table = [setting_arm_row(runs, name, each, none) for name, each in rows.items() if finished_lines(runs, each)]
    return Results(measured, {"seen_once": table})


MEASURED_STUDY = study_of_runs("LocAteR on what acts", MEASURED_CLAIMS, measured_rows, judge_measured_form)
ONCE_STUDY = study_of_runs("text that is seen once", ONCE_CLAIMS, once_rows, judge_once)
