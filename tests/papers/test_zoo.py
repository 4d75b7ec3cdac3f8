"""The zoo: claims from made-up runs, sinks that are not there, arms that failed, and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from locater_papers import Measured, judge
from locater_papers.engine.claims import verdict_of
from locater_papers.engine.runs import Runs
from locater_papers.zoo import losses
from locater_papers.zoo.arms import ARMS, BARE, BOTH_WAYS, CAUSAL
from locater_papers.zoo.page import lead, page
from tests import ROOT

NUMBERS = ("row_mass", "sink_rate", "spike_ratio", "gap", "explained_away", "entropy_share")


def line(loss: float, first: float, entropy: float | None) -> dict[str, Any]:
    held = dict.fromkeys(NUMBERS, 0.5) | {
        "first_mass": first,
        "entropy": entropy,
        "halves": [{"residual": 0.9, "cosine": 0.1}],
    }
    heads = {"M": 0.0, "S": 0.0, "F": 1.0, "concentration": 0.0}
    end = {
        "status": "done",
        "select_loss": loss,
        "report_loss": loss,
        "accuracy": None,
        "heads": heads,
        "device": "cpu",
    }
    return {**end, "measures": held}


def made_up(first: float) -> Runs:
    """Losses rise in the order of the arms, and entropy with them, but for one that has none and one that fails."""
    runs = Runs()
    for number, arm in enumerate(ARMS):
        while missing := runs.missing(arm.rows(runs)):
            for row in missing:
                bad = 5.0 if arm is BARE and row.plan.seed else 0.0
                loss = 3.0 + number / 100 + bad + row.plan.seed / 1000 - row.plan.rate
                runs.add(row, line(loss, first, None if arm.name == "delta" else 2.0 + number / 10))
    return runs


def found(runs: Runs) -> dict[str, Measured | None]:
    readers = (losses._losses, losses._sinks, losses._entropy, losses._collapse)
    return {key: value for read in readers for key, value in read(runs).items()}


def verdicts(measured: Mapping[str, Measured | None]) -> dict[str, str]:
    claims = [claim for part in losses.CLAIMS.values() for claim in part]
    return {claim.id: judge(claim, m.value, m.spread) for claim in claims if (m := measured[claim.id]) is not None}


def document(measured: Mapping[str, Measured | None]) -> dict[str, Any]:
    claims = [claim for part in losses.CLAIMS.values() for claim in part]
    return {"claims": [verdict_of(claim, measured[claim.id], "").to_dict() for claim in claims]}


def test_every_claim_is_decided_by_whole_arms_and_is_this_projects() -> None:
    measured = found(made_up(first=0.4))
    said = verdicts(measured)
    assert said.keys() == measured.keys() == {claim.id for part in losses.CLAIMS.values() for claim in part}
    assert {claim.by for part in losses.CLAIMS.values() for claim in part} == {"notes"}
    assert said["a1"] == "fails", "later in the order than softmax"
    assert said["c4"] == "holds"
    sharp = measured["c4"]
    assert sharp is not None
    assert sharp.numbers["mechanisms"] == len(CAUSAL) - 1, "one has no entropy"
    assert all(value is None for value in found(Runs()).values())


@pytest.mark.parametrize(("first", "open_"), [(0.4, set()), (0.01, {"b6", "b8"})])
def test_where_softmax_has_no_sink_none_is_missed(first: float, open_: set[str]) -> None:
    said = verdicts(found(made_up(first)))
    assert {key for key in ("b6", "b8") if said[key] == "undecided"} == open_


def test_the_page_names_what_failed_and_has_no_bar_in_a_cell() -> None:
    made = document(found(made_up(first=0.4)))
    told = "\n".join(lead(made))
    assert f"{BARE.name} (1 of 2)" in told
    assert f"{BARE.name}: 2 seeds at one rate" in told
    lines, figures = page(made)
    assert f"Left out of the pictures, with a seed that failed: {BARE.name}." in lines
    assert f">{BARE.name}<" not in figures["loss"]
    assert sum(text.startswith("| ") for text in lines) == len(CAUSAL) + len(BOTH_WAYS) + 2
    assert not any("|" in claim["quantity"] for claim in made["claims"])
    assert lead({"claims": []}) == []


def test_the_plan_is_that_of_the_arms() -> None:
    """Written before the runs; arms that change afterwards show here."""
    from locater_papers import PAPERS
    from locater_papers.engine.mechanism_runs import plan_table

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
    assert "\n".join(plan_table([PAPERS[name] for name in names])) in text
