"""Nait Saada, Naderi and Tanner 2025: spectra against plain references, claims at sizes that take a moment, verdicts of
runs, the page.
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
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.pages import write_report
from locater_lab.engine.runs import Runs
from locater_lab.engine.trained_models import TrainedLayer
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.papers import PAPERS, Setting, reproduce
from locater_lab.papers.saada2024 import PAPER, map_spectrum, width_collapse
from tests.lab.made_runs import fill, made_line, reproduce_without_rules


def test_random_maps_have_the_unevenness_they_are_asked_for() -> None:
    A = map_spectrum.random_map(400, 0, sigma=0.5).numpy()
    assert np.allclose(A.sum(1), 1)
    assert (400 * A).std() == pytest.approx(0.5, abs=0.02)
    causal = map_spectrum.random_map(5, 0, causal=True).numpy()
    assert np.allclose(np.triu(causal, 1), 0)
    assert np.allclose(map_spectrum.random_map(5, 1, name="centred").sum(1), 0, atol=1e-15)


def test_the_spectrum_against_numpy() -> None:
    A = map_spectrum.random_map(20, 3)
    spectrum, s = map_spectrum.leading_values(A), np.linalg.svd(A.numpy(), compute_uv=False)
    values = sorted(abs(np.linalg.eigvals(A.numpy())), reverse=True)
    assert spectrum["lambda_1"] == pytest.approx(1.0)
    assert spectrum["lambda_2"] == pytest.approx(values[1])
    assert spectrum["stable_rank"] == pytest.approx((s**2).sum() / s[0] ** 2)


def test_excess_rank_is_that_of_the_gram_matrix_and_keeps_its_digits() -> None:
    x = draw_normal(6, 4, seed=0)
    s = np.linalg.svd((x @ x.mT).numpy(), compute_uv=False)
    assert 1 + width_collapse.excess_rank(x) == pytest.approx((s**2).sum() / s[0] ** 2)
    near = torch.diag(torch.tensor([1.0, 1e-5], dtype=torch.float64))
    assert width_collapse.excess_rank(near) == pytest.approx(1e-20)


def test_a_stack_is_what_its_formula_says() -> None:
    T, stack = 7, width_collapse.AttentionStack("centred", skip=True, norm=True, weights="usual")
    x = map_spectrum.orthonormal(T, 900_000)
    A, W = stack.map(T, 0), stack.weight(T, 500)
    y = (x + A @ x @ W).numpy()
    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5)
    s = np.linalg.svd(y, compute_uv=False)
    assert width_collapse.excess_ranks(stack, T, 1, 0)[0] == pytest.approx(((s[1:] / s[0]) ** 4).sum())
    assert np.allclose(stack.weight(T, 3) * math.sqrt(T), width_collapse.AttentionStack().weight(T, 3))


def test_centring_values_takes_the_outlier_off_and_centring_outputs_does_not() -> None:
    error, apart, same = width_collapse.cure_error()
    assert error < 1e-12
    assert apart > 0.1
    assert same < 1e-6, "a doubly stochastic map has one mean"


@pytest.mark.parametrize(
    "stack", [width_collapse.AttentionStack(), width_collapse.AttentionStack("centred", causal=True, weights="usual")]
)
def test_the_norm_of_the_jacobian_is_autograds(stack: width_collapse.AttentionStack) -> None:
    for layers in (1, 3):
        assert width_collapse.jacobian_norm(stack, 5, layers, 0) == pytest.approx(
            width_collapse.autograd_norm(stack, 5, layers, 0)
        )


def test_gaps_of_known_maps() -> None:
    uniform, random = torch.full((1, 8, 8), 1 / 8), map_spectrum.random_map(300, 0)[None]
    assert map_spectrum.gaps(uniform)["ratio"][0] == pytest.approx(0.0, abs=1e-6)
    assert map_spectrum.gaps(random)["random"][0] == pytest.approx(1.0, abs=0.15)


# --- verdicts of runs
# ---------------------------------------------------------------------------------------------------


def line(loss: float, residual: float, gap: float | None = 0.5) -> dict[str, Any]:
    halves = [{"residual": 0.9}, {"residual": residual}]
    return made_line(loss, measures={"gap": gap, "stable_rank": 2.0, "halves": halves})


def filled(path: Path, better: float) -> Path:
    """All arms; the centred ones are better by a little more with every seed."""
    runs = Runs(path)
    for each in map_spectrum.ARMS:
        while rows := runs.missing(each.rows(runs)):
            for row in rows:
                seed = row.plan.seed
                shift = better * (1 + 1e-3 * seed) if "centred" in each.name else 0.0
                runs.add(row, line(3.0 - shift + 0.01 * seed + row.plan.rate, 0.3 + shift, 0.5 - shift))
    return path


@pytest.mark.parametrize(("better", "expected"), [(0.1, "holds"), (-0.1, "fails")])
@pytest.mark.usefixtures("without_rules")
def test_runs_are_judged_seed_by_seed(tmp_path: Path, better: float, expected: str) -> None:
    reproduction = reproduce(PAPER, Setting(runs=filled(tmp_path / "runs.jsonl", better)), claim="f")
    assert [v.verdict for v in reproduction.verdicts] == [expected] * 5
    assert reproduction.verdicts[0].measured == pytest.approx(-better, rel=2e-3)
    assert {v.verdict for v in reproduce(PAPER, Setting(), claim="f").verdicts} == {"undecided"}


@pytest.mark.usefixtures("without_rules")
def test_runs_without_measures_decide_the_loss_alone(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs.jsonl")
    for each in map_spectrum.ARMS:
        losses = [2.9, 3.001, 3.1] if "centred" in each.name else [3.0, 3.1, 3.2]
        fill(runs, each, losses)
    reproduction = reproduce(PAPER, Setting(runs=tmp_path / "runs.jsonl"), claim="f")
    assert [v.verdict for v in reproduction.verdicts] == ["holds"] * 2 + ["undecided"] * 3
    assert reproduction.tables["training without the outlier"]["residual_by_depth"] == {}


# --- the whole, small
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Everything, small, with a toy for a trained model and runs made up."""

    def layers(setting: Setting) -> Iterator[TrainedLayer]:
        torch.manual_seed(0)
        for causal in (False, True):
            shape = Shape(width=16, layers=1, heads=4, kv_heads=2, hidden=16, causal=causal)
            layer = replace(next(iter(attention_layers(Transformer(shape, scale=0.5)))), norm=Norm())
            for half in range(2):
                yield TrainedLayer(f"toy {causal}", 0, half, layer, torch.randn(2, 24, 16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(map_spectrum.MAP_TOKENS, True, 128)
        patch.setitem(map_spectrum.MAP_SEEDS, True, 3)
        patch.setitem(width_collapse.LENGTHS, True, (16, 32, 64, 128))
        patch.setitem(width_collapse.SEEDS, True, 8)
        patch.setattr(width_collapse, "HELPED_TOKENS", 32)
        patch.setitem(width_collapse.GRADIENT_SEEDS, True, 6)
        patch.setattr(map_spectrum, "trained_layers", layers)
        runs = filled(tmp_path_factory.mktemp("runs") / "runs.jsonl", 0.1)
        yield json.loads(reproduce_without_rules(PAPER, Setting(runs=runs)).to_json())


@pytest.mark.usefixtures("without_rules")
def test_claims_that_do_not_depend_on_size_come_out_small_too(document: dict[str, Any]) -> None:
    verdicts = {entry["id"]: entry["verdict"] for entry in document["claims"]}
    sure = ("a1", "b1", "b6", "b7", "b8", "c1", "c2", "c3", "c5", "d4", "f1", "f5")
    assert {name: verdicts[name] for name in sure} == dict.fromkeys(sure, "holds")
    assert verdicts["d5"] == "fails", "the prefix form does not make the rank grow"
    measured = {entry["id"]: entry["measured"] for entry in document["claims"]}
    assert measured["b3"] > 0.2, "without a mask it grows"
    assert measured["d2"] > 0, "under a causal mask no gap opens"


def test_every_claim_of_the_paper_says_where_or_that_the_bound_is_ours() -> None:
    assert [claim.id for claim in PAPER.claims if claim.by == "paper"] == ["a1", "a2", "a3", "b1", "b3", "c2", "c3"]
    assert {claim.by for claim in PAPER.claims} == {"paper", "ours"}


@pytest.mark.usefixtures("without_rules")
def test_the_page_comes_from_the_document(document: dict[str, Any], tmp_path: Path) -> None:
    written = write_report(document, PAPERS["saada2024"], tmp_path / "page.md", tmp_path)
    text = written[0].read_text()
    figures = {f"saada2024-{name}" for name in ("gap", "width", "causal", "training")}
    assert {path.stem for path in written[1:]} == figures
    for path in written[1:]:
        ElementTree.parse(path)
    assert "Trained without the outlier, a masked language model changes its loss by -0.1001" in text
    assert "| with the outlier, causal |" in text
    assert "| toy True | causal |" in text
    for letter, title in zip("abcdef", ("The gap", "Rank", "Gradients", "Under", "Trained", "Training"), strict=True):
        assert f"## {letter}. {title}" in text
    for paper in ("2405.18781", "2505.24333"):
        assert paper in text


def test_the_page_of_some_claims_and_of_none(document: dict[str, Any], tmp_path: Path) -> None:
    some = {
        **document,
        "claims": [x if x["id"][0] == "a" else {**x, "measured": None} for x in document["claims"]],
        "studies": {"the gap of random maps": document["studies"]["the gap of random maps"]},
    }
    text = write_report(some, PAPER, tmp_path / "some.md", tmp_path)[0].read_text()
    assert "## a." in text
    assert "## b." not in text
    none = {**document, "claims": [{**x, "measured": None} for x in document["claims"]], "studies": {}}
    text = write_report(none, PAPER, tmp_path / "none.md", tmp_path)[0].read_text()
    assert "## a." not in text
    assert "## What came out" not in text


@pytest.mark.parametrize("verdict", ["holds", "fails", "undecided"])
def test_sentences_follow_their_verdicts(document: dict[str, Any], tmp_path: Path, verdict: str) -> None:
    claims = [{**entry, "verdict": verdict} for entry in document["claims"]]
    text = write_report({**document, "claims": claims}, PAPER, tmp_path / "page.md", tmp_path)[0].read_text()
    sentence = {
        "holds": "- Tokens collapse as sequences grow:",
        "fails": "- Tokens do not collapse as sequences grow:",
        "undecided": "- Whether tokens collapse as sequences grow is undecided:",
    }
    assert [words in text for words in sentence.values()] == [key == verdict for key in sentence]
