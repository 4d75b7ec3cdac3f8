"""Zhai and others 2023: the floor against plain arithmetic and enumeration, the reparametrization, verdicts of runs,
and the page.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locater.discovery import attention_layers
from locater.layers import Norm
from locater.theory import entropy_floor
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.pages import write_report
from locater_lab.engine.runs import Runs
from locater_lab.engine.trained_models import TrainedLayer
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.papers import PAPERS, Setting, reproduce
from locater_lab.papers.bao2024.arms import PLAIN, RIVALS, stability_rows
from locater_lab.papers.zhai2023 import PAPER, floor_and_reparam, trained_models
from tests import ROOT
from tests.lab.made_runs import made_line, reproduce_without_rules

KEPT = ROOT / "docs" / "results" / "bao2024-runs.jsonl"


def test_entropy_against_plain_arithmetic_and_where_a_row_is_nearly_certain() -> None:
    logits = draw_normal(5, 9, seed=0)
    p = np.exp(logits.numpy())
    p /= p.sum(1, keepdims=True)
    assert np.allclose(floor_and_reparam.row_entropy(logits), -(p * np.log(p)).sum(1))
    sure = torch.tensor([60.0, 0.0], dtype=torch.float64)  # q = exp(-60): H = q (1 + 60) up to q^2
    assert floor_and_reparam.row_entropy(sure).item() == pytest.approx(61 * math.exp(-60), rel=1e-12)


def test_random_layers_stay_above_the_theorem_and_the_tight_one_is_at_it() -> None:
    for seed in range(0, 60, 7):
        logits, s = floor_and_reparam.layer_rows(seed)
        assert float(floor_and_reparam.row_entropy(logits).min()) >= float(entropy_floor(s, len(logits))) - 1e-12
        assert float(floor_and_reparam.centred_norm(logits).max()) <= s * (1 + 1e-12), (
            "the theorem's norm is the larger"
        )
    logits, s = floor_and_reparam.tight_layer(6, 3.0)
    assert s == pytest.approx(3.0)
    assert floor_and_reparam.centred_norm(logits)[0].item() == pytest.approx(3.0)
    assert floor_and_reparam.row_entropy(logits)[0].item() == pytest.approx(float(entropy_floor(3.0, 6)), abs=1e-12)


def test_descents_come_near_the_floor_and_not_under_it() -> None:
    found = floor_and_reparam.descend_from_random(6, 20, norm=4.0) - entropy_floor(4.0, 6)
    assert -1e-9 < float(found.min()) < 0.01


def test_rows_of_two_levels() -> None:
    rows = floor_and_reparam.two_levels(5, 2.0)
    assert rows.shape == (4, 5)
    assert np.allclose(rows.sum(1), 0, atol=1e-12)
    assert np.allclose(rows.norm(dim=1), 2.0)
    assert [len(set(row.round(decimals=9).tolist())) for row in rows] == [2] * 4


def test_power_iteration_is_never_too_high_and_exact_at_first() -> None:
    errors = floor_and_reparam.norm_errors(0, 1e-2, 6)
    assert max(errors[0]) < 1e-9
    assert min(min(step) for step in errors) > -1e-9
    assert max(errors[-1]) > 0.05, "weights change by their own size here"


def test_gradients_know_the_norm() -> None:
    off, scaled, held = floor_and_reparam.gradient_errors(0)
    assert off < 1e-6
    assert scaled < 1e-12 < held
    assert floor_and_reparam.attachment_error(0) < 1e-12


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_theorem_bounds_real_layers(positions: str) -> None:
    """Spectral norms of a model's own weights, whether or not positions turn queries, are above every row's norm."""
    torch.manual_seed(0)
    shape = Shape(width=16, layers=1, heads=2, kv_heads=1, hidden=16, causal=False, positions=positions)
    layer = replace(next(iter(attention_layers(Transformer(shape, scale=0.5)))), norm=Norm())
    part = TrainedLayer("toy", 0, 0, layer, torch.randn(2, 20, 16))
    found = trained_models.entropies_of_layer(part)
    assert len(found) == 2
    for head in found:
        assert head["norm"] <= head["s"]
        assert head["theorem"] <= head["row"] <= head["entropy"] + 1e-9
        assert head["range"] <= head["entropy"] + 1e-9
    assert trained_models.is_plain(part)
    assert not trained_models.is_plain(replace(part, layer=replace(layer, softcap=5.0)))


# --- verdicts of runs
# ---------------------------------------------------------------------------------------------------


def line(loss: float, entropy: float) -> dict[str, Any]:
    return made_line(loss, entropy=entropy, measures={"entropy": entropy})


def made_up(path: Path, good: bool) -> Path:
    """Hot rates that the control survives or not, and arms that it makes better or worse."""
    runs = Runs(path)
    for name in ("none", "sigma-reparam"):
        for rate, rows in stability_rows()[name].items():
            fine = (name != "none") is good or rate < 0.01
            for row in rows:
                runs.add(row, line(4.0, 3.0) if fine else {"status": "diverged", "message": "", "device": "cpu"})
    for arm in (PLAIN, RIVALS["sigma-reparam"], *trained_models.ARMS):
        ours = "sigma" in arm.name
        better = (0.1 if good else -0.1) * (ours + ("gamma" in arm.name))
        while rows := runs.missing(arm.rows(runs)):
            for row in rows:
                noise = 1e-5 * row.plan.seed * len(arm.name)  # seeds that differ by nothing decide nothing
                runs.add(row, line(3.0 - better + row.plan.rate + noise, 2.0 + better + noise))
    return path


@pytest.mark.usefixtures("without_rules")
def test_runs_decide_both_ways(tmp_path: Path) -> None:
    for word, expected in ((True, "holds"), (False, "fails")):
        path = made_up(tmp_path / f"{word}.jsonl", word)
        said = {v.claim.id: v for letter in "de" for v in reproduce(PAPER, Setting(runs=path), claim=letter).verdicts}
        assert {said[name].verdict for name in ("d4", "d5", "e1", "e2", "e3")} == {expected}
        assert (said["d1"].alone, said["d1"].verdict) == (expected, "undecided"), "two seeds with one ratio"
        assert said["d4"].measured == pytest.approx(-0.1 if word else 0.1, abs=1e-3)
    assert said["d3"].verdict == "undecided", "a run that diverged has no entropy"


def test_the_kept_runs_decide_the_hot_rates() -> None:
    said = {v.claim.id: v.verdict for v in reproduce(PAPER, Setting(runs=KEPT), claim="d").verdicts}
    assert said == {"d1": "undecided", "d2": "undecided", "d3": "undecided", "d4": "undecided", "d5": "undecided"}


# --- the whole, small
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    def layers(setting: Setting) -> Iterator[TrainedLayer]:
        torch.manual_seed(0)
        for half in range(2):
            shape = Shape(width=16, layers=1, heads=4, kv_heads=2, hidden=16)
            layer = replace(next(iter(attention_layers(Transformer(shape, scale=0.5)))), norm=Norm())
            yield TrainedLayer("toy", 0, half, layer, torch.randn(2, 24, 16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(floor_and_reparam.DRAWS, True, 60)
        patch.setitem(floor_and_reparam.SEARCHES, True, 5)
        patch.setattr(floor_and_reparam, "DESCENT_STEPS", 30)
        patch.setitem(floor_and_reparam.STEPS, True, 14)
        patch.setattr(floor_and_reparam, "SEEDS", 2)
        patch.setattr(trained_models, "trained_layers", layers)
        runs = made_up(tmp_path_factory.mktemp("runs") / "runs.jsonl", True)
        yield json.loads(reproduce_without_rules(PAPER, Setting(runs=runs)).to_json())


def test_the_floor_holds_small_too(document: dict[str, Any]) -> None:
    said = {entry["id"]: entry["verdict"] for entry in document["claims"]}
    sure = ("a1", "a2", "a3", "a4", "a5", "a7", "a8", "b1", "b4", "b5")
    assert {name: said[name] for name in sure} == dict.fromkeys(sure, "holds")
    assert said["b6"] == "fails"


@pytest.mark.usefixtures("without_rules")
def test_the_page_and_its_first_lines_come_from_the_document(document: dict[str, Any], tmp_path: Path) -> None:
    written = write_report(document, PAPERS["zhai2023"], tmp_path / "page.md", tmp_path)
    text = written[0].read_text()
    assert {path.stem for path in written[1:]} == {f"zhai2023-{name}" for name in ("floor", "power", "bounds", "hot")}
    for path in written[1:]:
        ElementTree.parse(path)
    assert "At the best rates it changes the loss by -0.1" in text
    assert "nats at this size: no worse." in text
    assert "## e. Where gamma begins" in text
    claims = [x if x["id"][0] not in "de" else {**x, "measured": None} for x in document["claims"]]
    studies = {
        title: study for title, study in document["studies"].items() if "rates" not in title and "gamma" not in title
    }
    without = {**document, "claims": claims, "studies": studies}
    assert "## d." not in write_report(without, PAPERS["zhai2023"], tmp_path / "bare.md", tmp_path)[0].read_text()
