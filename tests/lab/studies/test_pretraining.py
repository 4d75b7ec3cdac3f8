"""The pretraining plan: rules for rates and arms, a queue that can be cut off, lines that name their commit, and
verdicts on runs whose outcome is planted.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locater.errors import LocaterError
from locater_lab.engine.reproduction import Setting, reproduce
from locater_lab.engine.runs import Row, Runs
from locater_lab.studies import pretraining
from locater_lab.studies.pretraining import plan, queue
from tests import ROOT

Loss = Callable[[Row], float | None]  # of a run; None where it diverges


def arm_of(row: Row) -> str:
    return row.arm.split(", ", 1)[1]


def power_of(row: Row) -> float:
    return math.log2(row.plan.rate / plan.RATE)


def planted(row: Row, loss: float | None) -> dict[str, Any]:
    facts = {"device": "none", "torch": "0", "commit": "abc", "code": "x"}
    if loss is None:
        return {"status": "diverged", "message": "", **facts}
    means = dict.fromkeys(pretraining.MEANS, 0.5)
    history = [[row.plan.steps // 2, loss + 0.1], [row.plan.steps, loss]]
    losses = {"select_loss": loss, "report_loss": loss, "history": history, "by_source": {"report docs": loss}}
    return {"status": "done", **losses, "means": means, **facts}


def fill(runs: Runs, loss: Loss, stages: tuple[str, ...] = ("10M",)) -> None:
    while missing := runs.missing(plan.rows(runs, stages)):
        for row in missing:
            runs.add(row, planted(row, loss(row)))


def bowl(best: dict[str, float], gains: dict[str, float]) -> Loss:
    """A parabola over rates for each arm, and noise that a seed shares among arms."""

    def loss(row: Row) -> float:
        arm = arm_of(row)
        noise = 0.02 * math.sin(37 * row.plan.seed) + 0.002 * math.sin(row.plan.seed * (3 + len(arm)))
        return 4.0 - gains.get(arm, 0.0) + 0.05 * (power_of(row) - best.get(arm, 2.0)) ** 2 + noise

    return loss


# --- rates ------------------------------------------------------------------------------------------------------------


def cell_of(arm: str = plan.NONE, positions: str = "rotary") -> plan.Cell:
    (cell,) = (c for c in plan.first_cells() if (c.arm, c.positions) == (arm, positions))
    return cell


@pytest.mark.parametrize(("best", "asked"), [(2.0, (0, 1, 2, 3, 4)), (5.0, (0, 1, 2, 3, 4, 5, 6)), (-1.0, (0, 1, 2, 3, 4, -1, -2))])  # fmt: skip
def test_rates_are_extended_until_the_best_is_inside(best: float, asked: tuple[int, ...]) -> None:
    runs = Runs()
    fill(runs, bowl({plan.NONE: best}, {}))
    powers, grid = cell_of().tried(runs)
    assert (tuple(powers), grid.best, grid.end) == (asked, best, "inside")
    lines = cell_of().judged(runs)
    assert lines is not None
    assert {line["options"]["rate"] for line in lines} == {plan.rate_of(int(best))}


def test_a_rate_at_which_the_arm_breaks_is_a_neighbour() -> None:
    runs, hill = Runs(), bowl({plan.NONE: 9.0}, {})
    fill(runs, lambda row: None if arm_of(row) == plan.NONE and power_of(row) > 5 else hill(row))
    assert (cell_of().grid(runs).best, cell_of().grid(runs).end) == (5, "inside")


def test_an_arm_whose_best_stays_at_an_edge_is_not_judged() -> None:
    runs = Runs()
    fill(runs, bowl({plan.NONE: 30.0}, {}))
    powers, grid = cell_of().tried(runs)
    assert (max(powers), grid.end) == (plan.HOTTEST, "edge")
    assert cell_of().judged(runs) is None
    assert not any(row.plan.seed >= plan.JUDGING for _, row in cell_of().rows(runs))


def test_one_seed_that_diverges_breaks_a_rate() -> None:
    runs, loss = Runs(), bowl({}, {})
    fill(runs, lambda row: None if (power_of(row), row.plan.seed) == (2, 1) else loss(row))
    assert cell_of().grid(runs).losses[2] == math.inf
    assert cell_of().grid(runs).best in (1, 3)


def test_no_seed_both_chooses_and_judges() -> None:
    for cell in plan.first_cells():
        assert not set(cell.choosing_seeds) & set(cell.judging_seeds)
        assert len(cell.judging_seeds) >= pretraining.FEWEST


# --- which arms go on -------------------------------------------------------------------------------------------------

GAINS = {"mimetic": 0.03, "QK-norm": 0.02, "weight decay 0.3": 0.01, "mean alone": 0.005, "LocAteR held": -0.02}
GAINS |= {"LocAteR free": -0.03, "LocAteR full": -0.03, "scale alone": -0.04}


def test_no_control_the_best_form_and_the_best_rival_go_on() -> None:
    runs = Runs()
    assert plan.next_cells("30M", runs) is None
    fill(runs, bowl({"mimetic": 3.0}, GAINS))
    cells = plan.next_cells("30M", runs)
    assert cells is not None
    assert {cell.arm for cell in cells} == {plan.NONE, "mean alone", "mimetic", "QK-norm"}
    assert {cell.start for cell in cells if cell.arm == "mimetic"} == {(2, 3, 4)}
    fill(runs, bowl({"mimetic": 3.0}, GAINS), ("30M",))
    larger = plan.next_cells("85M", runs)
    assert larger is not None
    assert {cell.arm for cell in larger} == {plan.NONE, "mean alone", "mimetic"}
    assert {cell.positions for cell in larger} == set(plan.POSITIONS)


def test_an_arm_at_an_edge_does_not_go_on() -> None:
    runs = Runs()
    fill(runs, bowl({"mimetic": 30.0}, GAINS))
    cells = plan.next_cells("30M", runs)
    assert cells is not None
    assert "mimetic" not in {cell.arm for cell in cells}


def test_the_seeds_that_judge_do_not_choose() -> None:
    runs, loss = Runs(), bowl({}, GAINS)
    fill(runs, lambda row: loss(row) - 0.5 * (row.plan.seed >= plan.JUDGING and arm_of(row) == "scale alone"))
    ranking = plan.ranked(plan.first_cells(), runs)
    assert ranking is not None
    assert ranking[0][1] == "mimetic"


def test_a_run_sees_text_once_and_has_the_size_that_it_says() -> None:
    tokens = 39_796_840  # of the stream that the plan names
    for name, size in plan.SIZES.items():
        held = plan.BASES[name]
        assert held.steps * held.batch <= (tokens - 1) // held.length
        assert size.parameters == pytest.approx(1e6 * int(name.removesuffix("M")), rel=0.07)
    rows = plan.rows(Runs())
    assert len({row.key for row in rows}) == len(rows) - 2 * 5 * 2 * len(plan.WHY) == 240 + 2 * 5 * 2 * 4


def test_seeds_come_before_one_another_so_that_a_cut_leaves_whole_grids() -> None:
    rows = plan.rows(Runs(), ("10M",))
    assert [row.plan.seed for row in rows] == [0] * 120 + [1] * 120


# --- the queue --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of random tokens."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    parts = []
    for split, count in (("train", 3000), ("report", 200), ("select", 200)):
        tokens = rng.integers(0, 256, count).astype("<u2")
        tokens.tofile(folder / f"{split}.u16")
        parts.append({"source": "docs", "split": split, "file": f"{split}.u16", "tokens": count, "characters": count})
        parts[-1] |= {"bytes": count, "sha256": queue.hashlib.sha256(tokens.tobytes()).hexdigest()}
    (folder / "tokenizer.json").write_text("{}")
    document = {"vocabulary": 256, "sha256": "made", "parts": parts, "tokenizer": {"file": "tokenizer.json", "sha256": ""}}  # fmt: skip
    (folder / plan.STREAM).write_text(json.dumps(document))
    return folder


FACTS = {"commit": "abc", "code": "x", "device": "cpu", "torch": "0"}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Row]]:
    """Four rows in place of all."""
    bases = plan.tiny_bases(256)
    cells = [cell for cell in plan.first_cells(bases) if cell.arm in (plan.NONE, "LocAteR held")]
    rows = [cell.row(0, 0) for cell in cells]
    monkeypatch.setattr(plan, "rows", lambda runs, stages, bases: rows)
    return rows  # type: ignore[return-value]


def lines_of(path: Path) -> list[str]:
    """Lines without their times, as text."""
    held = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(json.dumps({k: v for k, v in line.items() if k != "took"}, sort_keys=True) for line in held)


def test_a_queue_that_was_cut_off_ends_with_equal_lines(data: Path, few: list[Row], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert queue.drain(("10M",), Runs(whole), data, facts=FACTS, log=lambda text: None) == []

    def killed(text: str) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            queue.drain(("10M",), Runs(cut), data, facts=FACTS, log=killed)
        with cut.open("a") as file:
            file.write('{"claim": "10M", "half a li')
    assert len(lines_of(cut)) == 2
    queue.drain(("10M",), Runs(cut), data, facts=FACTS, log=lambda text: None)
    assert lines_of(cut) == lines_of(whole)
    assert len(lines_of(whole)) == len(few)
    queue.drain(("10M",), Runs(cut), data, facts=FACTS, log=killed)  # nothing is left to do


def test_runs_of_earlier_files_are_skipped_and_no_run_begins_after_the_time(
    data: Path, few: list[Row], tmp_path: Path
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert queue.drain(("10M",), Runs(first), data, facts=FACTS, minutes=0.0) == []
    assert not first.exists()
    runs = Runs(first)
    runs.add(few[0], planted(few[0], 4.0))
    queue.drain(("10M",), Runs(second, [first]), data, facts=FACTS, log=lambda text: None)
    assert len(lines_of(second)) == len(few) - 1


def test_a_run_that_breaks_stops_no_other(
    data: Path, few: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = queue.train

    def train(held: dict[str, Any], where: str) -> dict[str, Any]:
        if held["control"] and held["positions"] == "rotary":
            raise RuntimeError("no memory")
        return real(held, where)

    monkeypatch.setattr(queue, "train", train)
    out = tmp_path / "out.jsonl"
    broken = queue.drain(("10M",), Runs(out), data, facts=FACTS, log=lambda text: None)
    assert [text.rsplit(": ", 1)[1] for text in broken] == ["no memory"]
    assert len(lines_of(out)) == len(few) - 1


def test_a_line_has_what_the_page_asks_for(data: Path, few: list[Row]) -> None:
    line = queue.train(few[0].plan.to_dict(), str(data))
    assert set(line["means"]) == set(pretraining.MEANS) | {"sink"}
    assert set(line["by_source"]) == {"report docs"}
    assert len(line["heads"]["M"]) == few[0].plan.layers * few[0].plan.heads
    assert line["history"][-1][0] == few[0].plan.steps


def test_a_run_that_diverges_is_a_line(data: Path, few: list[Row]) -> None:
    hot = replace(few[0].plan, rate=1e30, clip=0.0)
    assert queue.train(hot.to_dict(), str(data))["status"] == "diverged"


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def test_a_dirty_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match="no commit is known"):
        queue.commit_of_tree(tree=tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\n")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        git(tmp_path, *arguments)
    assert len(queue.commit_of_tree(tree=tmp_path)) == 12
    (tmp_path / "notes.txt").write_text("beside the sources")
    assert queue.commit_of_tree(tree=tmp_path)
    (tmp_path / "src" / "a.py").write_text("x = 2\n")
    with pytest.raises(LocaterError, match=r"a\.py: changed since the commit"):
        queue.commit_of_tree(tree=tmp_path)
    git(tmp_path, "checkout", "-q", "src")
    (tmp_path / "src" / "b.py").write_text("new\n")
    with pytest.raises(LocaterError, match=r"b\.py"):
        queue.commit_of_tree(tree=tmp_path)


def test_a_stamp_is_of_these_sources_alone(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp.json"
    stamp.write_text(json.dumps({"commit": "abc", "code": queue.code_of_tree(queue.SOURCES)}))
    assert queue.commit_of_tree(stamp) == "abc"
    stamp.write_text(json.dumps({"commit": "abc", "code": "other"}))
    with pytest.raises(LocaterError, match="not those of commit abc"):
        queue.commit_of_tree(stamp)


def test_a_stage_has_one_state_of_the_code() -> None:
    runs = Runs()
    fill(runs, bowl({}, {}))
    with pytest.raises(LocaterError, match="has runs of commit abc"):
        queue.check_code(runs, ("10M",))
    queue.check_code(runs, ("30M",))
    next(iter(runs.lines.values()))["code"] = "y"
    with pytest.raises(LocaterError, match="several states of the code"):
        pretraining.found_in(runs)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(runs: Runs) -> dict[str, str]:
    found = pretraining.found_in(runs)
    study = replace(pretraining.STUDY, measure=lambda setting: found)
    document = reproduce(replace(pretraining.PAPER, studies=(study,)), Setting())
    return {v.claim.id: v.verdict if v.measured is not None else "unmeasured" for v in document.verdicts}


@pytest.mark.parametrize(
    ("gain", "expected"), [(0.05, ("holds", "holds")), (0.0, ("undecided", "fails")), (-0.05, ("fails", "fails"))]
)
def test_a_planted_arm_gets_its_verdict(gain: float, expected: tuple[str, str]) -> None:
    """A better arm, a flat one and a worse one; the best rival gains 0.02."""
    runs = Runs()
    fill(runs, bowl({}, {**dict.fromkeys(plan.FORMS, -0.2), "LocAteR held": gain, "mimetic": 0.02}))
    found = verdicts(runs)
    assert (found["a1"], found["a3"]) == (found["a2"], found["a4"]) == expected
    assert found["b1"] == found["d1"] == "unmeasured"
    (row,) = (x for x in pretraining.found_in(runs).tables["cells of 10M"] if (x["arm"], x["positions"]) == ("LocAteR held", "rotary"))  # fmt: skip
    assert row["change"] == pytest.approx(-gain, abs=0.004)
    if gain:
        assert row["steps"] is None if gain < 0 else row["steps"] < 1


def test_an_arm_at_an_edge_gets_none() -> None:
    runs = Runs()
    fill(runs, bowl(dict.fromkeys(plan.FORMS, 30.0), dict.fromkeys(plan.FORMS, 0.5)))
    assert set(verdicts(runs).values()) == {"unmeasured"}
    runs = Runs()
    fill(runs, bowl({plan.NONE: 30.0}, {}))
    assert set(verdicts(runs).values()) == {"unmeasured"}, "nor does an arm against one at an edge"


def test_a_judging_run_that_diverges_counts_as_guessing() -> None:
    runs, loss = Runs(), bowl({}, {"LocAteR held": 0.05})
    bad = plan.JUDGING + 1
    fill(runs, lambda row: None if arm_of(row) == "LocAteR held" and row.plan.seed == bad else loss(row))
    assert verdicts(runs)["a1"] == "undecided"


def test_sensitivity_is_judged_by_seeds_that_chose_nothing() -> None:
    def loss(row: Row) -> float:
        steep = 0.02 if arm_of(row) == "LocAteR held" else 0.05
        worse = 0.1 if arm_of(row) in plan.FORMS[1:] else 0.0
        return 4.0 + worse + steep * (1 + 0.05 * math.sin(row.plan.seed)) * (power_of(row) - 2) ** 2

    runs = Runs()
    fill(runs, loss, ("10M", "sensitivity"))
    assert verdicts(runs)["d1"] == "holds"


# --- the plan in words ------------------------------------------------------------------------------------------------


def test_the_plan_in_words_names_what_the_data_has() -> None:
    text = (ROOT / "docs" / "results" / "pretraining-plan.md").read_text()
    for arm in plan.ARMS:
        assert f"| {arm} |" in text, arm
    for name, size in plan.SIZES.items():
        row = f"| {name} | {size.layers} x {size.width}, {size.width // plan.HEAD} | {size.parameters / 1e6:.1f} M | {size.steps:,} | {size.steps * 32 * 512 / 1e6:.1f} M | {size.choosing} | {size.judging} |"
        assert row in text, row
    for stage, count in plan.counted().items():
        assert f"| {stage} | {count} |" in text, stage
    assert plan.SHA256 in text
    assert plan.TOKENIZER_SHA256 in text
    for claim in pretraining.CLAIMS:
        assert f"| {claim.id} |" in text
