"""Study o of bao2024: what is run in which order, which seeds choose and which judge, and one toy run of each new arm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locater_lab.engine.runs import Row, Runs, expected_rows, train
from locater_lab.papers.bao2024 import rebuilt_experiment as study
from tests.lab.made_runs import made_line

SHIFT = {"held, 0.001": -0.03, "held, 0.01": -0.01, "free": 0.01, "frobenius": -0.02}


def line(row: Row, judging: float = 0.0) -> dict[str, object]:
    """Losses that depend on arm and seed; in judging seeds held 0.001 is shifted by `judging` more."""
    seed = row.plan.seed
    loss = 5.0 + SHIFT.get(row.arm, 0.02) + 0.003 * (seed % 3) + 0.001 * ((seed * len(row.arm)) % 5)
    loss += judging if seed in study.JUDGING and row.arm == "held, 0.001" else 0.0
    heads = {
        "M": 1.0,
        "S": 0.2 if row.arm == study.NONE else 0.1,
        "F": 1.0,
        "concentration": 0.01 + 0.02 * row.arm.startswith("held"),
    }
    history = [[250, loss + 1], [500, loss]]
    return made_line(loss, heads=heads, history=history, entropy=3.0 + 0.5 * row.arm.startswith("held") + 0.01 * seed)


def made(judging: float = 0.0) -> Runs:
    runs = Runs()
    while missing := runs.missing(study.wanted_rows(runs)):
        for row in missing:
            runs.add(row, line(row, judging))
    return runs


def test_a_queue_that_is_cut_drops_doses_before_seeds() -> None:
    rows = study.wanted_rows(Runs())
    assert [row.plan.seed for row in rows[:25]] == [seed for seed in range(1, 6) for _ in range(5)]
    assert {row.arm for row in rows[:25]} == {study.NONE, "held, 0.01", "held, 0.001", "free", "frobenius"}
    assert len(expected_rows(study.wanted_rows)) == 60
    assert len({row.key for row in expected_rows(study.wanted_rows)}) == 60


def test_other_seeds_judge_than_those_that_chose() -> None:
    """The dose that looked best while choosing ends above none with the seeds that judge."""
    found = study.judge_rebuilt(made(judging=0.1)).measured
    assert found["j9"] is not None
    assert (found["j9"].numbers["dose"], len(found["j9"].sample)) == ("held, 0.001", 5)
    assert found["j9"].value > 0.03
    for key, way in (("o2", -1), ("o4", -1), ("o6", 1), ("o7", -1), ("j10", 1)):
        measurement = found[key]
        assert measurement is not None
        assert measurement.value * way > 0, key
    assert study.judge_rebuilt(made()).measured["j9"].value < -0.03  # type: ignore[union-attr]


def test_nothing_is_chosen_before_all_arms_are_whole() -> None:
    runs = made()
    del runs.lines[study.row_of("full", 5).key]
    found = study.judge_rebuilt(runs).measured
    assert found["j9"] is None
    assert found["o1"] is None
    assert found["o4"] is not None, "it has one dose"


@pytest.mark.parametrize("arm", [study.NONE, "held, 0.01", "frobenius", "decay of q and k"])
def test_an_arm_is_trained_at_toy_size(arm: str, tmp_path: Path) -> None:
    """By the code that trains it on a GPU: words, the build of fairseq, the penalty."""
    for step, name in enumerate(("train", "valid", "test"), 2):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"w{(i * i * step + step) % 37}" for i in range(4000)))
    sizes = {
        "corpus": ("train.txt",),
        "select": ("valid.txt",),
        "report": ("test.txt",),
        "steps": 3,
        "length": 16,
        "batch": 4,
    }
    more = {"width": 16, "hidden": 16, "observe": 2, "evaluate": 2, "compile": False, "device": "cpu"}
    plan = replace(study.row_of(arm, 1).plan, **sizes, **more)  # type: ignore[arg-type]
    found = train(plan.to_dict(), str(tmp_path))
    assert found["status"] == "done"
    assert {"M", "S", "F", "concentration"} <= found["heads"].keys()
    assert torch.isfinite(torch.tensor([found["report_loss"], found["entropy"], study.concentration(found)])).all()
