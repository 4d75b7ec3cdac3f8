"""Ding and others 2020: the promise against plain arithmetic, verdicts of runs, and the page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locater.discovery import attention_layers
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.pages import write_report
from locater_lab.engine.runs import Runs
from locater_lab.engine.trained_models import TrainedLayer
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.papers import Setting, reproduce
from locater_lab.papers.ding2020 import PAPER, guarantee, trained_models
from tests.lab.made_runs import made_line, reproduce_without_rules


def doubly(E: np.ndarray) -> np.ndarray:
    """Columns, then rows."""
    xi = np.exp(E) / np.exp(E).sum(0)
    return np.asarray(xi / xi.sum(1, keepdims=True))


def test_maps_against_plain_arithmetic() -> None:
    E = draw_normal(5, 7, seed=0)
    assert np.allclose(guarantee.map_of("doubly_normalized", E), doubly(E.numpy()))
    assert np.allclose(guarantee.sinkhorn_map(E), doubly(E.numpy()))
    assert np.allclose(guarantee.sinkhorn_map(E[:, :5], 200).sum(0), 1), "many rounds are doubly stochastic"


def test_the_prefix_form_against_its_sums() -> None:
    E = draw_normal(4, 4, seed=1)
    weight, want = np.exp(E.numpy()), np.zeros((4, 4))
    for i in range(4):
        for j in range(i + 1):
            want[i, j] = weight[i, j] / sum(weight[k, j] for k in range(j, i + 1))
    assert np.allclose(guarantee.prefix_normalized_map(E), want / want.sum(1, keepdims=True))
    assert guarantee.prefix_normalized_map(E)[-1, -1] >= 1 / 4


def test_a_causal_mask_alone_leaks_and_the_prefix_form_does_not() -> None:
    E = draw_normal(6, 6, seed=2)
    other = torch.cat([E[:-1], E[-1:] + 3 * torch.arange(6)])
    assert not torch.allclose(guarantee.leaky_causal_map(E)[:-1], guarantee.leaky_causal_map(other)[:-1], atol=1e-3)
    assert torch.equal(guarantee.prefix_normalized_map(E)[:-1], guarantee.prefix_normalized_map(other)[:-1])


def test_the_tight_example_is_at_the_bound_and_not_under_it() -> None:
    columns = doubly(guarantee.tight_logits(5, 20.0).numpy()).sum(0)
    assert columns.min() == pytest.approx(1 / 5, rel=1e-6)
    assert columns.min() >= 1 / 5 * (1 - 1e-12)


def test_columns_of_a_head_that_explains_a_key_away() -> None:
    E = torch.zeros(4, 4, dtype=torch.float64)
    E[:, 0] = -20.0  # no query wants the first key
    entry = trained_models.column_sums(E, causal=False)
    assert entry["away"] == 0.25
    assert entry["away_doubly"] == 0.0
    assert entry["least_doubly"] == pytest.approx(1.0), "what is the same for all queries cancels"
    assert entry["moved"] == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_gives_an_entry_for_every_head_and_sequence(causal: bool) -> None:
    torch.manual_seed(0)
    layer = next(
        iter(attention_layers(Transformer(Shape(width=16, layers=1, heads=2, kv_heads=2, hidden=16, causal=causal))))
    )
    part = TrainedLayer("toy", 0, 0, layer, torch.randn(3, 6, 16))
    entries = trained_models.columns_of_layer(part)
    assert len(entries) == 6
    assert part.causal is causal
    sums = part.maps().flatten(0, 1).sum(1)
    assert [x["largest"] for x in entries] == pytest.approx(sums.amax(-1).tolist(), rel=1e-5)
    plain, twice = trained_models.quantiles(part.logits().flatten(0, 1), causal)
    assert plain[0] == pytest.approx(float(sums.min()), rel=1e-5)
    assert twice[-1] <= 6


# --- verdicts of runs
# ---------------------------------------------------------------------------------------------------


NOISE = (0.0, 0.004, -0.003)  # of seeds: a sample without spread decides nothing before six


def filled(path: Path, better: float, away: float) -> Path:
    runs = Runs(path)
    for each in trained_models.ARMS:
        plain = each.name.startswith("softmax")
        while rows := runs.missing(each.rows(runs)):
            for row in rows:
                noise = NOISE[row.plan.seed]
                loss = 3.0 + 0.01 * row.plan.seed - (0.0 if plain else better + noise)
                measures = {
                    "explained_away": away + noise / 2 if plain else 0.0,
                    "column_least": 0.1 if plain else 0.4 + noise,
                    "entropy": 2.0,
                }
                runs.add(row, made_line(loss, measures=measures))
    return path


@pytest.mark.parametrize(
    ("better", "away", "expected"),
    [
        (0.1, 0.2, ["holds"] * 5),
        (-0.1, 0.0, ["undecided", "undecided", "holds", "undecided", "holds"]),
        (0.003, 0.01, ["undecided", "undecided", "holds", "undecided", "holds"]),
    ],
)
@pytest.mark.usefixtures("without_rules")
def test_runs_are_judged_seed_by_seed(tmp_path: Path, better: float, away: float, expected: list[str]) -> None:
    verdicts = reproduce(PAPER, Setting(runs=filled(tmp_path / "runs.jsonl", better, away)), claim="d").verdicts
    assert [v.verdict for v in verdicts] == expected


# --- the whole, small
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(guarantee.DRAWS, True, 100)

        def one(setting: Setting) -> Iterator[TrainedLayer]:
            torch.manual_seed(0)
            for half in range(2):
                for name, causal in (("both ways", False), ("causal", True)):
                    shape = Shape(width=16, layers=1, heads=2, kv_heads=1, hidden=16, causal=causal)
                    layer = next(iter(attention_layers(Transformer(shape, scale=0.5))))
                    yield TrainedLayer(name, 0, half, layer, 3 * torch.randn(2, 12, 16))

        patch.setattr(trained_models, "trained_layers", one)
        yield


@pytest.fixture(scope="module")
def document(small: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    setting = Setting(runs=filled(tmp_path_factory.mktemp("runs") / "runs.jsonl", 0.1, 0.2))
    return json.loads(reproduce_without_rules(PAPER, setting).to_json())


def test_the_promise_holds_and_softmax_has_none(document: dict[str, Any]) -> None:
    verdict = {entry["id"]: entry["verdict"] for entry in document["claims"]}
    assert all(verdict[name] == "holds" for name in verdict if name[0] in "ab")
    assert verdict["c2"] == "holds"
    value = {entry["id"]: entry["measured"] for entry in document["claims"]}
    assert value["a1"] >= 1 > 1e-6 > value["a4"]


@pytest.mark.usefixtures("without_rules")
def test_the_page_comes_from_the_document(document: dict[str, Any], tmp_path: Path) -> None:
    written = write_report(document, PAPER, tmp_path / "page.md", tmp_path)
    text = written[0].read_text()
    assert [path.name for path in written[1:]] == ["ding2020-columns.svg"]
    ElementTree.parse(written[1])
    assert "changes the loss of a masked language model by -0.1003 (-0.1091 to -0.0916) nats" in text
    assert "## d. Training" in text
    assert "| both ways | none |" in text


def test_a_sentence_follows_its_verdict(document: dict[str, Any], tmp_path: Path) -> None:
    claims = [{**entry, "verdict": "undecided"} for entry in document["claims"]]
    text = write_report({**document, "claims": claims}, PAPER, tmp_path / "open.md", tmp_path)[0].read_text()
    assert "Whether softmax promises keys anything is open" in text
    assert "undecided with so few seeds" in text


@pytest.mark.parametrize("letters", ["", "ab", "c"])
def test_a_page_of_some_claims_or_none(document: dict[str, Any], tmp_path: Path, letters: str) -> None:
    claims = [x if x["id"][0] in letters else {**x, "measured": None} for x in document["claims"]]
    titles = {"the promise to every key": "a", "keys in trained models": "c", "training with it": "d"}
    studies = {title: study for title, study in document["studies"].items() if titles[title] in letters}
    some = {**document, "claims": claims, "studies": studies}
    text = write_report(some, PAPER, tmp_path / "bare.md", tmp_path)[0].read_text()
    assert ("## a. What" in text, "## c. Keys" in text) == ("a" in letters, "c" in letters)
    assert "## d. Training" not in text
    assert "masked language model by" not in text


def test_few_claims_are_the_papers() -> None:
    """What only checks an identity or this implementation is not counted for the paper."""
    assert [claim.id for claim in PAPER.claims if claim.by == "paper"] == ["a1", "d1", "d2", "d4"]
    assert all(claim.where for claim in PAPER.claims if claim.by == "paper")
