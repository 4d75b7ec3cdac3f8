"""The early-warning record: its plan, its rule for a run that went wrong, and what counts as a warning in time."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import locater
from locater import Monitor
from locater_lab.studies import early_warning
from locater_lab.studies.early_warning import first_runs, plan, run_verdicts, training
from locater_lab.studies.early_warning import judging as judge

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs/results"


def tables() -> dict[str, Any]:
    return json.loads((RESULTS / "early-warning-unseen.json").read_text())["studies"]["unseen runs"]["tables"]


def test_what_is_quoted_from_the_page_is_that_of_the_record() -> None:
    data = tables()
    quoted = (ROOT / "docs/monitor.md").read_text()
    for alarm, shown in (
        ("Monitor()", "`Monitor()`"),
        ("Monitor(every=10)", "`Monitor(every=10)`"),
        *((name, name) for name in ("rate 3 times the usual or more", "rate of 1e-2 or more")),
        *((name, name) for name in ("loss 0.2 above its best", "gradient norm 3 times its median")),
    ):
        m = data["inside"][alarm]
        caught = early_warning.share_text(m["caught"], m["failed"], m["recall"])
        false = early_warning.share_text(m["false"], m["ordinary"], m["false_share"])
        assert f"| {shown} | {caught} | {early_warning.lead_text(m)} | {false} |" in quoted
    m = data["inside"]["Monitor()"]
    for text in (quoted, " ".join((Monitor.__doc__ or "").split())):
        assert f"{m['caught']} of {m['failed']}" in text
    by_cause = data["groups"]["cause"]
    for cause, words in (
        ("hot rate", "hot rate {}"),
        ("negative decay", "negative weight decay {}"),
        ("float16 overflow", "float16 overflow {}"),
        ("large start", "large initial weights {}"),
        ("sudden rate", "a rate that jumps ({})"),
        ("bad data", "bad data ({})"),
        ("SGD too hot", "SGD too hot {}"),
        ("optimizer constants", "optimizer constants {}"),
    ):
        assert words.format(f"{by_cause[cause]['caught']} of {by_cause[cause]['failed']}") in quoted
    assert f"Of the {data['missed']['failures']} failures missed, {data['missed']['not observed']} had" in quoted


def test_the_record_is_that_of_its_lines() -> None:
    lines = [json.loads(line) for line in (RESULTS / "early-warning-unseen.jsonl").read_text().splitlines()]
    record = tables()
    assert {line["name"] for line in lines} == {run.name for run in plan.all_runs()}
    assert all(row["step"] % 50 == 1 for line in lines for row in line["warnings"])
    outcomes = {run["name"]: run for run in record["runs"]}
    for line in lines[::10]:  # every tenth: judging all takes seconds
        wrong = judge.first_wrong_step(
            line["losses"], judge.usual_losses(lines, line["run"]["kind"], without=line["name"])
        )
        assert outcomes[line["name"]]["wrong"] == wrong
        assert outcomes[line["name"]]["warned"] == min((row["step"] for row in line["warnings"]), default=None)


def test_the_first_record_has_its_page() -> None:
    found = json.loads((RESULTS / "early-warning.json").read_text())
    assert first_runs.page_text(found) == (RESULTS / "early-warning.md").read_text(), "make early-warning"
    assert {run["run"] for run in found["runs"]} == {run.name for run in first_runs.all_plans()}


def test_the_plan_has_the_runs_that_its_page_states() -> None:
    runs = plan.all_runs()
    text = (RESULTS / "early-warning-plan.md").read_text()
    assert len({run.name for run in runs}) == len({run.seed for run in plan.forced_runs()}) + len(plan.healthy_runs())
    causes = Counter(run.cause for run in runs)
    ordinary = causes.pop("")
    assert f"{len(runs)} runs of at most {plan.STEPS} steps" in text
    assert f"{ordinary} ordinary and {causes.total()} forced" in text
    for cause, count in causes.items():
        assert f"| {cause} | {count} |" in text
    for kind in plan.KINDS:
        assert (
            f"| {kind.optimizer} {kind.rate:g}{', cosine' if kind.cosine else ''} | {kind.dtype} | {kind.model} |"
            in text
        )
    for run in runs:  # a fault that begins later leaves room for a lead and for the rule
        assert run.onset is None or 100 <= run.onset <= 400


def test_wrong_is_a_rise_a_stall_or_no_number_and_a_short_spike_is_none_of_them() -> None:
    usual = [3.0 - 0.01 * i for i in range(100)]
    assert judge.first_wrong_step(usual, usual) is None
    assert judge.first_wrong_step([2.9] * 100, usual) == 62  # 2.9 exceeds 3 - 0.01 (step - 1) + 0.5 from step 62 on
    assert judge.first_wrong_step([2.0] * 50 + [9.0] * 20 + [2.0] * 30, [2.0] * 100) is None
    assert judge.first_wrong_step([2.0] * 50 + [None], [2.0] * 100) == 51
    assert (
        judge.first_wrong_step([2.0] * 50 + [9.0] * 10 + [None], [2.0] * 100) == 51
    )  # the first step of what led to it


def test_a_warning_counts_between_the_fault_and_the_loss() -> None:
    run = {"onset": 200, "wrong": 300}
    assert judge.lead(run, [101, 251, 301]) == 49
    assert judge.lead(run, [101]) is None
    assert judge.lead(run, [291, 300, 351]) is None
    assert judge.lead(run, [290]) == 10
    assert judge.lead(run, [200]) == 100


@pytest.mark.parametrize(("count", "total"), [(0, 14), (12, 12), (31, 57), (1, 110)])
def test_the_interval_of_a_share_is_clopper_and_pearson_s(count: int, total: int) -> None:
    low = stats.beta.ppf(0.025, count, total - count + 1) if count else 0.0
    high = stats.beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    assert judge.share_interval(count, total) == pytest.approx((low, high), abs=1e-9)


def test_jumps_are_over_the_median_of_the_last_50_steps() -> None:
    values = [1.0] * 60 + [3.5, 1.0, None]
    assert judge.steps_of_jumps(values, lambda m: 3 * m) == [61, 63]
    assert judge.steps_of_jumps([1.0] * 5 + [9.0], lambda m: 3 * m) == []  # too few before


def test_false_alarms_are_those_of_healthy_stretches() -> None:
    def run(cause: str, wrong: int | None, onset: int, steps: list[int]) -> dict[str, object]:
        return {"cause": cause, "wrong": wrong, "onset": onset, "steps": 500, "raised": {"x": steps}}

    runs = [
        run("", None, 1, [1, 51, 301]),  # steps 1 and 51 are one alarm
        run("", None, 1, []),
        run("jump", 400, 201, [101, 351]),  # one before the fault, one in time
        run("heat", 300, 1, [301]),  # too late
        run("heat", None, 1, [51]),  # forced, and survived
    ]
    m = judge.alarm_numbers(runs, "x")
    assert (m["caught"], m["failed"], m["lead"]) == (1, 2, 49)
    assert (m["false"], m["ordinary"], m["false_survived"], m["survived"]) == (1, 2, 1, 1)
    assert m["false_per_1000"] == pytest.approx(1000 * 3 / (500 + 500 + 200))
    assert judge.score(runs, "x") == pytest.approx(0.5 - 0.5)


def test_rates_jump_and_grow_at_the_step_that_is_planned() -> None:
    kind = replace(plan.BY_NAME["gpt2-a"], rate=1.0)
    sudden = plan.TrainingRun("gpt2-a", "x", 0, onset=200, jump=30.0, until=300)
    assert [training.rate_at(kind, sudden, step) for step in (25, 50, 199, 200, 299, 300)] == [0.5, 1, 1, 30, 30, 1]
    rising = plan.TrainingRun("gpt2-a", "x", 0, onset=100, growth=1.03)
    assert training.rate_at(kind, rising, 109) == pytest.approx(1.03**10)


@pytest.mark.parametrize("how", ["shuffled", "random", "relabelled", "creeping"])
def test_data_are_spoilt_from_the_fault_on_and_not_before(how: str) -> None:
    ids = torch.arange(1000) % 251
    run = plan.TrainingRun("gpt2-a", "x", 7, onset=3, data=how)
    both = [
        list(zip(range(5), training.draw_batches(r, ids, 256, (4, 16)), strict=False))
        for r in (run, replace(run, data=""))
    ]
    equal = [all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for (_, x), (_, y) in zip(*both, strict=True)]
    assert equal[:2] == [True, True]
    if how == "creeping":
        assert equal[2:] == [True] * 3  # 2 of 150 steps of 4 sequences: none yet
    else:
        assert equal[2:] == [False] * 3


def test_a_hot_run_is_warned_of_by_the_released_monitor_and_the_same_is_read_from_its_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "docs.npy", np.tile(np.arange(97, dtype=np.uint8), 20))
    run = plan.TrainingRun("softcap", "x", 3, cause="hot rate", rate=100.0)
    line = training.train(run, tmp_path, "cpu", (2, 16), steps=52)
    warned = sorted({w["step"] for w in line["warnings"]})
    assert warned == [51]  # steps 1 and 51 are observed
    assert judge.bounds_crossed(line, 200, 5) == warned
    assert judge.bounds_crossed(line, math.inf, math.inf) == []
    assert line["troubles"] == []
    assert len(line["losses"]) == len(line["norms"]) == 52
    assert [row[0] for row in line["observed"]] == [1, 11, 21, 31, 41, 51]
    assert judge.relative_rates(line) == [pytest.approx(100 * min(1, step / 50)) for step in range(1, 53)]


def test_negative_decay_and_muon_reach_the_parameters() -> None:
    kind = plan.BY_NAME["sandwich"]
    run = plan.TrainingRun("sandwich", "x", 0, decay=-20)
    made = plan.make_optimizers(kind, run, model := plan.build_model(kind, run))
    assert [type(x).__name__ for x in made] == ["Muon", "AdamW"]
    assert all(group["weight_decay"] == -20 for x in made for group in x.param_groups)
    numbers = sum(p.numel() for x in made for group in x.param_groups for p in group["params"])
    assert numbers == sum(p.numel() for p in model.parameters())


# Verdicts of runs


def test_the_page_of_verdicts_is_that_of_the_kept_runs() -> None:
    unseen, new = (
        [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
        for name in (run_verdicts.UNSEEN, run_verdicts.LINES)
    )
    assert (RESULTS / run_verdicts.PAGE).read_text() == run_verdicts.page_text(unseen, new)
    assert [line["name"] for line in new] == [run.name for run in run_verdicts.planned_runs()]


@pytest.mark.parametrize("kind", [kind for kind in run_verdicts.KINDS if kind.build != "Qwen3"], ids=lambda k: k.build)
def test_a_planted_head_is_the_head_that_it_is_called(kind: plan.ModelKind) -> None:
    model = plan.build_model(kind, plan.TrainingRun(kind.name, "one", 0)).train()
    batch = torch.randint(256, (1, 8))

    def logits() -> list[list[float]]:
        with locater.observe(model) as seen:
            model(input_ids=batch, use_cache=False)
        rows = sorted(seen.rows, key=lambda row: (row.layer, row.head))
        return [[row.max_logit for row in rows if row.layer == layer] for layer in (0, 1)]

    before = logits()
    run_verdicts.query_of(model, 1, 2).mul_(1.5)
    after = logits()
    assert after[0] == before[0]
    assert [a != b for a, b in zip(after[1], before[1], strict=True)] == [False, False, True, False]
