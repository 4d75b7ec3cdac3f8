"""Binary attention: counts of bits, the arcsine law, models made binary and back, verdicts from runs, the page."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from locater.commands.load_model import load_model
from locater.inputs.text import batches
from locater_lab.engine.claims import verdict_of
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.figures import png_strip
from locater_lab.engine.mechanism_runs import SOFTMAX, SOFTMAX_IMAGE
from locater_lab.engine.pages import write_report
from locater_lab.engine.runs import Arm, Runs
from locater_lab.engine.trained_models import model_folders
from locater_lab.papers import Setting
from locater_lab.papers.xiao2026 import PAPER, flattening, one_bit, training
from tests import ROOT
from tests.lab.made_runs import made_line, reproduce_without_rules

TEXT = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    """All studies at sizes that take a moment; the package's own model on a page of documentation."""
    setting = Setting()
    vars(setting)["text"] = TEXT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flattening, "DRAWS", {True: 4})
        patch.setattr(flattening, "PAIRS", {True: 40_000})
        patch.setattr(flattening, "MODEL_TOKENS", {True: 256})
        patch.setattr(flattening, "CHARACTERS", {True: 4000})
        patch.setattr(flattening, "model_folders", lambda folder: {"demo": next(iter(model_folders(None).values()))})
        yield json.loads(reproduce_without_rules(PAPER, setting).to_json())


def entry(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(x for x in document["claims"] if x["id"] == name)


def test_exact_claims_are_decided(document: dict[str, Any]) -> None:
    verdicts = {x["id"]: x["verdict"] for x in document["claims"] if x["id"][0] == "a"}
    assert {name for name, verdict in verdicts.items() if verdict == "fails"} == {"a11"}, (
        "rotary positions are lost, and nothing else"
    )
    assert set(verdicts.values()) == {"holds", "fails"}
    assert len(verdicts) == 15


def test_accuracy_and_speed_stand_among_the_papers_claims_and_are_open(document: dict[str, Any]) -> None:
    papers = [x for x in document["claims"] if x["by"] == "paper"]
    assert [x["id"] for x in papers] == ["e1", "e2", "e3", "f1"]
    assert all(x["where"] == "abstract" for x in papers)
    unmeasured = [x for x in papers if x["id"][0] in "ef"]
    assert {(x["measured"], x["verdict"]) for x in unmeasured} == {(None, "undecided")}
    assert "ImageNet" in entry(document, "e1")["waits_for"]
    assert "kernel" in entry(document, "f1")["waits_for"]


def test_the_limit_of_the_rank_correlation() -> None:
    """Of two normals of correlation 2/pi; the claim prints it."""
    assert f"{flattening.LIMIT:.4f}" == "0.6187"
    assert "0.6187" in next(claim.says for claim in PAPER.claims if claim.id == "b8")
    x, noise = (draw_normal(200_000, seed=n) for n in range(2))
    y = 2 / math.pi * x + math.sqrt(1 - 4 / math.pi**2) * noise
    assert float(stats.spearmanr(x, y).statistic) == pytest.approx(flattening.LIMIT, abs=0.005)


def test_rotation_moves_signs_and_not_products() -> None:
    moved = one_bit.rotary_shift_error(shift=5)
    assert moved["no signs"] < 1e-12 > moved["signs before"]
    assert moved["signs after"] > 0.1
    x = draw_normal(3, 8, seed=0)
    torch.testing.assert_close(one_bit.rotate(x, 0)[0], x[0])
    torch.testing.assert_close(one_bit.rotate(x, 7).norm(dim=1), x.norm(dim=1))


def test_counts_by_hand() -> None:
    q, k = torch.tensor([[0.0, -1.0, 2.0]]), torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 5.0]])
    assert one_bit.count_product(q, k).tolist() == [[1.0, 1.0]]
    assert one_bit.pack_bits(q) == [0b101]


def test_the_window_of_a_normal() -> None:
    assert one_bit.cut_share(1.0) == pytest.approx(math.erfc(1 / math.sqrt(2)), abs=0.02)


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
    model = load_model(str(next(iter(model_folders(None).values()))))
    batch = batches(model, TEXT, length=32, tokens=64)
    before = flattening.next_token(model, batch)
    with flattening.binary_model(model):
        inside = flattening.next_token(model, batch)
    assert torch.equal(flattening.next_token(model, batch), before)
    assert flattening.divergence(before, inside) > 0.01
    assert flattening.divergence(before, before) == 0.0


NOISE = (0.0, 0.0001, -0.0002)  # of seeds: a sample without spread decides nothing before six


def fill(runs: Runs, arm: Arm, loss: float, accuracy: float | None = None, entropy: float = 2.0) -> None:
    for rate in arm.rates:
        for seed in range(arm.seeds):
            noise = NOISE[seed] * (1 + loss)
            measures = {"entropy": entropy + noise, "entropy_share": 0.5}
            scored = None if accuracy is None else accuracy + noise / 10
            runs.add(arm.row(rate, seed), made_line(loss + rate + noise, accuracy=scored, measures=measures))


def made_up() -> Runs:
    runs = Runs()
    fill(runs, SOFTMAX, 4.0, entropy=2.0)
    fill(runs, training.BINARY_ARM, 4.2, entropy=2.5)
    fill(runs, training.WITHOUT_BIAS, 4.5)
    fill(runs, SOFTMAX_IMAGE, 0.4, accuracy=0.9)
    fill(runs, training.ON_IMAGES, 0.5, accuracy=0.895)
    return runs


def with_runs(document: dict[str, Any]) -> dict[str, Any]:
    """The document with verdicts of made-up runs."""
    results = training.judge_start(made_up())
    verdicts = [verdict_of(c, results.measured[c.id], "").to_dict() for c in training.START_CLAIMS]
    claims = [x for x in document["claims"] if x["id"][0] != "d"] + verdicts
    studies = {**document["studies"], training.START_STUDY.title: {"tables": dict(results.tables)}}
    return json.loads(json.dumps({**document, "claims": claims, "studies": studies}))


@pytest.mark.usefixtures("without_rules")
def test_runs_are_judged_seed_by_seed_and_shown(tmp_path: Path, document: dict[str, Any]) -> None:
    runs = Runs()
    fill(runs, SOFTMAX, 4.0)
    assert all(value is None for value in training.judge_start(runs).measured.values()), "one arm decides nothing"
    whole = with_runs(document)
    verdicts = {x["id"]: x["verdict"] for x in whole["claims"] if x["id"][0] == "d"}
    assert verdicts == {"d1": "fails", "d2": "holds", "d3": "holds", "d4": "holds"}
    assert entry(whole, "d1")["measured"] == pytest.approx(0.2, abs=1e-3), (
        "both at the lower rate, which is better here"
    )
    page = write_report(whole, PAPER, tmp_path / "x.md", tmp_path)[0].read_text()
    assert "it ends +0.200" in page
    rate = min(training.WITHOUT_BIAS.rates)
    losses = ", ".join(f"{4.5 + rate + NOISE[seed] * 5.5:.3f}" for seed in range(training.WITHOUT_BIAS.seeds))
    assert f"| binary, no bias | {rate:g} | {losses} |" in page


ENDS = {  # accuracy of classifiers, loss of denoisers
    "softmax": (0.9, 0.2),
    "binary": (0.88, 0.21),
    "converted": (0.898, 0.201),
}


def made_up_images() -> Runs:
    """The second rate is the better one. Converted models lose 5 points, or 40 % of their loss, at the change."""
    runs, strip = Runs(), png_strip(torch.full((10, 28, 28, 1), 255, dtype=torch.uint8))
    for arms, worse in ((training.IMAGES, 0), (training.NOISE, 1)):
        for (name, arm), number in zip(arms.items(), range(3), strict=True):
            for rate, seed in [(arm.rates[0], 0), *((arm.rates[1], seed) for seed in range(arm.seeds))]:
                noise, first = 1e-4 * (number + 1) * (seed % 3), rate == arm.rates[0]
                accuracy, loss = ENDS[name][0] + noise, (ENDS[name][1] if worse else 0.3) + noise + first
                before = {"loss": 0.3 + noise, "accuracy": 0.89}
                after = {"loss": 1.4 * before["loss"] + noise, "accuracy": 0.84 + noise}
                change = {"conversion": {"step": 1000, "before": before, "after": after}} if number == 2 else {}
                more = {"samples": strip} if worse and seed == 0 else {}
                line = made_line(
                    loss, accuracy=None if worse else accuracy, measures={"entropy": 3.0}, **change, **more
                )
                runs.add(arm.row(rate, seed), line)
    return runs


@pytest.mark.usefixtures("without_rules")
def test_models_of_images_are_judged_and_drawn(tmp_path: Path, document: dict[str, Any]) -> None:
    results = training.judge_images(made_up_images())
    measured = {id: x for id, x in results.measured.items() if x is not None}
    assert measured.keys() == {claim.id for claim in training.IMAGE_CLAIMS}
    values = {id: x.value for id, x in measured.items()}
    expected = {"g1": -0.002, "g3": -0.05, "g4": 0.018, "g5": -0.02}
    assert {id: values[id] for id in expected} == pytest.approx(expected, abs=5e-4)
    ratios = {"g6": 0.201 / 0.2, "g8": 1.4, "g9": 0.201 / 0.21, "g10": 1.05}
    assert {id: math.exp(values[id]) for id in ratios} == pytest.approx(ratios, abs=2e-3)
    verdicts = {c.id: verdict_of(c, measured[c.id], "") for c in training.IMAGE_CLAIMS}
    assert [id for id, x in verdicts.items() if x.verdict == "fails"] == ["g1", "g5", "g6", "g10"]
    entries = [x.to_dict() for x in verdicts.values()]
    claims = [x for x in document["claims"] if x["id"][0] != "g"] + entries
    studies = {**document["studies"], training.IMAGE_STUDY.title: {"tables": dict(results.tables)}}
    whole = json.loads(json.dumps({**document, "claims": claims, "studies": studies}))
    written = write_report(whole, PAPER, tmp_path / "x.md", tmp_path)
    page = written[0].read_text()
    assert "less accurate, and within one point" in page
    assert "moves the loss by +40." in page
    assert "| converted, diffusion | 0.0015 |" in page
    drawing = next(path for path in written if path.name == "xiao2026-samples.svg").read_text()
    strips = [base64.b64decode(x) for x in re.findall('base64,([^"]+)', drawing)]
    assert len(strips) == 3
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed").open(io.BytesIO(strips[0]))
    assert (image.size, image.getextrema()) == ((280, 28), (255, 255))


def test_a_strip_is_a_png_of_its_images() -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for channels in (1, 3):
        images = torch.randint(256, (3, 5, 4, channels), dtype=torch.uint8)
        read = np.asarray(pillow.open(io.BytesIO(base64.b64decode(png_strip(images)))))
        assert np.array_equal(read.reshape(5, 12, channels), np.concatenate(list(images.numpy()), 1))


@pytest.mark.usefixtures("without_rules")
def test_the_page_is_made_of_the_document_alone(tmp_path: Path, document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    written = write_report(document, PAPER, tmp_path / "x.md", tmp_path)
    page = written[0].read_text()
    assert [path.name for path in written[1:]] == ["xiao2026-flattening.svg", "xiao2026-models.svg"]
    assert f"by up to {entry(document, 'c4')['measured']:.2f} nats" in page
    assert entry(document, "d1")["verdict"] == "undecided"
    assert "figure:" not in page
    table = [row for row in page.splitlines() if re.match(r"\| a\d", row)]
    assert len(table) == 15
    assert all(row.count("|") == 10 for row in table), "no bar inside a cell"
    assert re.search(r"^- f1: waits for .* floating point$", page, re.MULTILINE), "no command could measure it"


def test_a_sentence_follows_its_verdict(tmp_path: Path, document: dict[str, Any]) -> None:
    claims = [{**x, "verdict": "undecided"} for x in with_runs(document)["claims"]]
    page = write_report({**document, "claims": claims}, PAPER, tmp_path / "open.md", tmp_path)[0].read_text()
    assert "Whether signs keep what rotary positions are for is open" in page
    assert "undecided with so few seeds" in page


@pytest.mark.parametrize("letters", ["", "a", "bc"])
def test_a_page_of_some_claims_or_none(tmp_path: Path, document: dict[str, Any], letters: str) -> None:
    titles = {study.title for study in PAPER.studies if study.claims[0].id[0] in letters}
    studies = {title: study for title, study in document["studies"].items() if title in titles}
    claims = [x if x["id"][0] in letters else {**x, "measured": None} for x in document["claims"]]
    some = {**document, "claims": claims, "studies": studies}
    page = write_report(some, PAPER, tmp_path / "some.md", tmp_path)[0].read_text()
    assert [f"## {letter}. " in page for letter in "abcd"] == [letter in letters for letter in "abcd"]
    assert "The paper's main claims, on accuracy and speed, are open" in page
