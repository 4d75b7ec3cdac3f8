"""Binary attention: counts of bits, the arcsine law, models made binary and back, verdicts from runs, the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from locater.data.text import batches
from locater.verbs.load import load_model
from locater_papers import Setting, reproduce
from locater_papers.claim import verdict_of
from locater_papers.mechanism_runs import SOFTMAX, SOFTMAX_IMAGE
from locater_papers.report import write_report
from locater_papers.runs import Arm, Runs
from locater_papers.trained_heads import sources
from locater_papers.xiao2026 import PAPER, flattening, models, signs, training
from tests import ROOT

TEXT = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    """All studies at sizes that take a moment; the package's own model on a page of documentation."""
    setting = Setting()
    vars(setting)["text"] = TEXT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flattening, "DRAWS", {True: 3})
        patch.setattr(flattening, "PAIRS", {True: 40_000})
        patch.setattr(models, "TOKENS", {True: 256})
        patch.setattr(models, "CHARACTERS", {True: 4000})
        patch.setattr(models, "sources", lambda folder: {"demo": next(iter(sources(None).values()))})
        yield json.loads(reproduce(PAPER, setting).to_json())


def entry(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(x for x in document["claims"] if x["id"] == name)


def test_exact_claims_are_decided(document: dict[str, Any]) -> None:
    said = {x["id"]: x["verdict"] for x in document["claims"] if x["id"][0] == "a"}
    assert {name for name, verdict in said.items() if verdict == "fails"} == {"a11"}, (
        "rotary positions are lost, and nothing else"
    )
    assert len(said) == 15


def test_rotation_moves_signs_and_not_products() -> None:
    moved = signs.rotary(shift=5)
    assert moved["no signs"] < 1e-12 > moved["signs before"]
    assert moved["signs after"] > 0.1
    x = signs.draw(3, 8, seed=0)
    torch.testing.assert_close(signs.rotated(x, 0)[0], x[0])
    torch.testing.assert_close(signs.rotated(x, 7).norm(dim=1), x.norm(dim=1))


def test_counts_by_hand() -> None:
    q, k = torch.tensor([[0.0, -1.0, 2.0]]), torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 5.0]])
    assert signs.counted(q, k).tolist() == [[1.0, 1.0]]
    assert signs.packed(q) == [0b101]


def test_the_window_of_a_normal() -> None:
    assert signs.cut(1.0) == pytest.approx(math.erfc(1 / math.sqrt(2)), abs=0.02)


@pytest.mark.parametrize("r", [-0.5, 0.0, 0.8])
def test_the_arcsine_law(r: float) -> None:
    mean, error = flattening.sign_product(r, 50_000, 3)
    assert abs(mean - flattening.arcsine(r)) < 4 * error


def test_ranks_and_correlation_agree_with_scipy() -> None:
    a = torch.randint(5, (4, 30), generator=torch.Generator().manual_seed(0)).double()
    b = torch.randn(4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + a
    ours = flattening.row_correlation(flattening.ranks(a), flattening.ranks(b))
    assert ours.tolist() == pytest.approx([float(stats.spearmanr(x, y).statistic) for x, y in zip(a, b, strict=True)])


def test_a_model_is_made_binary_and_comes_back() -> None:
    model = load_model(str(next(iter(sources(None).values()))))
    held = batches(model, TEXT, length=32, tokens=64)
    before = models.next_token(model, held)
    with models.made_binary(model):
        inside = models.next_token(model, held)
    assert torch.equal(models.next_token(model, held), before)
    assert models.divergence(before, inside) > 0.01
    assert models.divergence(before, before) == 0.0


def line(loss: float, accuracy: float | None = None, entropy: float = 2.0) -> dict[str, Any]:
    heads = {"M": 0.0, "S": 0.0, "F": 1.0, "concentration": 0.0}
    return {"status": "done", "select_loss": loss, "report_loss": loss, "accuracy": accuracy, "heads": heads, "device": "cpu",
            "measures": {"entropy": entropy, "entropy_share": 0.5}}  # fmt: skip


def fill(runs: Runs, arm: Arm, loss: float, **more: Any) -> None:
    for rate in arm.rates:
        for seed in range(arm.seeds):
            runs.add(arm.row(rate, seed), line(loss + 0.001 * seed + rate, **more))


def test_runs_are_judged_seed_by_seed_and_shown(tmp_path: Path, document: dict[str, Any]) -> None:
    runs = Runs()
    fill(runs, SOFTMAX, 4.0, entropy=2.0)
    assert all(value is None for value in training.judge(runs).values()), "one arm decides nothing"
    fill(runs, training.BINARY, 4.2, entropy=2.5)
    fill(runs, training.PLAIN, 4.5)
    fill(runs, SOFTMAX_IMAGE, 0.4, accuracy=0.9)
    fill(runs, training.ON_IMAGES, 0.4, accuracy=0.895)
    found = training.judge(runs)
    verdicts = {c.id: verdict_of(c, found[c.id], "") for c in training.CLAIMS}
    assert {name: v.verdict for name, v in verdicts.items()} == {
        "d1": "fails",
        "d2": "holds",
        "d3": "holds",
        "d4": "holds",
    }
    assert verdicts["d1"].measured == pytest.approx(0.2), "both at the lower rate, which is better here"
    held = [x for x in document["claims"] if x["id"][0] != "d"] + [
        json.loads(json.dumps(v.to_dict())) for v in verdicts.values()
    ]
    page = write_report({**document, "claims": held}, PAPER, tmp_path / "x.md", tmp_path)[0].read_text()
    assert "+0.200 nats from softmax" in page
    rate = min(training.PLAIN.rates)
    losses = ", ".join(f"{4.5 + 0.001 * seed + rate:.3f}" for seed in range(training.PLAIN.seeds))
    assert f"| binary, no bias | {rate:g} | {losses} |" in page


def test_the_page_is_made_of_the_document_alone(tmp_path: Path, document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    written = write_report(document, PAPER, tmp_path / "x.md", tmp_path)
    page = written[0].read_text()
    assert [path.name for path in written[1:]] == ["xiao2026-flattening.svg", "xiao2026-models.svg"]
    assert f"by up to {entry(document, 'c4')['measured']:.2f} nats" in page
    assert entry(document, "d1")["verdict"] == "undecided"
    assert "figure:" not in page
    table = [row for row in page.splitlines() if row.startswith("| a")]
    assert all(row.count("|") == 7 for row in table), "no bar inside a cell"
