"""A slice of `make fuzz`: 60 to 200 mutated files of every format, the same ones each time; and that the harness sees
faults.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.formats import FORMATS
from tests.fuzz.harness import GOOD, attempt, summary, supervised
from tests.fuzz.planted import PLANTED

FILES = {
    "safetensors": 150, "shards": 120, "quantised": 120, "gguf": 120, "pickle": 120, "pickled shards": 60, "legacy pickle": 80, "dcp": 40, "dcp index": 120, "dcp records": 120, "adapter": 60, "config": 60,
    "scan": 60, "statistics": 60, "log": 200,
}  # fmt: skip


def hangs(number: int, frame: Any) -> None:
    raise TimeoutError("more than 60 s on one file")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files_are_refused_or_read_right(name: str, tmp_path: Path) -> None:
    originals = tmp_path / "originals"
    originals.mkdir()
    FORMATS[name].make(originals)
    before = signal.signal(signal.SIGALRM, hangs)
    outcomes = []
    try:
        for seed in range(GOOD, FILES[name]):
            signal.alarm(60)
            outcomes.append(attempt(FORMATS[name], originals, tmp_path / "work", seed))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    faults = [f"seed {outcome.seed}: {outcome.detail}" for outcome in outcomes if outcome.kind == "fault"]
    assert not faults, f"{summary(outcomes)}; again: python -m tests.fuzz --format '{name}' --seed N\n" + "\n".join(
        faults[:3]
    )
    # mutations are neither all fatal nor all harmless
    assert {outcome.kind for outcome in outcomes} >= {
        "refused",
        "unchecked" if FORMATS[name].reference is None else "read",
    }


def test_the_harness_sees_every_kind_of_fault(tmp_path: Path) -> None:
    (tmp_path / "originals").mkdir()
    outcomes = [attempt(PLANTED, tmp_path / "originals", tmp_path / "work", seed) for seed in (0, 1, 4, 5, 6, 7, 8)]
    assert [outcome.kind for outcome in outcomes] == ["fault", "fault", "fault", "fault", "refused", "fault", "read"]
    said = (
        "another kind",
        "memory: ",
        "other than the reference: a",
        "not one line",
        "",
        "reference library refuses",
        "",
    )
    assert all(words in outcome.detail for outcome, words in zip(outcomes, said, strict=True))


def test_the_harness_sees_a_good_file_refused_or_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "originals").mkdir()
    for x, said in (
        ("6", "a good file is refused: refused"),
        ("9", "names of the reference are missing: a"),
        ("8", ""),
    ):
        (tmp_path / "originals" / "x").write_text(x)
        assert attempt(PLANTED, tmp_path / "originals", tmp_path / "work", GOOD).detail == said


@pytest.mark.slow
def test_a_worker_that_hangs_or_dies_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "originals").mkdir()
    (tmp_path / "kept").mkdir()
    outcomes = list(
        supervised("planted", tmp_path / "originals", tmp_path / "work", range(2, 5), tmp_path / "kept", limit_s=2)
    )
    said = ("no answer within ", "the process died (exit code 7)", "other than the reference")
    assert all(words in outcome.detail for outcome, words in zip(outcomes, said, strict=True))
    assert [(tmp_path / "kept" / f"kept-{seed}" / "x").read_text() for seed in (2, 3, 4)] == ["2", "3", "4"]
