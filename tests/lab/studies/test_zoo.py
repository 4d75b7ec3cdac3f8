"""The zoo: claims from made-up runs, sinks that are not there, arms that failed, and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from locater_lab.engine.claims import verdict_of
from locater_lab.engine.mechanism_runs import plan_table
from locater_lab.engine.pages import page
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Runs
from locater_lab.papers import PAPERS, Measurement, Setting
from locater_lab.studies.zoo import PAPER, losses, maps
from locater_lab.studies.zoo.losses import ARMS, BARE, BOTH_WAYS, CAUSAL
from tests import ROOT
from tests.lab.made_runs import made_line, reproduce_without_rules

MEASURES = ("row_mass", "sink_rate", "spike_ratio", "gap", "explained_away", "entropy_share")
CLAIMS = (*losses.CLAIMS, *maps.SINKS, *maps.ENTROPY, *maps.COLLAPSE)
STEPS = {
    "causal": dict.fromkeys(CAUSAL, 2.0),
    "masked": dict.fromkeys(BOTH_WAYS, 3.0),
    "device": "a GPU",
    "model": "toy",
}


def line_of(loss: float, first: float, entropy: float | None, noise: float) -> dict[str, Any]:
    measures = dict.fromkeys(MEASURES, 0.5 + noise) | {
        "first_mass": first + noise,
        "entropy": entropy if entropy is None else entropy + noise,
        "halves": [{"residual": 0.9 + noise, "cosine": 0.1}],
    }
    return made_line(loss, measures=measures)


def made_up(first: float, path: Path | None = None) -> Runs:
    """Losses rise in the order of the arms, and entropy with them, but for one that has none and one that fails. Seeds
    differ a little, in each arm by another amount.
    """
    runs = Runs(path)
    for number, arm in enumerate(ARMS):
        while missing := runs.missing(arm.rows(runs)):
            for row in missing:
                seed = row.plan.seed
                noise = 1e-6 * (number + 1) * (seed - 1)
                far = 5.0 if arm is BARE and seed else 0.0
                loss = 3.0 + number / 100 + far + seed / 1000 - row.plan.rate + noise
                entropy = None if arm.name == "delta" else 2.0 + number / 10
                runs.add(row, line_of(loss, first, entropy, noise))
    return runs


def measured_of(runs: Runs) -> dict[str, Measurement | None]:
    measured: dict[str, Measurement | None] = {}
    for judge in (losses.judge, maps.judge_sinks, maps.judge_entropy, maps.judge_collapse):
        results = judge(runs)
        measured |= results.measured if isinstance(results, Results) else results
    return measured


def verdicts_of(measured: Mapping[str, Measurement | None]) -> dict[str, str]:
    return {c.id: verdict_of(c, measured[c.id], "").verdict for c in CLAIMS if measured[c.id] is not None}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Made-up runs without those of the copy source, and made-up times of a step."""
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    made_up(0.4, path)
    parts = [reproduce_without_rules(PAPER, Setting(runs=path), claim=letter).to_dict() for letter in "abcdf"]
    studies = {title: study for part in parts for title, study in part["studies"].items()}
    studies["time of a step"] = {"tables": {"step_times": STEPS}}
    whole = {**parts[0], "claims": [entry for part in parts for entry in part["claims"]], "studies": studies}
    copy: dict[str, Any] = json.loads(json.dumps(whole, allow_nan=False))
    return copy


@pytest.mark.usefixtures("without_rules")
def test_every_claim_is_decided_by_whole_arms_and_is_this_projects() -> None:
    measured = measured_of(made_up(first=0.4))
    verdicts = verdicts_of(measured)
    assert verdicts.keys() == measured.keys() == {claim.id for claim in CLAIMS}
    assert {claim.by for claim in PAPER.claims} == {"ours"}
    assert verdicts["a1"] == "fails", "later in the order than softmax"
    assert verdicts["a17"] == "undecided", "one of two seeds failed"
    sharp = measured["c4"]
    assert sharp is not None
    assert sharp.value > 0.3
    assert sharp.numbers["mechanisms"] == len(CAUSAL) - 1, "one has no entropy"
    assert all(value is None for value in measured_of(Runs()).values())


@pytest.mark.parametrize(("first", "open_ids"), [(0.4, set()), (0.01, {"b6", "b8"})])
@pytest.mark.usefixtures("without_rules")
def test_where_softmax_has_no_sink_none_is_missed(first: float, open_ids: set[str]) -> None:
    verdicts = verdicts_of(measured_of(made_up(first)))
    assert {id for id in ("b6", "b8") if verdicts[id] == "undecided"} == open_ids


@pytest.mark.usefixtures("without_rules")
def test_what_no_key_may_have_is_refuted_by_one_seed() -> None:
    runs = made_up(first=0.4)
    lines = BOTH_WAYS["doubly_normalized"].lines_so_far(runs)
    for line in lines:
        line["measures"]["explained_away"] = 0.0
    assert verdicts_of(measured_of(runs))["d3"] == "holds"
    lines[2]["measures"]["explained_away"] = 0.01
    assert verdicts_of(measured_of(runs))["d3"] == "fails"


def test_the_page_names_what_failed_and_has_no_bar_in_a_cell(document: dict[str, Any]) -> None:
    text, figures = page(document, PAPER)
    assert f"{BARE.name} (1 of 2)" in text
    assert f"({BARE.name}: 2 seeds at one rate)" in text
    assert f"Left out of the pictures, with a seed that failed: {BARE.name}." in text
    assert f">{BARE.name}<" not in figures["loss"]
    assert ">delta<" not in figures["entropy"], "it has none"
    sections = text[text.index("## Causal language model") :]
    assert sum(row.startswith("| ") for row in sections.splitlines()) == len(CAUSAL) + len(BOTH_WAYS) + 2
    assert not any("|" in claim["quantity"] for claim in document["claims"])


@pytest.mark.usefixtures("without_rules")
def test_the_page_says_what_the_verdicts_are(document: dict[str, Any]) -> None:
    text, _ = page(document, PAPER)
    starts = {
        "holds": "- Decided at this size, as stated:\n",
        "fails": "- Decided at this size, and not as stated:\n",
        "undecided": "- Undecided with so few seeds:\n",
    }
    for verdict, start in starts.items():
        ids = {x["id"] for x in document["claims"] if x["id"][0] == "a" and x["verdict"] == verdict}
        rows = text.split(start)[1].split("\n- ")[0]
        assert {claim.id for claim in losses.CLAIMS if f" ({claim.id}): " in rows} == ids


def test_the_page_shows_what_there_is(document: dict[str, Any]) -> None:
    studies = {title: study for title, study in document["studies"].items() if title == "time of a step"}
    nothing = {**document, "claims": [{**x, "measured": None} for x in document["claims"]]}
    text, figures = page({**nothing, "studies": studies}, PAPER)
    assert "## Time of a step" in text
    assert "## What came out" not in text
    text, figures = page({**nothing, "studies": {}}, PAPER)
    assert not figures
    assert "\n## " not in text.split("## Verdicts")[1]


def test_the_plan_is_that_of_the_arms() -> None:
    """Written before the runs; arms that change afterwards show here."""
    names = (
        "zoo",
        "qiu2025",
        "sun2026",
        "shi2022",
        "gerami2024",
        "sant2022",
        "xiao2026",
        "saada2024",
        "ding2020",
        "zhai2023",
    )
    text = (ROOT / "docs/results/mechanisms-plan.md").read_text()
    later = {"zhai2023": "f"}  # with a plan of its own
    papers = [
        replace(PAPERS[name], studies=tuple(s for s in PAPERS[name].studies if s.claims[0].id[0] != later.get(name)))
        for name in names
    ]
    assert "\n".join(plan_table(papers)) in text
