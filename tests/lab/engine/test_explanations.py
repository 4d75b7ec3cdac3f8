"""atad2026 and chefer2021: the tasks with a known answer, the tests of explanations, the identities, and the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from locater.errors import LocaterError
from locater.explain import Explanation, Target, decompose, rollout
from locater.explain.linear_operator import FrozenOperator
from locater_lab.engine import explanation_tests
from locater_lab.engine.explanation_tests import (
    CLASSES,
    TOKENS,
    ExplainedModel,
    blocks_of,
    deletion_areas,
    gain_over_best_rival,
    hit_rate,
    image_model,
    method_named,
    planted_model,
    planted_rows,
    redraw_block,
    redraw_similarity,
)
from locater_lab.engine.pages import write_report
from locater_lab.papers import PAPERS, Setting
from locater_lab.papers.atad2026 import linear_operator
from locater_lab.papers.chefer2021 import relevance
from tests import ROOT


@pytest.fixture(scope="module")
def planted() -> ExplainedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explanation_tests, "STEPS", 120)
        return planted_model(6)


def test_one_token_of_a_planted_row_decides_its_class() -> None:
    rows, labels, places = planted_rows(200, torch.Generator().manual_seed(0))
    assert torch.equal((rows < CLASSES).sum(1), torch.ones(200, dtype=torch.long))
    assert torch.equal(rows[torch.arange(200), places], labels)
    assert set(places.tolist()) == set(range(TOKENS))


def perfect(model: Any, inputs: Any, target: Any) -> Explanation:
    """Scores of someone who knows the answer."""
    scores = (inputs["inputs"][0] < CLASSES).float()
    return Explanation("perfect", Target(target, None, 1.0), scores)


def blind(model: Any, inputs: Any, target: Any) -> Explanation:
    """And of someone who has it the wrong way round, and never looks at the model."""
    return Explanation("blind", Target(target, None, 1.0), -perfect(model, inputs, target).scores)


def test_the_known_answer_is_better_than_its_opposite(planted: ExplainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(explanation_tests.METHODS, "perfect", perfect)
    monkeypatch.setitem(explanation_tests.METHODS, "blind", blind)
    assert planted.facts["accuracy"] == 1.0
    assert (hit_rate(planted, "perfect"), hit_rate(planted, "blind")) == (1.0, 0.0)
    better, worse = deletion_areas(planted, "perfect"), deletion_areas(planted, "blind")
    assert min(better) > 0.5
    assert max(worse) < -0.5
    assert redraw_similarity(planted, "blind") == pytest.approx(
        [1.0, 1.0]
    )  # what does not see the model stays as it was
    assert redraw_similarity(planted, "operator logit")[-1] < 0.9


def test_the_operator_finds_the_planted_token(planted: ExplainedModel) -> None:
    assert hit_rate(planted, "operator logit") == 1.0
    assert method_named("operator norm")(planted.model, planted.inputs[0], planted.targets[0]).method == "operator"


def test_the_best_rival_counts() -> None:
    by_method = {"ours": [1.0, 2.0], "rollout": [0.5, 0.5], "raw_attention": [3.0, -3.0]}
    assert gain_over_best_rival(by_method, "ours") == [0.5, 1.5]  # rollout, by its mean
    assert gain_over_best_rival(by_method, "ours", ("raw_attention",)) == [-2.0, 5.0]


def test_blocks_are_drawn_anew_with_their_own_size(planted: ExplainedModel) -> None:
    model = explanation_tests.Transformer(explanation_tests.PLANTED, 0.2)
    block = blocks_of(model)[0]
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    redraw_block(block, 0)
    for name, p in block.named_parameters():
        assert torch.equal(p, before[name]) == (p.ndim < 2)
        assert float(p.detach().std()) == pytest.approx(float(before[name].std()), rel=0.2)
    with pytest.raises(LocaterError, match="its blocks are not known"):
        blocks_of(torch.nn.Linear(2, 2))


def test_without_gradients_relevance_is_rollout() -> None:
    results = relevance.measure_rules(Setting())
    assert results.measured["a1"].value < 1e-10  # type: ignore[union-attr]
    ids = torch.arange(12)[None]
    R = rollout(relevance.random_model(2), ids, (0, 1)).matrix
    assert torch.allclose(R.sum(-1), torch.ones(12, dtype=torch.float64))  # type: ignore[union-attr]


def test_the_jacobian_is_that_of_autograd_and_not_the_operator() -> None:
    model, ids = linear_operator.small_model(), torch.arange(6)[None]
    J, x = linear_operator.jacobian_rows(model, ids, 5)

    def last(stream: torch.Tensor) -> torch.Tensor:
        y = stream[None]
        _, turn = model.model.embed(ids)
        for layer in model.model.layers:
            y = layer(y, turn)
        return model.model.norm(y)[0, 5]

    assert torch.allclose(J, torch.autograd.functional.jacobian(last, x), atol=1e-10)
    T = FrozenOperator(decompose(model, ids, mlp="linear"))
    rows = linear_operator.operator_rows(T, 5)
    assert torch.allclose(torch.einsum("ctd,td->c", rows, x) + T.constants()[5], last(x), atol=1e-10)
    assert float((J - rows).norm() / rows.norm()) > 0.5


def test_images_need_their_file(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match=r"no fashion\.npz: give its folder by --data"):
        image_model(2, tmp_path)


@pytest.mark.parametrize("name", ["atad2026", "chefer2021"])
def test_pages_with_all_some_and_no_claims(name: str, tmp_path: Path) -> None:
    document = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    whole = write_report(document, PAPERS[name], tmp_path / "page.md", tmp_path)[0].read_text()
    assert whole == (ROOT / "docs" / "results" / f"{name}.md").read_text().replace("](../images/", "](")
    assert "## b. Tokens taken away" in whole
    for left in ("a", ""):
        claims = [x if x["id"][0] in left else {**x, "measured": None} for x in document["claims"]]
        studies = {title: study for title, study in document["studies"].items() if left and "o" in title[0]}
        text = write_report(
            {**document, "claims": claims, "studies": studies}, PAPERS[name], tmp_path / "bare.md", tmp_path
        )[0].read_text()
        assert "## b. Tokens taken away" not in text
        assert "## Verdicts" in text
