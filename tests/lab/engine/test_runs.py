"""Training runs that claims rest on: rows, tuned arms, lines that survive, verdicts; and the page that is made of them."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from locater.errors import LocaterError
from locater_lab.engine import provenance, runs
from locater_lab.engine.arms import difference
from locater_lab.engine.pages import page
from locater_lab.engine.runs import Arm, Row, Runs, train_missing, with_data_folder
from locater_lab.papers import PAPERS, Setting, queue, reproduce
from locater_lab.papers.bao2024 import arms, training
from locater_lab.train.controls_and_conversion import parse_control
from locater_lab.train.plan import Plan
from tests import ROOT
from tests.lab.made_runs import known_measurements
from tests.processes import python

KEPT = ROOT / "docs" / "results" / "bao2024-runs.jsonl"
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


def test_the_code_of_a_line_is_that_of_both_packages(tmp_path: Path) -> None:
    """What a run computes is in the laboratory as much as in the instrument."""
    said = set()
    for number, changed in enumerate(("", *provenance.PACKAGES)):
        for package in provenance.PACKAGES:
            (tmp_path / str(number) / package / "train").mkdir(parents=True)
            (tmp_path / str(number) / package / "train" / "loop.py").write_text(f"x = {package == changed}\n")
        said.add(provenance.code_of_tree(tmp_path / str(number)))
    assert len(said) == 3
    assert all((provenance.SOURCES / package / "__init__.py").is_file() for package in provenance.PACKAGES)
    assert provenance.versions("cpu")["code"] == provenance.code_of_tree(provenance.SOURCES)


def test_rows_are_told_apart_by_what_they_train_alone() -> None:
    a, b = Row("c", "none", TINY), Row("d", "the same", replace(TINY, out="elsewhere", log=3))
    assert a.key == b.key != Row("c", "none", replace(TINY, seed=1)).key
    assert with_data_folder(replace(TINY, task="causal", corpus=("x.txt",)), Path("/data"), Path("/run")).corpus == (
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
    assert arm.final_lines(runs) is None
    runs.add(arm.row(0.2, 2), line(2.2))
    assert [end["report_loss"] for end in arm.final_lines(runs) or []] == [2.0, 2.1, 2.2]


def test_a_line_of_code_that_no_commit_has_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In docs/results of the tree; a file elsewhere takes any line, which says what it is of."""
    monkeypatch.setattr(provenance, "SOURCES", tmp_path / "src")
    row = Arm("arm", "c", TINY).row(1e-3, 0)
    kept, own = tmp_path / "docs" / "results" / "runs.jsonl", tmp_path / "own.jsonl"
    kept.parent.mkdir(parents=True)
    for more, why in (
        ({}, "it names no commit"),
        ({"commit": "7b66e820eb8f and changes"}, "files of src differ from its commit"),
    ):
        with pytest.raises(LocaterError, match=f"a line is not kept where {why}"):
            Runs(kept).add(row, line(3.0, **more))
        assert not kept.exists()
        Runs(own).add(row, line(3.0, **more))
    Runs(kept).add(row, line(3.0, commit="7b66e820eb8f"))
    assert json.loads(kept.read_text())["commit"] == "7b66e820eb8f"
    monkeypatch.setattr(runs, "commit_of", lambda folder: "7b66e820eb8f and changes")
    with pytest.raises(LocaterError, match="commit first, or give another file"):
        train_missing(lambda held: [row], Runs(kept), tmp_path, 1)


@pytest.mark.parametrize(("name", "without"), [("bao2024", 338), ("mechanisms", 332)])
def test_every_line_that_was_added_since_names_its_commit(name: str, without: int) -> None:
    """Older lines name none, or changes beside it; there are no more of them than there were."""
    commits = [x.get("commit") for x in map(json.loads, (KEPT.parent / f"{name}-runs.jsonl").read_text().splitlines())]
    assert sum(commit is None or commit.endswith(provenance.CHANGED) for commit in commits) == without


def test_an_arm_at_the_edge_of_its_grid_decides_nothing() -> None:
    """And the seed that chose its rate does not judge it."""
    held, arms_of = Runs(), {}
    for name, best in (("inside", 0.2), ("edge", 0.3), ("plain", 0.2)):
        arms_of[name] = arm = Arm(name, "c", replace(TINY, layers=len(arms_of) + 1), rates=(0.1, 0.2, 0.3), seeds=6)
        while missing := held.missing(arm.rows(held)):
            for row in missing:
                base = 3.0 if name == "plain" else 2.0
                held.add(
                    row,
                    line(base + abs(row.plan.rate - best) + (9.0 if row.plan.seed == 0 else 0.01 * row.plan.seed**2)),
                )
    inside = difference(held, arms_of["inside"], arms_of["plain"], "report_loss")
    assert inside is not None
    assert (inside.value, len(inside.sample)) == (pytest.approx(-1.0), 5)
    edge = difference(held, arms_of["edge"], arms_of["plain"], "report_loss")
    assert edge is not None
    assert (edge.value, edge.spread, edge.sample) == (pytest.approx(-1.0), math.inf, ())
    assert edge.spread_of == "unknown: the best rate is an edge of the grid: edge (0.3)"
    one_rate = replace(arms_of["edge"], rates=(0.3,), chose=2)
    assert (one_rate.edge(held), one_rate.choosing, arms_of["edge"].choosing) == (None, 2, 1)


def test_runs_are_made_several_at_a_time_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs in processes of their own; what is asked for depends on what was found. The processes are forked, with
    everything imported; the next test starts a fresh one.
    """
    if sys.platform == "linux":
        monkeypatch.setattr(runs, "get_context", lambda method: multiprocessing.get_context("fork"))
    path, arm = tmp_path / "runs.jsonl", Arm("arm", "c", TINY, rates=(1e-3, 1e-2), seeds=2)
    told: list[str] = []
    train_missing(lambda held: list(arm.rows(held)), Runs(path), tmp_path, 2, told.append, until=time.monotonic())
    assert not path.exists(), "nothing begins when the time is up, and nothing is lost by it"
    train_missing(lambda held: list(arm.rows(held)), Runs(path), tmp_path, 2, told.append)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len(lines) == len(told) == 3
    assert {x["status"] for x in lines} == {"done"}
    assert all(set(x["heads"]) == {"M", "S", "F", "concentration"} and x["entropy"] > 0 for x in lines)
    path.write_text(path.read_text() + '{"options": {"steps"')  # cut off
    again = Runs(path)
    assert len(again.lines) == 3
    assert arm.final_lines(again) is not None
    more = Arm("arm", "c", replace(TINY, width=32), rates=(1e-3,), seeds=1)
    again.add(more.row(1e-3, 0), line(1.0))
    assert len(Runs(path).lines) == 4, "the half line spoils none that follows"
    train_missing(lambda held: list(arm.rows(held)), again, tmp_path, 2, told.append)
    assert len(told) == 3


def test_a_stamp_stands_for_git(tmp_path: Path) -> None:
    """A copy of the tree without git names the commit of its stamp, and says so where its code is another."""
    for package in provenance.PACKAGES:
        (tmp_path / "src" / package).mkdir(parents=True)
        (tmp_path / "src" / package / "x.py").write_text("x = 1\n")
    folder = tmp_path / "src"
    assert provenance.commit_of(folder) is None
    (tmp_path / "stamp.json").write_text(json.dumps({"commit": "abc", "code": provenance.code_of_tree(folder)}))
    provenance.commit_of.cache_clear()
    assert provenance.commit_of(folder) == "abc"
    (folder / "locater" / "x.py").write_text("x = 2\n")
    provenance.commit_of.cache_clear()
    provenance.code_of_tree.cache_clear()
    assert provenance.commit_of(folder) == "abc and changes"
    with pytest.raises(LocaterError, match="is no git tree"):
        provenance.write_stamp(folder)


def test_the_queue_counts_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert queue.main(["bao2024", "o", "--runs", str(KEPT)]) == 0
    assert capsys.readouterr().out.startswith("60 runs are missing: none seed 1, held, 0.01 seed 1")
    assert queue.main(["bao2024", "c1", "--runs", str(KEPT)]) == 0
    assert capsys.readouterr().out == "all runs are there\n"


def test_a_run_that_breaks_stops_no_other_and_is_told(tmp_path: Path) -> None:
    rows = [Row("c", "good", TINY), Row("c", "bad", replace(TINY, control=("qkclip(limit=-1)",)))]
    path = tmp_path / "runs.jsonl"
    with pytest.raises(LocaterError, match=r"^1 runs broke .* bad, seed 0"):
        train_missing(lambda held: rows, Runs(path), tmp_path, 1)
    assert [json.loads(text)["arm"] for text in path.read_text().splitlines()] == ["good"]


PROCESSES = """
import os
from concurrent.futures import ProcessPoolExecutor
from locater_lab.engine.runs import _set_token_folder, process_context
from locater_lab.data.word_tokenizer import TOKENS_FOLDER
for folder in ("first", "second"):
    with ProcessPoolExecutor(1, process_context(), _set_token_folder, (folder,)) as pool:
        assert pool.submit(os.getenv, TOKENS_FOLDER).result() == folder
        assert pool.submit(eval, "'torch._dynamo' in __import__('sys').modules").result()
        assert not pool.submit(eval, "__import__('torch').cuda.is_initialized()").result(), "it could not be forked"
"""


def test_processes_begin_with_what_a_run_imports_and_with_the_tokens_of_their_plan() -> None:
    """The server that they are forked from lives on, and its environment is that of the first plan. A process of its own:
    in this one the workers of a fleet may have started the server, with other imports.
    """
    done = subprocess.run([python(), "-c", PROCESSES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_missing_data_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match=r"speeches\.tar\.xz: no such file"):
        train_missing(lambda held: list(arms.PLAIN.rows(held)), Runs(), tmp_path, 1)


def test_the_plan_is_whole_and_its_controls_exist() -> None:
    rows, first = arms.all_rows(), arms.first_plan()
    assert len({row.key for row in rows}) == len(rows)
    for control in {text for row in rows for text in row.plan.control}:
        parse_control(control)
    assert {row.claim for row in rows} == {row.claim for row in first} == set(arms.ORDER)
    table = arms.plan_table()
    assert table[-1].split("|")[3].strip() == str(len(first))
    plan = (ROOT / "docs" / "results" / "bao2024-plan.md").read_text()
    assert "\n".join(table) in plan, "the page shows the first plan as it was written"
    added = {(row.arm, row.plan.seed) for row in rows} - {(row.arm, row.plan.seed) for row in first}
    assert len(added) == len(rows) - len(first) == 55
    assert "55 runs" in plan.split("## Eight seeds")[1], "and the second one"
    assert {seed for _, seed in added} == set(range(3, 8))


def test_the_kept_runs_are_all_there() -> None:
    """Every row that the claims ask for, seeds that were added later too."""
    runs = Runs(KEPT)
    assert not runs.missing(arms.rows_of(arms.ORDER, runs))
    assert {len(arm.final_lines(runs) or ()) for arm in (arms.PLAIN, arms.BOTH, arms.RIVALS["QK-norm"])} == {8}


def made_up(**of: float) -> Runs:
    """Every run of the plan with a loss by the name of its arm; seeds and arms differ by a little noise, rates by
    more. At hot rates the plain model fails.
    """
    runs, generator = Runs(), random.Random(0)
    while missing := runs.missing(arms.rows_of(arms.ORDER, runs)):
        for row in missing:
            noise = generator.gauss(0.0, 1e-3)
            if row.claim == "i":
                runs.add(row, line(5.0 + noise + (0.0 if row.plan.control else 10 * row.plan.rate)))
                continue
            name = next((n for n in of if row.arm == n.replace("_", " ")), None)
            loss = 3.0 if name is None else of[name]
            entropy = 2.0 + noise + (0.2 if "LocAteR" in row.arm else 0.0)
            runs.add(row, line(loss + noise + 10 * abs(row.plan.rate - 2.5e-3), entropy=entropy))
    return runs


def saved(runs: Runs, path: Path) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in runs.lines.values()))
    return path


def test_verdicts_follow_the_runs() -> None:
    runs = made_up(LocAteR=2.9, mimetic=2.95)
    c, e, i = (
        known_measurements(judge(runs).measured)
        for judge in (training.judge_against_plain, training.judge_rivals, training.judge_hot_rates)
    )
    assert (c["c1"].value, len(c["c1"].sample)) == (pytest.approx(-0.1, abs=2e-3), 7)
    assert c["c1"].spread < 3e-3
    assert e["e1"].value == pytest.approx(-0.05, abs=2e-3)
    assert (e["e5"].numbers["best"], e["e5"].value) == ("mimetic", pytest.approx(-0.05, abs=2e-3))
    assert len(e["e3"].sample) == 2, "seeds that both arms have, without the one that chose their rates"
    assert i["i1"].value == pytest.approx(1.0), "the plain run survives 0.04 and fails at 0.1, which LocAteR survives"


def test_eight_seeds_decide_what_three_and_two_do_not(tmp_path: Path) -> None:
    path = saved(made_up(LocAteR=2.9), tmp_path / "runs.jsonl")
    eight = {v.claim.id: v.verdict for v in reproduce(PAPERS["bao2024"], Setting(runs=path), "c").verdicts}
    assert eight == {"c1": "holds", "c2": "holds"}
    two = {v.claim.id: v.verdict for v in reproduce(PAPERS["bao2024"], Setting(runs=path), "i").verdicts}
    assert two["i1"] == "undecided", "two seeds that agree to the last digit"


def test_a_seed_that_is_missing_pairs_no_others() -> None:
    """Changes are those within a seed, whichever seeds are there."""
    runs = made_up(LocAteR=2.9)
    del runs.lines[arms.BOTH.row(2.5e-3, 1).key]
    (row,) = training.arm_rows(runs, [arms.BOTH], arms.PLAIN)
    losses = {seed: [runs.of(arm.row(2.5e-3, seed)) for arm in (arms.BOTH, arms.PLAIN)] for seed in range(8)}
    expected = [a["report_loss"] - b["report_loss"] for a, b in losses.values() if a and b]
    assert row["change"]["loss"]["by_seed"] == pytest.approx(expected)
    assert len(expected) == 7
    assert training.judge_against_plain(runs).measured["c1"] is None, "a verdict waits for all"


def test_hot_rates_are_compared_with_the_first_at_which_the_plain_model_fails() -> None:
    """From the kept runs: 0.1 over 0.015; that over the hottest rate it survives would flatter."""
    results = training.judge_hot_rates(Runs(KEPT))
    assert known_measurements(results.measured)["i1"].value == pytest.approx(0.1 / 0.015)
    table = results.tables["hot_rates"]
    entropies = [
        x for row in table["rows"] if row["arm"] == "LocAteR" and row["rate"] >= 0.015 for x in row["entropies"]
    ]
    assert (round(min(entropies), 1), round(max(entropies), 1)) == (0.4, 0.9)
    assert table["best_at_hottest"]["arm"] == "sigma-reparam"


# --- the page
# -----------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_verdicts_say() -> None:
    """With all claims measured, with some, with none; and other words where verdicts are others."""
    paper, document = PAPERS["bao2024"], json.loads((KEPT.parent / "bao2024.json").read_text())
    text, figures = page(document, paper)
    assert len(figures) == 16
    assert text.index("**LocAteR against no penalty**") < text.index("**Theory.**")
    assert "which is not enough to decide" in text
    for verdict, words in (("holds", "so it is lowered"), ("fails", "so it is raised")):
        claims = [{**x, "verdict": verdict} if x["id"] == "c1" else x for x in document["claims"]]
        assert f"{words}; entropy" in page({**document, "claims": claims}, paper)[0]
    some = {
        **document,
        "claims": [x if x["id"][0] in "ab" else {**x, "measured": None} for x in document["claims"]],
        "studies": {name: document["studies"][name] for name in ("propagation probability",)},
    }
    text, figures = page(some, paper)
    assert list(figures) == ["propagation"]
    assert "**Theory.**" in text
    assert "**LocAteR against no penalty**" not in text
    none = {**document, "claims": [{**x, "measured": None} for x in document["claims"]], "studies": {}}
    text, figures = page(none, paper)
    assert "## What came out" not in text
    assert not figures


def test_one_claim_in_two_settings_has_one_verdict() -> None:
    """The small model's word on entropy stands beside that of the tuned runs, under the same id."""
    document = json.loads((KEPT.parent / "bao2024.json").read_text())
    assert [x["id"] for x in document["claims"] if x["claim"] == "LocAteR raises attention entropy"] == ["c2"]
    section = page(document, PAPERS["bao2024"])[0].split("## c. LocAteR in two settings")[1].split("\n## ")[0]
    assert [row.split("|")[1].strip() for row in section.splitlines() if row.startswith("| c")] == [
        "c1",
        "c1",
        "c2",
        "c2",
    ]


def test_without_runs_nothing_is_decided_and_the_way_is_named() -> None:
    found = reproduce(PAPERS["bao2024"], Setting(quick=True), "c")
    assert [v.verdict for v in found.verdicts] == ["undecided", "undecided"]
    assert "--runs FILE" in found.verdicts[0].waits_for
    assert found.verdicts[0].command == "locater reproduce bao2024 --claim c1 --runs FILE"
