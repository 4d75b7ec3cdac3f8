"""The page on which control to try: its numbers are those of the kept runs, results and benchmarks."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy import stats

from locater.errors import LocaterError
from locater_lab.engine.reproduction import DIGITS, round_numbers
from locater_lab.engine.runs import Row
from locater_lab.papers.bao2024 import measured_logits
from locater_lab.papers.bao2024.arms import BASE, SHORT
from locater_lab.studies import which_control as script
from locater_lab.studies.which_control import copying
from locater_lab.train.sweep import read_lines
from tests import ROOT

PAGE = ROOT / "docs" / script.PAGE
RUNS = ROOT / "docs" / "results" / "bao2024-runs.jsonl"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads((ROOT / "docs/results" / script.RESULTS).read_text())


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    return {json.dumps(x["options"], sort_keys=True): x for x in map(json.loads, RUNS.read_text().splitlines())}


def interval(values: list[float], digits: int, sign: str = "") -> str:
    """Student's t by scipy, straight from the runs."""
    mean, half = fmean(values), float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return " ".join((f"{mean:{sign}.{digits}f}", f"({mean - half:{sign}.{digits}f} to {mean + half:{sign}.{digits}f})"))


def row_of(name: str) -> str:
    """In the first table that has it; the task of copies has the second."""
    return next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))


def test_the_kept_document_is_that_of_the_files(document: dict[str, Any]) -> None:
    costs = {n: json.loads((ROOT / "benchmarks/results" / file).read_text()) for n, file in script.COSTS.items()}
    found = script.results_of(document, costs)
    kept = json.loads((ROOT / "docs" / script.PAPER.document_file).read_text())
    lines = {(x["arm"], x["seed"]): x for x in read_lines(ROOT / "docs/results" / copying.COPY_RUNS)}
    copies = copying.copying_results(lines)
    for study, results in zip(kept["studies"].values(), (found, copies), strict=True):
        assert study["tables"] == results.tables, "locater reproduce which-control"
    measured = {**found.measured, **copies.measured}
    for claim in kept["claims"]:
        assert claim["measured"] == pytest.approx(measured[claim["id"]].value, rel=1e-4)


def test_its_numbers_are_those_of_the_runs(lines: dict[str, dict[str, Any]]) -> None:
    def of(seed: int, what: str, **options: Any) -> float:
        return lines[Row("", "", replace(BASE, seed=seed, **options)).key][what]

    for name, options in (
        ("weight decay 0.3", {"decay": 0.3, "rate": 2.5e-3}),
        ("sigma-reparam", {"control": ("sigmareparam",), "rate": 6e-3}),
        ("LocAteR, measured", {"control": ("locater(form=measured, shrink=0.001, hold=0.001)",), "rate": 2.5e-3}),
    ):
        for what, digits in (("report_loss", 4), ("entropy", 2)):
            changes = [of(seed, what, **options) - of(seed, what, rate=2.5e-3) for seed in range(1, 8)]
            assert interval(changes, digits, "+") in row_of(name)
    hot = {"control": ("sigmareparam",), "steps": SHORT, "evaluate": 0}
    for rate in script.HOT:
        ends = [[of(seed, what, rate=rate, **hot) for seed in range(1, 9)] for what in ("report_loss", "entropy")]
        assert f"| {interval(ends[0], 2)}, {interval(ends[1], 2)} |" in row_of("sigma-reparam"), "without seed 0"
    learned = {"positions": "learned", "rate": 2.5e-3}
    heat = ("temperature(init=8, learn=False)",)
    ends = [  # as the document keeps them
        [round_numbers(of(s, "report_loss", control=control, **learned), DIGITS) for s in range(1, 8)]
        for control in (heat, ())
    ]
    changes = [hot - plain for hot, plain in zip(*ends, strict=True)]
    assert interval(changes, 4, "+") in row_of("temperature, fixed at 8")


def test_what_is_said_of_the_model_is_its_plan(document: dict[str, Any]) -> None:
    text = " ".join(PAGE.read_text().split())
    assert f"{BASE.layers} layers of width {BASE.width} with {BASE.heads} heads" in text
    assert f"{BASE.vocabulary:,} tokens" in text
    assert f"{BASE.steps:,} steps, each control at its best" in text
    assert f"At hot rates: {SHORT} steps" in text
    assert f"A decay of 0.3, in place of {BASE.decay:g}" in text
    assert len(measured_logits.MEASURED) == 9
    tried = Counter(name.split(" ")[0] for name in measured_logits.HOT_RIVALS)
    assert tried == {"sigma-reparam": 1, "QK-norm": 1, "QK-clip": 2, "soft-cap": 1, "weight": 2}
    settings = {claim["id"]: claim["numbers"].get("setting") for claim in document["claims"]}
    assert (settings["l1"], settings["l2"]) == ("floor 0.3", "temperature 8"), "in the names of two rows"
    (tuned,) = (row for row in script.KeptResults(document).tables["arms_rivals"] if row["arm"] == "sigma-reparam")
    assert tuned["select_loss"] == sorted(tuned["select_loss"], reverse=True), "its loss falls with the rate"


def test_words_are_refused_when_a_verdict_changes(document: dict[str, Any]) -> None:
    for id in ("k4", "c1", "d15", "k7", "k11", "l3"):
        changed = copy.deepcopy(document)
        next(claim for claim in changed["claims"] if claim["id"] == id)["verdict"] = "other"
        with pytest.raises(LocaterError, match=f"{id} is other now"):
            (
                script.advice(script.KeptResults(changed)),
                script.table_rows(script.KeptResults(changed), dict.fromkeys(script.COSTS)),
            )
    changed = copy.deepcopy(document)
    next(claim for claim in changed["claims"] if claim["id"] == "k4")["numbers"]["against"] = "QK-norm"
    with pytest.raises(LocaterError, match="the rival of study k is QK-norm now"):
        script.advice(script.KeptResults(changed))


def test_costs_are_those_of_the_benchmark(document: dict[str, Any], tmp_path: Path) -> None:
    benchmark = ROOT / "benchmarks" / "controls.py"
    for control in script.CONTROLS:
        assert control.cost.startswith("nothing") or f'"{control.cost}"' in benchmark.read_text(), control.cost
    ratios = {
        control.cost: {"median": 1.5 + n, "least": 1.25 + n, "largest": 2.0 + n}
        for n, control in enumerate(script.CONTROLS)
    }
    shape = {"layers": 4, "width": 256, "length": 256}
    held = {"machine": "a processor", "torch": "2", "shape": shape, "sequences": 4, "ratios": ratios}
    tables = script.results_of(document, {"cpu": held, "gpu": None}).tables
    assert tables["rows"][1][:3] == ["LocAteR, effective", "1.50 (1.25 to 2.00)", "not measured"]
    assert tables["rows"][2][:3] == ["LocAteR, measured", "2.50 (2.25 to 3.00)", "not measured"]
    assert len({len(row) for row in tables["rows"]}) == 1, "columns"
    assert tables["machines"][0].startswith("- CPU: a processor")
    assert tables["machines"][1].startswith("- GPU: not measured yet")


def test_a_copy_is_learned_where_the_mean_of_five_losses_is_half_of_log_64() -> None:
    level = math.log(64)
    assert copying.learned_at([level] * 10) is None
    assert copying.learned_at([level] * 10 + [0.0] * 10) == 13  # two of five are left of the high ones, 0.4 of log 64


def test_arms_of_a_seed_have_the_same_batches_and_the_control_acts() -> None:
    plain, held, decayed = (
        copying.train_arm(arm, 3, steps=3) for arm in ("none", "LocAteR, effective", "weight decay 0.3")
    )
    assert plain["losses"][0] == held["losses"][0] == decayed["losses"][0]
    assert plain == {**copying.train_arm("none", 3, steps=3), "seconds": plain["seconds"]}
