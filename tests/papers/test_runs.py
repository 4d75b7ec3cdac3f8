"""Training runs that claims rest on: rows, tuned arms, lines that survive, verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from locater.errors import LocaterError
from locater.train.controls import parse_control
from locater.train.plan import Plan
from locater_papers import PAPERS, Setting, reproduce
from locater_papers.bao2024 import arms, judged
from locater_papers.runs import Arm, Row, Runs, complete, placed
from tests import ROOT

TINY = Plan(
    layers=1,
    width=16,
    heads=2,
    length=16,
    steps=3,
    batch=4,
    observe=0,
    evaluate=0,
    checkpoint=0,
    device="cpu",
    task="sort",
)


def line(loss: float, **more: Any) -> dict[str, Any]:
    heads = {"M": 0.0, "S": 0.0, "F": 1.0, "concentration": 0.0}
    end = {
        "status": "done",
        "select_loss": loss,
        "report_loss": loss,
        "entropy": 2.0,
        "accuracy": None,
        "heads": heads,
        "device": "cpu",
    }
    return {**end, **more}


def test_rows_are_told_apart_by_what_they_train_alone() -> None:
    a, b = Row("c", "none", TINY), Row("d", "the same", replace(TINY, out="elsewhere", log=3))
    assert a.key == b.key != Row("c", "none", replace(TINY, seed=1)).key
    assert placed(replace(TINY, task="causal", corpus=("x.txt",)), Path("/data"), Path("/run")).corpus == (
        "/data/x.txt",
    )


def test_an_arm_is_tuned_with_one_seed_and_judged_with_all() -> None:
    arm, runs = Arm("arm", "c", TINY, rates=(0.1, 0.2, 0.3)), Runs()
    assert [(row.plan.rate, row.plan.seed) for row in arm.rows(runs)] == [(0.1, 0), (0.2, 0), (0.3, 0)]
    for rate, loss in ((0.1, 3.0), (0.2, 2.0)):
        runs.add(arm.row(rate, 0), line(loss))
    assert arm.rate(runs) is None, "one is missing"
    runs.add(arm.row(0.3, 0), {"status": "diverged", "message": "", "device": "cpu"})
    assert arm.rate(runs) == 0.2
    assert [(row.plan.rate, row.plan.seed) for row in arm.rows(runs)][3:] == [(0.2, 1), (0.2, 2)]
    runs.add(arm.row(0.2, 1), line(2.1))
    assert arm.ends(runs) is None
    runs.add(arm.row(0.2, 2), line(2.2))
    assert [end["report_loss"] for end in arm.ends(runs) or []] == [2.0, 2.1, 2.2]


def test_runs_are_made_several_at_a_time_and_only_once(tmp_path: Path) -> None:
    """Real runs in processes of their own; what is asked for depends on what was found."""
    path, arm = tmp_path / "runs.jsonl", Arm("arm", "c", TINY, rates=(1e-3, 1e-2), seeds=2)
    told: list[str] = []
    complete(lambda held: list(arm.rows(held)), Runs(path), tmp_path, 2, told.append)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len(lines) == len(told) == 3
    assert {x["status"] for x in lines} == {"done"}
    assert all(set(x["heads"]) == {"M", "S", "F", "concentration"} and x["entropy"] > 0 for x in lines)
    path.write_text(path.read_text() + '{"options": {"steps"')  # cut off
    again = Runs(path)
    assert len(again.lines) == 3
    assert arm.ends(again) is not None
    more = Arm("arm", "c", replace(TINY, width=32), rates=(1e-3,), seeds=1)
    again.add(more.row(1e-3, 0), line(1.0))
    assert len(Runs(path).lines) == 4, "the half line spoils none that follows"
    complete(lambda held: list(arm.rows(held)), again, tmp_path, 2, told.append)
    assert len(told) == 3


def test_a_run_that_breaks_stops_no_other_and_is_told(tmp_path: Path) -> None:
    rows = [Row("c", "good", TINY), Row("c", "bad", replace(TINY, control=("qkclip(limit=-1)",)))]
    path = tmp_path / "runs.jsonl"
    with pytest.raises(LocaterError, match=r"^1 runs broke .* bad, seed 0"):
        complete(lambda held: rows, Runs(path), tmp_path, 1)
    assert [json.loads(text)["arm"] for text in path.read_text().splitlines()] == ["good"]


def test_missing_data_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match=r"speeches\.tar\.xz: no such file"):
        complete(lambda held: list(arms.PLAIN.rows(held)), Runs(), tmp_path, 1)


def test_the_plan_is_whole_and_its_controls_exist() -> None:
    held = arms.everything()
    assert len({row.key for row in held}) == len(held)
    for control in {text for row in held for text in row.plan.control}:
        parse_control(control)
    assert {row.claim for row in held} == set(arms.ORDER)
    table = arms.plan_table()
    assert table[-1].split("|")[3].strip() == str(len(held))
    plan = ROOT / "docs" / "results" / "bao2024-plan.md"
    assert "\n".join(table) in plan.read_text(), "the page shows this plan"


def losses(**of: float) -> Runs:
    """Every run of the plan with a loss by the name of its arm; seeds differ by nothing, rates by a little."""
    runs = Runs()
    while missing := runs.missing(arms.rows_of(arms.ORDER, runs)):
        for row in missing:
            name = next((n for n in of if row.arm == n.replace("_", " ")), None)
            hot = 5.0 if row.claim == "i" and row.plan.control else 5.0 + 10 * row.plan.rate
            runs.add(
                row,
                line(hot if row.claim == "i" else (3.0 if name is None else of[name]) + abs(row.plan.rate - 2.5e-3)),
            )
    return runs


def test_verdicts_follow_the_runs(tmp_path: Path) -> None:
    runs = losses(LocAteR=2.9, mimetic=2.95)
    c, e, i = (judged.JUDGES[letter](runs) for letter in "cei")
    assert c["c1"].value == pytest.approx(-0.1)
    assert c["c1"].spread == pytest.approx(0.0)
    assert e["e1"].value == pytest.approx(-0.05)
    assert (e["e5"].numbers["best"], e["e5"].value) == ("mimetic", pytest.approx(-0.05))
    assert i["i1"].value == pytest.approx(0.1 / 0.04), "the plain run survives 0.04: 5.4 against 5.06 + 0.5"


def test_without_runs_nothing_is_decided_and_the_way_is_named() -> None:
    found = reproduce(PAPERS["bao2024"], Setting(quick=True), "c")
    assert [v.verdict for v in found.verdicts] == ["undecided", "undecided"]
    assert "--runs FILE" in found.verdicts[0].waits_for
    assert found.verdicts[0].command == "locater reproduce bao2024 --claim c1 --runs FILE"
