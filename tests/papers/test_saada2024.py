"""Nait Saada, Naderi and Tanner 2025: spectra against plain references, claims at sizes that take a moment, verdicts of
runs, the page.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locater_papers import PAPERS, Setting, reproduce
from locater_papers.draws import normal
from locater_papers.report import write_report
from locater_papers.runs import Runs
from locater_papers.saada2024 import PAPER, gradients, maps, trained, width
from tests.papers.made_runs import made_line


def test_random_maps_have_the_unevenness_they_are_asked_for() -> None:
    A = maps.random_map(400, 0, sigma=0.5).numpy()
    assert np.allclose(A.sum(1), 1)
    assert (400 * A).std() == pytest.approx(0.5, abs=0.02)
    causal = maps.random_map(5, 0, causal=True).numpy()
    assert np.allclose(np.triu(causal, 1), 0)
    assert np.allclose(maps.random_map(5, 1, name="centred").sum(1), 0, atol=1e-15)


def test_the_spectrum_against_numpy() -> None:
    A = maps.random_map(20, 3)
    found, s = maps.spectrum(A), np.linalg.svd(A.numpy(), compute_uv=False)
    values = sorted(abs(np.linalg.eigvals(A.numpy())), reverse=True)
    assert found["lambda_1"] == pytest.approx(1.0)
    assert found["lambda_2"] == pytest.approx(values[1])
    assert found["stable_rank"] == pytest.approx((s**2).sum() / s[0] ** 2)


def test_excess_rank_is_that_of_the_gram_matrix_and_keeps_its_digits() -> None:
    x = normal(6, 4, seed=0)
    s = np.linalg.svd((x @ x.mT).numpy(), compute_uv=False)
    assert 1 + width.excess_rank(x) == pytest.approx((s**2).sum() / s[0] ** 2)
    near = torch.diag(torch.tensor([1.0, 1e-5], dtype=torch.float64))
    assert width.excess_rank(near) == pytest.approx(1e-20)


def test_a_stack_is_what_its_formula_says() -> None:
    T, stack = 7, width.Stack("centred", skip=True, norm=True, weights="usual")
    x = maps.orthonormal(T, 900_000)
    A, W = stack.map(T, 0), stack.weight(T, 500)
    y = (x + A @ x @ W).numpy()
    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5)
    s = np.linalg.svd(y, compute_uv=False)
    assert width.excess_ranks(stack, T, 1, 0)[0] == pytest.approx(((s[1:] / s[0]) ** 4).sum())
    assert np.allclose(stack.weight(T, 3) * math.sqrt(T), width.Stack().weight(T, 3))


def test_centring_values_takes_the_outlier_off_and_centring_outputs_does_not() -> None:
    error, apart, same = width.cure_error()
    assert error < 1e-12
    assert apart > 0.1
    assert same < 1e-6, "a doubly stochastic map has one mean"


@pytest.mark.parametrize("stack", [width.Stack(), width.Stack("centred", causal=True, weights="usual")])
def test_the_norm_of_the_jacobian_is_autograds(stack: width.Stack) -> None:
    for layers in (1, 3):
        assert gradients.jacobian_norm(stack, 5, layers, 0) == pytest.approx(
            gradients.autograd_norm(stack, 5, layers, 0)
        )


def test_gaps_of_known_maps() -> None:
    uniform, random = torch.full((1, 8, 8), 1 / 8), maps.random_map(300, 0)[None]
    assert trained.gaps(uniform)["ratio"][0] == pytest.approx(0.0, abs=1e-6)
    assert trained.gaps(random)["random"][0] == pytest.approx(1.0, abs=0.15)


# --- verdicts of runs
# ---------------------------------------------------------------------------------------------------


def line(loss: float, residual: float, gap: float | None = 0.5) -> dict[str, Any]:
    halves = [{"residual": 0.9}, {"residual": residual}]
    return made_line(loss, measures={"gap": gap, "stable_rank": 2.0, "halves": halves})


def filled(path: Path, better: float) -> Path:
    runs = Runs(path)
    for each in trained.ARMS:
        shift = better if "centred" in each.name else 0.0
        while rows := runs.missing(each.rows(runs)):
            for row in rows:
                runs.add(row, line(3.0 - shift + 0.01 * row.plan.seed + row.plan.rate, 0.3 + shift, 0.5 - shift))
    return path


@pytest.mark.parametrize(("better", "expected"), [(0.1, "holds"), (-0.1, "fails")])
def test_runs_are_judged_seed_by_seed(tmp_path: Path, better: float, expected: str) -> None:
    found = reproduce(PAPER, Setting(runs=filled(tmp_path / "runs.jsonl", better)), claim="f")
    assert [v.verdict for v in found.verdicts] == [expected] * 5
    assert found.verdicts[0].measured == pytest.approx(-better)
    assert {v.verdict for v in reproduce(PAPER, Setting(), claim="f").verdicts} == {"undecided"}


# --- the whole, small
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(maps.TOKENS, True, 128)
        patch.setitem(maps.SEEDS, True, 2)
        patch.setitem(width.LENGTHS, True, (16, 32, 64, 128))
        patch.setitem(width.SEEDS, True, 6)
        patch.setattr(width, "HELPED", 32)
        patch.setitem(gradients.SEEDS, True, 2)
        yield patch


@pytest.fixture(scope="module")
def document(small: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything but trained models, with runs made up."""
    setting = Setting(runs=filled(tmp_path_factory.mktemp("runs") / "runs.jsonl", 0.1))
    parts = [reproduce(PAPER, setting, claim=letter).to_dict() for letter in "abcdf"]
    whole = {**parts[0], "claims": [entry for part in parts for entry in part["claims"]]}
    return json.loads(json.dumps(whole, allow_nan=False))


def test_claims_that_do_not_depend_on_size_come_out_small_too(document: dict[str, Any]) -> None:
    said = {entry["id"]: entry["verdict"] for entry in document["claims"]}
    sure = ("a1", "b1", "b6", "b7", "b8", "c1", "c2", "c3", "c5", "d2", "d4")
    assert {name: said[name] for name in sure} == dict.fromkeys(sure, "holds")
    assert said["d5"] == "fails", "the prefix form does not make the rank grow"
    assert {entry["id"]: entry["measured"] for entry in document["claims"]}["b3"] > 0.2, "without a mask it grows"
    assert all(entry["decided"] for entry in document["claims"] if entry["id"][0] == "f")


def test_the_page_and_its_first_lines_come_from_the_document(document: dict[str, Any], tmp_path: Path) -> None:
    written = write_report(document, PAPERS["saada2024"], tmp_path / "page.md", tmp_path)
    text = written[0].read_text()
    assert {path.stem for path in written[1:]} == {
        f"saada2024-{name}" for name in ("gap", "width", "causal", "training")
    }
    for path in written[1:]:
        ElementTree.parse(path)
    assert "Trained without the outlier, a masked language model changes its loss by -0.1000 nats" in text
    assert "| with the outlier, causal |" in text
    bare = {**document, "claims": [{**entry, "measured": None, "spread": None} for entry in document["claims"]]}
    assert "## a." not in write_report(bare, PAPERS["saada2024"], tmp_path / "bare.md", tmp_path)[0].read_text()
