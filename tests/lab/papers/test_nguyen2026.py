"""Attention as a mixture of experts: sums by hand, what gates change, fits of students, the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import jacrev

from locater_lab.engine.pages import page, write_report
from locater_lab.papers import Setting, reproduce
from locater_lab.papers.nguyen2026 import PAPER, gate_places, sample_counts


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_counts, "COUNTS", (100, 400))
        patch.setattr(sample_counts, "SEEDS", {True: 4})
        patch.setattr(sample_counts, "STEPS", {True: 30})
        patch.setattr(gate_places, "SEEDS", {True: 8})
        patch.setattr(gate_places, "DRAWS", {True: 600})
        yield json.loads(reproduce(PAPER, Setting()).to_json())


def test_what_is_exact_is_decided(document: dict[str, Any]) -> None:
    verdicts = {x["id"]: x["verdict"] for x in document["claims"] if x["id"][0] in "ab"}
    assert {name for name, verdict in verdicts.items() if verdict == "fails"} >= {"b4", "b7", "b10"}
    assert {name for name, verdict in verdicts.items() if verdict == "undecided"} <= {"b5"}, "as few as eight heads"


def test_the_theorem_is_the_papers_and_stays_open(document: dict[str, Any]) -> None:
    theorem = next(x for x in document["claims"] if x["id"] == "d1")
    assert (theorem["by"], theorem["where"], theorem["verdict"]) == ("paper", "abstract", "undecided")
    assert "proof" in theorem["waits_for"]
    assert {x["by"] for x in document["claims"] if x["id"][0] == "c"} == {"ours"}, "a trend is not the theorem"


def test_a_wrong_gate_is_seen_by_the_sum() -> None:
    """The comparison can fail: gates of another layer do not fit."""
    w = gate_places.ProjectionWeights.draw(0)
    x = torch.randn(4, gate_places.MIXTURE_WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out, gate = gate_places.module_output(x, w, True, "output")
    assert gate is not None
    torch.testing.assert_close(gate_places.triple_sum(x, w, True, gate=gate), out)
    assert (gate_places.triple_sum(x, w, True, gate=gate.flip(0)) - out).abs().max() > 1e-3
    assert (gate_places.triple_sum(x, w, False, gate=gate) - out).abs().max() > 1e-3


def test_a_linear_fit_explains_what_is_linear() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, 3, generator=g, dtype=torch.float64)
    assert gate_places.explained_variance(x, 2 * x + 1) == pytest.approx(1.0)
    assert gate_places.explained_variance(x, x.square()) < 0.1


@pytest.mark.parametrize("gated", [False, True])
def test_derivatives_by_hand_are_those_of_autograd(gated: bool) -> None:
    truth = sample_counts.draw_teacher(2, gated)
    x = torch.randn(
        2, 5, sample_counts.TOKENS, sample_counts.WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    value, slope = sample_counts.predict(truth, x)

    def run(flat: torch.Tensor) -> torch.Tensor:
        return sample_counts.predict(truth.at(flat), x)[0]

    whole = jacrev(run)(truth.flat())  # (B, n, B, p)
    torch.testing.assert_close(torch.stack([whole[b, :, b] for b in range(2)]), slope)
    torch.testing.assert_close(run(truth.flat()), value)


def test_without_noise_the_truth_is_found() -> None:
    truth = sample_counts.draw_teacher(3, True)
    z = torch.randn(
        3,
        300,
        sample_counts.TOKENS,
        sample_counts.WIDTH - 1,
        generator=torch.Generator().manual_seed(4),
        dtype=torch.float64,
    )
    x = torch.cat([torch.ones_like(z[..., :1]), z], -1)
    fit = sample_counts.fit_students(
        sample_counts.start_student(truth, 2, 0), x, sample_counts.predict(truth, x)[0], 60
    )
    assert sample_counts.expert_error(fit, truth).max() < 1e-4


def test_a_head_in_two_halves_is_no_error() -> None:
    truth = sample_counts.draw_teacher(2, False)
    which = [0, 1, 0]
    share = torch.tensor([0.3, 1.0, 0.7], dtype=torch.float64)[:, None]
    split = sample_counts.ExpertHeads(truth.P[:, which], truth.a[:, which] * share, truth.w[:, which], False)
    assert sample_counts.expert_error(split, truth).max() < 1e-12
    off = sample_counts.ExpertHeads(split.P, split.a + 0.1, split.w, False)
    assert sample_counts.expert_error(off, truth).min() > 0.1


def test_the_page_stands_with_all_some_and_no_claims_measured(tmp_path: Path, document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    written = write_report(document, PAPER, tmp_path / "n.md", tmp_path)
    text = written[0].read_text()
    assert {path.name for path in written[1:]} == {"nguyen2026-places.svg", "nguyen2026-samples.svg"}
    assert "| 5 after W_O |" in text
    assert "What came out in numbers" in text
    assert "gated students gain on their experts" in text or "gated students may gain on their experts" in text
    assert "figure:" not in text
    alone = json.loads(reproduce(PAPER, Setting(), claim="a").to_json())
    text, figures = page(alone, PAPER)
    assert "## a." in text
    assert "## b." not in text
    assert figures == {}
    nothing = [{**entry, "measured": None, "verdict": "undecided"} for entry in document["claims"]]
    text, figures = page({**document, "claims": nothing, "studies": {}}, PAPER)
    assert figures == {}
    assert "What came out in numbers" not in text
