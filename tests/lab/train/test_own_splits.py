"""`--select` and `--report-text`: texts of their own for the two held-out splits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from locater import LocaterError
from locater_lab.engine.runs import Row, _check_files, with_data_folder
from locater_lab.train import Plan, Result, run
from locater_lab.train.data import open_data
from tests.lab.train.test_parts import TINY
from tests.lab.train.test_runs import Cut, Run, cut_at, weights

TEXTS = {"train": "one two\n\nthree four\n" * 30, "select": "five six seven\n" * 9, "report": "eight nine\n" * 12}


def files(folder: Path) -> dict[str, tuple[str, ...]]:
    """A file for each split, by the field of the plan that takes it."""
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return {
        field: (str(folder / f"{name}.txt"),) for field, name in zip(("corpus", "select", "report"), TEXTS, strict=True)
    }


def plan(folder: Path, **changes: Any) -> Plan:
    settings = {**TINY, "out": str(folder / "run"), "steps": 6, "checkpoint": 2, "log": 1, "observe": 0}
    return Plan(**{**settings, **files(folder), **changes})


def test_each_split_is_its_file_as_it_stands(tmp_path: Path) -> None:
    data: Any = open_data(plan(tmp_path), tmp_path, torch.device("cpu"))
    assert {name: bytes(tokens.tolist()).decode() for name, tokens in data.splits.items()} == TEXTS
    assert data.facts["bytes"] == {name: len(text) for name, text in TEXTS.items()}
    words: Any = open_data(plan(tmp_path, words=True), tmp_path, torch.device("cpu"))
    assert words.facts["vocabulary"] == 2 + 4  # of the train split alone
    assert words.facts["unknown"] == {"train": 0, "select": 27, "report": 24}


def test_a_run_on_them_goes_on_exactly_and_refuses_others(tmp_path: Path) -> None:
    whole = run(plan(tmp_path))
    assert whole.data["held_out"]["select"] == [str(tmp_path / "select.txt")]
    cut = plan(tmp_path, out=str(tmp_path / "cut"))
    with pytest.raises(Cut):
        run(cut, cut_at(5))
    (tmp_path / "report.txt").write_text(TEXTS["report"] + "ten\n")
    with pytest.raises(LocaterError, match="began on other data than there is now"):
        run(cut)
    (tmp_path / "report.txt").write_text(TEXTS["report"])
    assert weights(run(cut)) == weights(whole)


def test_the_same_corpus_with_other_splits_is_another_text(tmp_path: Path) -> None:
    own = open_data(plan(tmp_path), tmp_path, torch.device("cpu")).facts
    cut = open_data(plan(tmp_path, select=(), report=(), length=4), tmp_path, torch.device("cpu")).facts
    assert own["sha256"] != cut["sha256"]
    assert own["tokens"]["train"] > cut["tokens"]["train"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"select": ()}, "go together: give both or neither"),
        ({"report": ()}, "go together: give both or neither"),
        ({"task": "classify"}, "task=classify makes its own splits: leave out select="),
        ({"task": "sort", "corpus": ()}, "task=sort makes its own splits: leave out select="),
        ({"task": "image", "corpus": (), "images": "a.npz"}, "task=image makes its own splits: leave out select="),
    ],
)
def test_plans_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LocaterError, match=message):
        plan(tmp_path, **changes)


def test_texts_that_do_not_do(tmp_path: Path) -> None:
    whole = plan(tmp_path)
    for changes, message in (
        ({"select": whole.corpus}, "--select .*train.txt: a document in it is in --corpus too"),
        ({"report": whole.select}, "--report-text .*select.txt: a document in it is in --select too"),
        ({"length": 140}, "select.txt: its select split has 135 tokens, too few for sequences of 140"),
        ({"report": ("no-such.txt",)}, "no-such.txt: cannot be read"),
    ):
        with pytest.raises(LocaterError, match=message):
            run(replace(whole, **changes))
    assert not (tmp_path / "run").exists()


def test_rows_of_papers_find_them_in_the_data_folder(tmp_path: Path) -> None:
    whole = plan(tmp_path)
    names = {part: tuple(Path(path).name for path in getattr(whole, part)) for part in ("corpus", "select", "report")}
    row = Row("a", "plain", replace(whole, **names))
    assert with_data_folder(row.plan, tmp_path, tmp_path / "run") == whole
    _check_files([row], tmp_path)
    (tmp_path / "report.txt").unlink()
    with pytest.raises(LocaterError, match=r"report\.txt: no such file"):
        _check_files([row], tmp_path)


def test_the_command(run: Run, tmp_path: Path) -> None:
    options = {"report": "--report-text"}
    paths = [word for part, (path,) in files(tmp_path).items() for word in (options.get(part, f"--{part}"), path)]
    sizes = (
        "--layers 1 --width 16 --heads 2 --length 8 --steps 2 --device cpu --observe 0 --words --vocabulary 3".split()
    )
    result = run("train", "--out", str(tmp_path / "run"), *paths, *sizes)
    assert result.status == 0, result.err
    assert Result.load(tmp_path / "run" / "result.json").data["vocabulary"] == 5
    result = run("train", "--out", str(tmp_path / "other"), *paths[:4], *sizes)
    assert (result.status, len(result.err.splitlines())) == (2, 1)
