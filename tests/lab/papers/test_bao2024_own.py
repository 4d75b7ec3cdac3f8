"""Studies j to n of bao2024: which runs they ask for, what they choose, how made-up runs are judged, and their pages."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from locater.control import LocAteR
from locater_lab.engine.pages import page
from locater_lab.engine.reproduction import Setting, join_documents, reproduce
from locater_lab.engine.runs import Row, Runs
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.papers import PAPERS
from locater_lab.papers.bao2024 import arms, entropy_or_mean, measured_logits, paper_experiment
from locater_lab.train.controls_and_conversion import parse_control
from tests import ROOT
from tests.lab.made_runs import known_measurements, made_line
from tests.lab.papers import bao2024_run_plans as run_plans

KEPT = ROOT / "docs" / "results" / "bao2024-runs.jsonl"
Line = dict[str, Any]


@pytest.fixture(scope="module")
def earlier() -> dict[str, Line]:
    return run_plans.earlier_lines(Runs(KEPT))


def filled(earlier: dict[str, Line], letters: str, line: Callable[[Row], Line]) -> Runs:
    """Every run that these studies ask for, made by `line`, beside those that there were."""
    runs = Runs()
    runs.lines |= copy.copy(earlier)
    while missing := runs.missing([row for letter in letters for row in run_plans.ROWS[letter](runs)]):
        for row in missing:
            runs.add(row, line(row))
    return runs


def own_line(row: Row, loss: float, entropy: float) -> Line:
    steps = range(row.plan.evaluate, row.plan.steps + 1, row.plan.evaluate)
    history = [(step, loss + 1 / step) for step in steps]
    return made_line(loss, entropy=entropy, history=history, entropies=[(step, entropy) for step in steps])


def strength(row: Row) -> float:
    control = parse_control(row.plan.control[0]) if row.plan.control else None
    return control.shrink if isinstance(control, LocAteR) else 0.0


# --- the plan
# ------------------------------------------------------------------------------------------------------------


def test_the_plan_page_shows_the_plan_and_its_controls_exist(earlier: dict[str, Line]) -> None:
    """The amended plan: what the first sitting left. Runs that come later change nothing in it."""
    text = (ROOT / "docs" / "results" / "bao2024-own-plan.md").read_text()
    runs = Runs(KEPT)
    assert "\n".join(run_plans.next_table(runs)) in text.split("## After the first sitting")[1]
    later = next(row for row in paper_experiment.sweep_rows() if row.arm == "held, 0.1")
    runs.path = None
    runs.add(later, own_line(later, 5.0, 9.0) | {"commit": "of a later sitting"})
    assert "\n".join(run_plans.next_table(runs)) in text
    rows = run_plans.new_rows_by_letter(earlier)
    assert {letter: {row.claim for row in each} for letter, each in rows.items()} == {x: {x} for x in "jklmn"}
    for text in {text for each in rows.values() for row in each for text in row.plan.control}:
        parse_control(text)


def test_hot_runs_that_there_are_already_are_asked_for_by_the_same_key(earlier: dict[str, Line]) -> None:
    for arm, old in (("none", "none"), ("effective", "LocAteR"), ("QK-norm", "QK-norm")):
        for rate in measured_logits.GRID_RATES:
            assert measured_logits.hot_row(arm, rate, 1).key == arms.stability_rows()[old][rate][1].key in earlier


def test_nothing_waits_for_a_choice_but_what_follows_from_it(earlier: dict[str, Line]) -> None:
    runs = Runs()
    runs.lines |= earlier
    assert paper_experiment.experiment_rows(runs) == paper_experiment.sweep_rows()
    assert paper_experiment.long_experiment_rows(runs) == []
    assert {row.plan.steps for row in runs.missing(measured_logits.measured_rows(runs))} == {arms.SHORT}


def test_the_stored_form_charges_unit_tokens_and_the_default_those_that_are_read() -> None:
    """In the paper's own model, whose first layer has no norm in front."""
    torch.manual_seed(0)
    shape = Shape(vocabulary=40, layers=1, width=16, heads=1, kv_heads=1, hidden=16, length=8, positions="sinusoidal")
    model = Transformer(replace(shape, norm="post"), scale=0.3)
    attention = model.model.layers[0].self_attn
    W = (
        attention.q_proj.weight.T @ attention.k_proj.weight
    ).detach().double() / 4  # logits of unit tokens: head size 16
    stored, effective = (LocAteR(form=form).attach(model) for form in ("stored", "effective"))
    ids = torch.randint(40, (2, 8))
    model.train()(ids)
    size = float(model.model.embed(ids)[0].detach().double().square().mean())

    def penalty(W: torch.Tensor) -> float:
        return 0.01 * float(((W + W.T) / 2).square().sum()) + 0.01 * (float(W.trace()) - 2) ** 2

    assert float(stored.loss().detach()) == pytest.approx(penalty(W), rel=1e-5)
    assert float(effective.loss().detach()) == pytest.approx(penalty(size * W), rel=1e-5)
    assert size > 1.5, "the two would be nearly the same"


# --- j: doses
# ------------------------------------------------------------------------------------------------------------


def test_doses_are_chosen_by_select_loss_and_entropy_of_the_sweep() -> None:
    runs = Runs()
    ends = {  # select loss, entropy
        paper_experiment.NONE: (5.0, 3.0),
        "measured, 0.001": (5.003, 3.09),  # too little entropy
        "measured, 0.01": (5.02, 3.3),  # ours: the least loss of our forms that adds 0.1
        "held, 0.01": (5.03, 3.11),  # the same of the forms on W itself
        "held, 0.0001": (4.999, 3.02),
    }
    for row in paper_experiment.sweep_rows():
        assert paper_experiment.best_dose(runs) is None
        loss, entropy = ends.get(row.arm, (5.5, 3.5))
        # report losses are the other way around, and must not count
        runs.add(row, own_line(row, loss, entropy) | {"report_loss": 10 - loss})
    doses = (paper_experiment.weights_dose(runs), paper_experiment.own_dose(runs), paper_experiment.best_dose(runs))
    assert doses == ("held, 0.01", "measured, 0.01", "measured, 0.01")
    rows = runs.missing(paper_experiment.experiment_rows(runs))
    assert [row.arm for row in rows[:3]] == [paper_experiment.NONE, "held, 0.01", "measured, 0.01"]
    assert {row.plan.seed for row in rows} == set(range(1, 11)), "seed 0 chooses and does not judge"


def test_the_own_experiment_is_judged_by_other_seeds_than_the_sweep(earlier: dict[str, Line]) -> None:
    noise = random.Random(0)

    def line(row: Row) -> Line:
        dose = -math.log10(strength(row)) if strength(row) else 9.0
        wrong = 0.0 if row.plan.seed or not row.plan.control else 2.0  # what seed 0 says must not count
        loss = 5.0 + 0.1 * (9.0 - dose) / 9 + wrong + noise.gauss(0, 1e-4)
        return own_line(row, loss, 3.0 + (9.0 - dose) / 9 + noise.gauss(0, 1e-4))

    runs = filled(earlier, "jn", line)
    found = known_measurements(paper_experiment.judge_experiment(runs).measured)
    assert set(found) == {f"j{n}" for n in range(1, 9)}
    doses = {
        form: -math.log10(strength(next(row for row in paper_experiment.sweep_rows() if row.arm == dose)))
        for form, dose in (
            ("weights", paper_experiment.weights_dose(runs)),
            ("ours", paper_experiment.own_dose(runs)),
        )
    }
    expected_changes = {"j1": 0.1, "j3": 0.1, "j5": 0.1, "j7": 0.1, "j2": 1.0, "j4": 1.0, "j8": 1.0}
    for id, expected in expected_changes.items():
        dose = doses["ours" if id in ("j7", "j8") else "weights"]
        assert found[id].value == pytest.approx(expected * (9 - dose) / 9, abs=1e-3), id
        assert len(found[id].sample) == 10
    assert found["j6"].value == pytest.approx(0.0, abs=1e-9), "losses of these fall to the end"
    assert set(known_measurements(paper_experiment.judge_long_experiment(runs).measured)) == {"n1", "n2", "n3"}


def test_seeds_that_one_arm_lacks_are_left_out(earlier: dict[str, Line]) -> None:
    runs = filled(earlier, "j", lambda row: own_line(row, 5.0 + strength(row) + row.plan.seed, 3.0 + strength(row)))
    weights = paper_experiment.rows_by_role(runs)["weights"]
    for row in weights[3:]:
        del runs.lines[row.key]
    found = paper_experiment.judge_experiment(runs).measured["j1"]
    assert found is not None
    assert len(found.sample) == 3
    assert found.value == pytest.approx(strength(weights[0])), "the size of a seed cancels within it"
    del runs.lines[weights[0].key]
    assert paper_experiment.judge_experiment(runs).measured["j1"] is None, "two seeds judge nothing"


def test_a_sweep_that_is_not_whole_shows_its_runs_and_judges_nothing(earlier: dict[str, Line]) -> None:
    """Curves of every run that there is, with the distance from the plain one; no verdict, and the page says so."""
    runs = Runs()
    arms_run = (paper_experiment.NONE, "held, 0.01", "measured, 0.001")
    for row in paper_experiment.sweep_rows():
        if row.arm in arms_run:
            runs.add(row, own_line(row, 5.0 + strength(row), 3.0 + 10 * strength(row)))
    results = paper_experiment.judge_experiment(runs)
    assert known_measurements(results.measured) == {}
    curves = results.tables["own_training"]
    assert list(curves) == [paper_experiment.NONE, "measured, 0.001", "held, 0.01"], "by form and strength"
    for arm, change in ((paper_experiment.NONE, 0.0), ("measured, 0.001", 0.001), ("held, 0.01", 0.01)):
        assert [loss for _, loss in curves[arm]["change"]] == pytest.approx([change] * 12)
    studies = {"the paper's own experiment": {"tables": json.loads(json.dumps(results.tables))}}
    document = json.loads((KEPT.parent / "bao2024.json").read_text())
    others = [{**claim, "measured": None} for claim in document["claims"] if claim["id"][0] != "j"]
    asked = [{**claim, "measured": None} for claim in document["claims"] if claim["id"][0] == "j"]
    text, figures = page({**document, "claims": [*others, *asked], "studies": studies}, PAPERS["bao2024"])
    assert "**The paper's own experiment is open**: 3 runs of one seed" in text
    assert '"held, 0.01", entropy +0.10' in text
    assert list(figures) == ["own-training", "own-doses"]


# --- k and l
# -------------------------------------------------------------------------------------------------------------


def acting_line(row: Row) -> Line:
    """Measured forms keep their entropy and cost 0.02; weights decayed by 1 do best; at 0.1 the effective form
    diverges.
    """
    text, seed = " ".join(row.plan.control), 0.1 * row.plan.seed + random.Random(row.key).gauss(0, 1e-4)
    if "target=2" in text and row.plan.rate == 0.1:
        return {"status": "diverged", "message": "", "device": "cpu"}
    form = "measured" in text
    loss = (4.0 if row.plan.decay == 1 else 5.0) + seed + (0.02 if form else 0.0) + ("limit" in text) * 0.01
    return made_line(loss, entropy=2.5 if form else 0.2, accuracy=0.5 - 0.01 * form if row.plan.images else None)


def test_variant_and_rival_are_chosen_and_judged(earlier: dict[str, Line]) -> None:
    # hot runs and those on images are all made up
    old = {key: line for key, line in earlier.items() if line["claim"] != "i" and "image" not in str(line["arm"])}
    runs = filled(old, "k", acting_line)
    assert measured_logits.chosen_rival(runs) == "weight decay 1"
    assert measured_logits.chosen_variant(runs) in set(measured_logits.MEASURED) - {"limit 4", "limit 10"}
    found = known_measurements(measured_logits.judge_measured_form(runs).measured)
    assert set(found) == {f"k{n}" for n in range(1, 15)}
    assert (found["k1"].value, found["k2"].value) == (2.5, 0.0), "a run that diverges has collapsed"
    guess = math.log(4096)
    expected = 5.02 - (5.0 + guess) / 2 + 0.05 * fmean(measured_logits.JUDGING_SEEDS)  # of 0.1 * seed half stays
    assert found["k3"].value == pytest.approx(expected, abs=1e-3)
    assert found["k4"].value == pytest.approx(1.02, abs=1e-3)
    assert found["k11"].value == pytest.approx(0.02, abs=1e-3)
    assert found["k13"].value == pytest.approx(-0.01)


def cause_runs(earlier: dict[str, Line], entropy_of_floor: float = 0.0) -> Runs:
    """Loss is 2 - 0.03 M + 0.01 entropy + seed; what there is of the six arms already is made up, too."""

    def line(row: Row) -> Line:
        text = " ".join(row.plan.control)
        M = 2.0 if "locater" in text and "hold=0" not in text else 0.0
        entropy = 3.0 + 0.5 * bool(text) - 0.4 * ("shrink=0)" in text) + 0.001 * row.plan.seed
        entropy += entropy_of_floor if "floor=0.4" in text else (0.3 if "floor" in text else 0.0)
        entropy += 0.4 if "init=2" in text or "init=8" in text else 0.0
        heads = {"M": M * 1.0, "S": 0.0, "F": 1.0, "concentration": 0.0}
        if "temperature" in text:
            heads["M"] = 0.8  # of the weights; 0.2 under a temperature of 4
            M = 0.2
        noise = random.Random(row.key).gauss(0, 1e-5)
        return made_line(2 - 0.03 * M + 0.01 * entropy + row.plan.seed + noise, entropy=entropy, heads=heads)

    rate = {
        key: x for key, x in earlier.items() if x["arm"] == "learned positions, none" and "seed" not in x["options"]
    }
    learned = Runs()
    learned.lines |= rate
    plan = entropy_or_mean.plain_plan(learned)
    assert plan is not None
    runs = filled(rate, "l", line)
    for row in entropy_or_mean.known_rows(plan, "none"):
        runs.add(row, line(row))
    return runs


def test_slopes_of_loss_are_those_that_made_it(earlier: dict[str, Line]) -> None:
    runs = cause_runs(earlier)
    plan = entropy_or_mean.plain_plan(runs)
    assert plan is not None
    assert entropy_or_mean.nearest(runs, plan, "temperature") == "temperature 4"
    assert entropy_or_mean.nearest(runs, plan, "entropy penalty") == "floor 0.4"
    found = known_measurements(entropy_or_mean.judge_cause(runs).measured)
    assert set(found) == {f"l{n}" for n in range(1, 7)}
    assert [found[id].value for id in ("l3", "l4")] == pytest.approx([0.01, -0.03], abs=1e-3)
    assert found["l1"].value == pytest.approx(0.06, abs=1e-3)
    assert found["l5"].value > 0.5
    assert found["l6"].value == pytest.approx(0.005, abs=1e-3)


def test_entropy_that_is_not_matched_leaves_the_claim_open(earlier: dict[str, Line]) -> None:
    found = known_measurements(entropy_or_mean.judge_cause(cause_runs(earlier, entropy_of_floor=0.25)).measured)
    assert math.isinf(found["l1"].spread)
    assert "+0.25 nats from LocAteR's" in found["l1"].spread_of


# --- the page
# ------------------------------------------------------------------------------------------------------------


def test_pages_of_made_runs_and_of_none(earlier: dict[str, Line], tmp_path: Path) -> None:
    paper, path = PAPERS["bao2024"], tmp_path / "runs.jsonl"

    def line(row: Row) -> Line:
        return {**own_line(row, 5.0, 3.0), **acting_line(row)} if row.plan.evaluate else acting_line(row)

    def rendered(lines: Iterable[Line]) -> tuple[str, dict[str, str], set[str]]:
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        documents = [reproduce(paper, Setting(runs=path), letter).to_dict() for letter in run_plans.ROWS]
        document = json.loads(json.dumps(join_documents(documents, paper)))
        return *page(document, paper), {claim["verdict"] for claim in document["claims"]}

    text, figures, _ = rendered(filled(earlier, "jklmn", line).lines.values())
    assert list(figures) == ["own-training", "own-doses", "own-seeds", "acting-hot", "cause", "own-long"]
    headings = [part[0] for part in text.split("\n## ") if part[1:3] == ". "]
    assert headings == ["j", "k", "l", "m", "n"]
    waiting = text.split("Not decided yet")[1]
    assert [line[2:5].strip(":") for line in waiting.splitlines() if line.startswith("- j")] == ["j9", "j10"]
    text, figures, verdicts = rendered(earlier.values())
    assert "planned and not run yet" in text
    assert verdicts == {"undecided"}
    assert not figures
