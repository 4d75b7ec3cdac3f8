"""The demo: its verdicts are about what was planted, trained and removed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from locater.sources.open_source import open_source
from locater_lab.demonstration import DEMO, LENGTH, PLANTED, REPEATS, interleaved, repeats
from locater_lab.models.transformer import load
from tests.processes import python


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the command prints, 80 columns wide, and its page; the data are beside it."""
    page = tmp_path_factory.mktemp("demo") / "demo.html"
    command = [python(), "-m", "locater", "demo", "--report", page, "--json", page.with_suffix(".json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout, page


def test_the_doctor_names_both_planted_faults(told: tuple[str, Path]) -> None:
    act = json.loads(told[1].with_suffix(".json").read_text())["acts"][0]
    assert {finding["cause"] for finding in act["findings"]} == {"rotary-order", "scaled-head"}
    assert [finding["where"] for finding in act["findings"] if finding["cause"] == "scaled-head"] == [
        "head {}.{}".format(*PLANTED)
    ]


def test_the_hot_run_is_under_stress_and_the_sound_one_is_not(told: tuple[str, Path]) -> None:
    act = json.loads(told[1].with_suffix(".json").read_text())["acts"][1]
    assert act["heads"]
    assert 1 <= act["since"] <= 200
    assert act["losses"]["hot"] > act["losses"]["sound"] + 0.3
    page = Path(re.search(r"\S+watch\.html", " ".join(told[0].split()))[0])  # type: ignore[index]
    assert "<svg" in page.read_text()


def test_the_heads_that_repeat_are_found_and_their_removal_is_the_loss_without_them(told: tuple[str, Path]) -> None:
    """The loss with the columns of their output maps at zero, computed here."""
    act = json.loads(told[1].with_suffix(".json").read_text())["acts"][2]
    assert act["heads"]
    assert all(layer == 1 for layer, _ in act["heads"])
    assert min(act["induction"]) > 0.5
    rows, _ = repeats(torch.Generator().manual_seed(7), 32)
    before = _loss(load(REPEATS), rows)
    assert act["loss"] == pytest.approx(before, abs=1e-5)
    for name, change in act["without"].items():
        model = load(REPEATS)
        for layer, head in (map(int, place.split(".")) for place in name.split("+")):
            output = model.get_parameter(f"model.layers.{layer}.self_attn.o_proj.weight")
            size = output.shape[1] // 2
            with torch.no_grad():
                output[:, head * size : (head + 1) * size] = 0
        assert change == pytest.approx(_loss(model, rows) - before, abs=1e-5), name
    assert max(act["without"].values()) > 1


def _loss(model: torch.nn.Module, rows: torch.Tensor) -> float:
    with torch.no_grad():
        return functional.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()


def test_it_fits_a_terminal_and_its_page_loads_nothing(told: tuple[str, Path]) -> None:
    acts = told[0].split("Now your own")[0].splitlines()
    assert all(len(line) <= 80 for line in acts)
    page = told[1].read_text()
    assert "src=" not in page
    for title in ("Is this checkpoint what it should be?", "Which heads are failing", "What do these heads do?"):
        assert title in page
        assert title in told[0]


@pytest.mark.slow
def test_only_data_goes_to_standard_output() -> None:
    command = [python(), "-m", "locater", "demo", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert len(json.loads(done.stdout)["acts"]) == 3


def test_interleaving_is_the_other_order_of_pairs() -> None:
    """A rotation of neighbours on interleaved rows is one of halves on the stored ones."""
    weights, _ = open_source(DEMO)
    stored = weights.read("model.layers.0.self_attn.k_proj.weight").float()
    other = interleaved(stored)
    assert torch.equal(other[:2], stored[[0, 16]])
    assert torch.equal(other[32:34], stored[[32, 48]])


def test_repeated_words_can_be_known() -> None:
    rows, known = repeats(torch.Generator().manual_seed(0), 16)
    assert rows.shape == known.shape == (16, LENGTH)
    for row, mask in zip(rows.tolist(), known.tolist(), strict=True):
        period = mask.index(True) - 1
        assert row[period:] == row[: LENGTH - period]
