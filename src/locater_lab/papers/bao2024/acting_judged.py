"""Claims on LocAteR on what acts, judged by the runs of `acting.py`: studies k and m. All of them, and their bounds, are
ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from locater_lab.engine.arms import difference, study_of_runs
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Arm, Row, Runs
from locater_lab.papers.bao2024 import acting
from locater_lab.papers.bao2024.arms import BOTH, PLAIN, RIVALS, SHORT
from locater_lab.papers.bao2024.judged import arm_rows
from locater_lab.papers.bao2024.own import NO_COST
from locater_lab.papers.bao2024.repeats import change_of, finished, measured_by

HOT = f"{SHORT} steps, rates {acting.TESTED[0]:g} and {acting.TESTED[1]:g}"
TUNED = "each at its best of three rates"
AT_RATE = "at the plain arm's best rate"
CLAIMS = (
    Claim(
        "k1", "On measured logits, LocAteR prevents entropy collapse at hot rates",
        f"least mean entropy over rates, {HOT}", "at least", acting.COLLAPSE, by="ours",
    ),
    Claim(
        "k2", "On unit tokens, LocAteR lets entropy collapse there",
        f"least mean entropy over rates, effective form, {HOT}", "at most", acting.COLLAPSE, by="ours",
    ),
    Claim(
        "k3", "On measured logits it ends lower there than on unit tokens",
        f"report loss of the measured form less that of the effective one, mean over rates, {HOT}", "at most", 0.0, by="ours",
    ),
    Claim(
        "k4", "No rival does better there",
        f"report loss of the measured form less that of the best rival, mean over rates, {HOT}", "at most", 0.0, by="ours",
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


def of_acting(runs: Runs) -> Results:
    none, effective, decay = PLAIN, BOTH, RIVALS["weight decay 0.3"]
    arm, settings = acting.ordinary(runs), {name: acting.setting_rows(runs, name) for name in acting.SETTINGS}
    measured: dict[str, Measurement | None] = {**of_hot(runs), **of_settings(runs, settings)}
    if arm is not None:
        variant = {"variant": acting.chosen_variant(runs)}
        measured |= {
            "k5": difference(runs, arm, none, "report_loss", variant),
            "k6": difference(runs, arm, none, "entropy"),
            "k7": difference(runs, arm, effective, "report_loss"),
            "k8": difference(runs, arm, decay, "report_loss"),
        }
    guarded = acting.guard(runs)
    rate = PLAIN.rate(runs)
    if rate is not None:
        plain = [PLAIN.row(rate, seed) for seed in range(PLAIN.seeds)]
        measured["k14"] = change_of(runs, guarded, plain, "report_loss")
    tables = {
        "acting_hot": hot_table(runs),
        "acting_ordinary": arm_rows(runs, ordinary_arms(arm), PLAIN),
        "acting_settings": settings_table(runs, settings),
    }
    return Results(measured, tables)


def ordinary_arms(arm: Arm | None) -> list[Arm]:
    return [PLAIN, BOTH, RIVALS["weight decay 0.3"], *([] if arm is None else [arm])]


# --- hot rates
# ------------------------------------------------------------------------------------------------------------


def by_seeds(runs: Runs, arms: Iterable[str]) -> dict[int, list[list[dict[str, object]]]]:
    """By seed: for each arm its lines at the tested rates. Seeds that one of them lacks are left out."""
    by_seed = {seed: [acting.hot_lines(runs, arm, seed, acting.TESTED) for arm in arms] for seed in acting.SEEDS}
    return {seed: [x for x in lines if x is not None] for seed, lines in by_seed.items() if None not in lines}


def of_hot(runs: Runs) -> dict[str, Measurement | None]:
    roles = acting.hot_roles(runs)
    if "rival" not in roles:
        return {}

    def least_entropy(role: str) -> Measurement | None:
        seeds = by_seeds(runs, [roles[role]])
        return measured_by([min(map(acting.hot_entropy, own)) for (own,) in seeds.values()], {"arm": roles[role]})

    def against(role: str) -> Measurement | None:
        pairs = by_seeds(runs, [roles["measured"], roles[role]]).values()
        values = [fmean(map(acting.hot_loss, a)) - fmean(map(acting.hot_loss, b)) for a, b in pairs]
        return measured_by(values, {"arm": roles["measured"], "against": roles[role]})

    return {
        "k1": least_entropy("measured"),
        "k2": least_entropy("effective"),
        "k3": against("effective"),
        "k4": against("rival"),
    }


def hot_table(runs: Runs) -> dict[str, Any]:
    """Losses and entropies of every arm of the grid, by rate, with all seeds that there are."""
    rows = [hot_cell(runs, arm, rate) for arm in acting.HOT_PLANS for rate in sorted(acting.RATES)]
    return {
        "rows": [row for row in rows if row["runs"]],
        "roles": acting.hot_roles(runs),
        "steps": SHORT,
        "rates": sorted(acting.RATES),
    }


def hot_cell(runs: Runs, arm: str, rate: float) -> dict[str, Any]:
    """An arm at a rate: its runs by seed (seed 0 chooses, the others judge), and their means."""
    lines = {seed: runs.of(acting.hot_row(arm, rate, seed)) for seed in (0, *acting.SEEDS)}
    known = {seed: line for seed, line in lines.items() if line is not None}
    cell: dict[str, Any] = {"arm": arm, "kind": kind_of(arm), "rate": rate, "runs": len(known)}
    if not known:
        return cell
    losses, entropies = ([of(line) for line in known.values()] for of in (acting.hot_loss, acting.hot_entropy))
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
    >>> kind_of("none"), kind_of("limit 4"), kind_of("stored"), kind_of("QK-norm")
    ('none', 'measured', 'other form', 'rival')
    """
    if arm == "none":
        return arm
    return "measured" if arm in acting.MEASURED else "other form" if arm in acting.OTHER_FORMS else "rival"


# --- other settings
# ----------------------------------------------------------------------------------------------------


def of_settings(runs: Runs, settings: Mapping[str, Mapping[str, list[Row]]]) -> dict[str, Measurement | None]:
    questions = (
        ("k9", "learned positions", "none", "report_loss"),
        ("k10", "masked", "none", "report_loss"),
        ("k11", "norms after the sums", "none", "report_loss"),
        ("k12", "norms after the sums", "effective", "report_loss"),
        ("k13", "images", "none", "accuracy"),
    )
    return {
        id: change_of(runs, settings[name]["measured"], settings[name][base], what)
        for id, name, base, what in questions
        if settings[name]
    }


def settings_table(runs: Runs, settings: Mapping[str, Mapping[str, list[Row]]]) -> list[dict[str, Any]]:
    """A row for each setting and arm, with the seeds that there are."""
    return [
        {"setting": setting, **one_arm(runs, name, rows, arms["none"])}
        for setting, arms in settings.items()
        for name, rows in arms.items()
        if finished(runs, rows)
    ]


def one_arm(runs: Runs, name: str, rows: list[Row], plain: list[Row]) -> dict[str, Any]:
    lines = finished(runs, rows).values()
    table: dict[str, Any] = {"arm": name, "rate": rows[0].plan.rate, "seeds": len(lines)}
    for key, what in (("loss", "report_loss"), ("entropy", "entropy"), ("accuracy", "accuracy")):
        values = [line[what] for line in lines if line[what] is not None]
        table[key] = fmean(values) if values else None
        measured = change_of(runs, rows, plain, what) if name != "none" else None
        table[f"{key}_change"] = None if measured is None else {"mean": measured.value, "half": measured.spread}
    return table


def of_once(runs: Runs) -> Results:
    rows = acting.once_rows()
    none, effective, scale = rows["none"], rows["effective"], rows["measured, scale"]
    measured = {
        "m1": change_of(runs, scale, none, "report_loss"),
        "m2": change_of(runs, effective, none, "report_loss"),
        "m3": change_of(runs, scale, none, "entropy"),
    }
    table = [one_arm(runs, name, each, none) for name, each in rows.items() if finished(runs, each)]
    return Results(measured, {"seen_once": table})


STUDY = study_of_runs("LocAteR on what acts", CLAIMS, acting.rows_of, of_acting)
ONCE_STUDY = study_of_runs("text that is seen once", ONCE_CLAIMS, acting.once_rows_of, of_once)
