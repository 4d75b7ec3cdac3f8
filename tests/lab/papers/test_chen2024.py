"""Chen and others 2024: the model on counts against the model on sequences, rivals and information against loops and
closed forms, and the page.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from locater_lab.data.synthetic import NgramSource
from locater_lab.engine.pages import write_report
from locater_lab.papers import PAPERS, Setting, reproduce
from locater_lab.papers.chen2024 import (
    PAPER,
    real_transformer,
    simplified_model,
    training_order,
)
from locater_lab.papers.chen2024.simplified_model import Counts, Model, draw_sequences, fit, loss, subsets


def on_sequences(model: Model, row: list[int]) -> Tensor:
    """The prediction for one sequence, position by position as the paper writes it."""
    L, H, S = len(row) - 1, model.heads, model.tokens

    def copied(h: int, t: int) -> Tensor:
        v = torch.zeros(S, dtype=torch.float64)
        places = [(j, t - h - 1 - j) for j in range(H) if t - h - 1 - j >= 0]
        if not places:
            return v
        weights = torch.stack([model.w[h, j] for j, _ in places]).softmax(0)
        for weight, (_, s) in zip(weights, places, strict=True):
            v[row[s]] += weight
        return v / v.norm()

    logits = []
    for t in range(L):
        like = [float(copied(h, L) @ copied(h, t)) for h in range(H)]
        terms = [math.prod(like[h - 1] for h in part) for part in model.sets]
        share = model.c**2 / (model.c**2).sum()
        logits.append(float(model.a) * sum(float(s) * x for s, x in zip(share, terms, strict=True)))
    weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
    p = torch.zeros(S, dtype=torch.float64)
    for weight, token in zip(weights, row[:L], strict=True):
        p[token] += weight
    return p


@pytest.mark.parametrize(("tokens", "heads", "degree"), [(3, 3, 2), (2, 2, 2), (4, 3, 3)])
def test_counts_give_what_sequences_give(tokens: int, heads: int, degree: int) -> None:
    rows = draw_sequences(3, 12, 17, NgramSource(tokens, (1, 2), 0.5))
    model = Model(tokens, heads, degree)
    g = torch.Generator().manual_seed(0)
    for name in ("c", "w"):
        setattr(model, name, torch.randn(getattr(model, name).shape, generator=g, dtype=torch.float64))
    model.a = torch.tensor(2.5, dtype=torch.float64)
    counts = Counts.of(rows, tokens, heads)
    expected = torch.stack([on_sequences(model, row) for row in rows.tolist()])
    names = simplified_model.rename_tokens(rows, tokens, heads)
    assert torch.equal(names[:, -1], counts.targets)
    got = torch.zeros_like(expected).scatter(1, rows, model(counts).gather(1, names))  # in the tokens' own names
    present = torch.zeros_like(expected).scatter(1, rows[:, :-1], 1.0).bool()
    assert torch.allclose(got[present], expected[present], atol=1e-10)
    assert float(loss(model(counts), counts.targets, "ce")) == pytest.approx(
        float(loss(expected, rows[:, -1], "ce")), abs=1e-10
    ), "names of tokens do not matter"


def test_training_starts_and_moves_as_published() -> None:
    counts = Counts.of(draw_sequences(0, 800), 3)
    curve = fit(Model(), counts, 20, keep=(0, 10, 20))
    assert curve[0]["masses"] == pytest.approx([0.901] * 3, abs=5e-4)
    assert curve[0]["shares"] == pytest.approx([1 / 7] * 7)
    for row in curve[1:]:
        share, a, *_ = training_order.PUBLISHED[row["epoch"]]
        assert row["shares"][training_order.PAIR] == pytest.approx(share, abs=0.02)
        assert row["a"] == pytest.approx(a, rel=0.08)
    assert subsets()[training_order.PAIR] == (1, 2)


def test_parameters_outside_of_a_stage_stay() -> None:
    counts, model = Counts.of(draw_sequences(0, 100), 3), Model()
    before = model.c.clone(), model.w.clone()
    fit(model, counts, 3, ("a",))
    assert float(model.a) > simplified_model.A_START
    assert torch.equal(model.c, before[0])
    assert torch.equal(model.w, before[1])


def test_the_floor_of_probabilities_as_logits() -> None:
    assert training_order.floor_of_ce(20) == pytest.approx(math.log(1 + 2 / math.e), abs=1e-12)
    assert training_order.floor_of_ce(20) == pytest.approx(0.551, abs=5e-4)


def test_the_best_probabilities_in_that_form_against_a_grid() -> None:
    grid = torch.tensor([(i / 200, j / 200, 1 - (i + j) / 200) for i in range(201) for j in range(201 - i)]).double()
    p = torch.tensor(
        [[0.98, 0.01, 0.01], [0.5, 0.3, 0.2], [0.34, 0.33, 0.33], [0.1, 0.3, 0.6], [0.0, 0.5, 0.5]]
    ).double()
    q = training_order.best_in_simplex(p)
    assert torch.allclose(q.sum(1), torch.ones(5).double())
    assert float(q.min()) >= -1e-12
    for row, best in zip(p, q, strict=True):
        least = float((-(grid @ row) + grid.logsumexp(1)).min())
        value = float(-(row @ best) + best.logsumexp(0))
        assert least - 1e-4 < value <= least + 1e-12


@pytest.mark.parametrize("parents", [(), (1,), (1, 2), (1, 2, 3)])
def test_rivals_against_a_loop(parents: tuple[int, ...]) -> None:
    rows = draw_sequences(5, 10, 20)
    got = simplified_model.counting_posterior(rows, parents, 0.3, 3)
    for row, p in zip(rows.tolist(), got, strict=True):
        end, start = len(row) - 1, max((*parents, 0))
        past = [row[s] for s in range(start, end) if all(row[s - d] == row[end - d] for d in parents)]
        expected = [(past.count(x) + 0.3) / (len(past) + 0.9) for x in range(3)]
        assert p.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("parents", [(), (1,)])
def test_counting_at_every_token_has_the_losses_of_the_source(parents: tuple[int, ...]) -> None:
    rows = real_transformer.BIGRAM.sample(6, 15, torch.Generator().manual_seed(2))
    p = real_transformer.counting_probabilities(rows, parents)
    assert torch.allclose(p.sum(-1), torch.ones(6, 15).double())
    losses = -p.gather(2, rows[:, 1:, None])[..., 0].log()
    assert torch.allclose(losses, real_transformer.BIGRAM.surprise(rows, parents)[:, 1:], atol=1e-12)


def test_information_of_a_cycle() -> None:
    """0, 1, 2, 0, 1, 2: each of three contexts has 1/3 and one successor, so D = 3 - 1, I = 2 and J = 2/3."""
    rows = (torch.arange(3003) % 3)[None]
    for parents in ((1,), (2,), (1, 2)):
        assert simplified_model.chi_square_informations(
            simplified_model.joint_counts(rows, parents, 3)
        ) == pytest.approx((2.0, 2 / 3))
    even = torch.tensor(list(product(range(2), repeat=4))).flatten()[None]
    assert simplified_model.chi_square_informations(simplified_model.joint_counts(even, (), 2)) == pytest.approx(
        (0.0, 0.0), abs=1e-12
    )


def test_the_first_gradient_is_counted() -> None:
    assert simplified_model.gradient_difference() < 1e-12
    rows = draw_sequences(1, 60, 30)
    rows = rows[(rows[:, :-1] == rows[:, -1:]).any(1)]
    gradient = simplified_model.first_gradient(Counts.of(rows, 3))
    assert gradient[subsets(3, 3).index((1, 2))] > 0.01
    assert float(gradient[0]) == pytest.approx(0, abs=1e-12), "the empty subset changes nothing"


def test_a_sharp_model_is_close_to_bayes_and_far_from_shorter_contexts() -> None:
    model = Model(w_plus=50.0)
    model.c = torch.zeros_like(model.c)
    model.c[training_order.PAIR], model.a = 1.0, torch.tensor(12.0, dtype=torch.float64)
    entry = simplified_model.compare_with_rivals(model, 0, 400, 100, 0.1)
    assert entry["loss"]["model"] == pytest.approx(entry["loss"]["trigram"], abs=0.06)
    assert entry["loss"]["model"] < entry["loss"]["bigram"] - 0.1 < entry["loss"]["unigram"]
    assert entry["divergence"]["trigram"] < 0.1 < entry["divergence"]["bigram"] < entry["divergence"]["unigram"]


def test_half_way_and_levels() -> None:
    curve = [{"step": 0, "loss": 3.0, "x": 0.0}, {"step": 5, "loss": 1.0, "x": 0.6}, {"step": 9, "loss": 0.5, "x": 1.0}]
    assert real_transformer.half_way(curve, "x") == 5
    assert real_transformer.first_step_below(curve, 0.7) == 9
    assert math.isnan(real_transformer.first_step_below(curve, 0.1))
    assert math.isnan(real_transformer.half_way([{"step": 0, "x": math.nan}, {"step": 1, "x": 1.0}], "x"))
    noisy = [{"step": n, "x": float(n % 2)} for n in range(16)]
    assert math.isnan(real_transformer.half_way(noisy, "x"))


def test_a_reading_of_the_transformer() -> None:
    torch.manual_seed(0)
    model = real_transformer.Transformer(real_transformer.SHAPE, scale=real_transformer.SCALE)
    rows = real_transformer.BIGRAM.sample(8, real_transformer.LENGTH, torch.Generator().manual_seed(0))
    values = real_transformer.read_instrument(
        model, rows, [real_transformer.counting_probabilities(rows, parents) for parents in ((), (1,))]
    )
    assert {*real_transformer.SIGNS, "loss", "unigram", "bigram"} == set(values)
    assert all(map(math.isfinite, values.values()))
    with torch.no_grad():
        assert values["loss"] == pytest.approx(float(model(rows[:, :-1], rows[:, 1:])), rel=1e-5)


# --- the whole, small


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (training_order, simplified_model):
            patch.setattr(module, "SEEDS", 2)
        of_study = (
            training_order.JOINT_ROWS,
            training_order.STAGE_ROWS,
            simplified_model.SOURCE_ROWS,
            simplified_model.RIVAL_ROWS,
        )
        for rows in of_study:
            patch.setitem(rows, True, 60)
        patch.setattr(training_order, "HELD_OUT_ROWS", 40)
        patch.setattr(simplified_model, "SOURCE_EPOCHS", 4)
        patch.setitem(simplified_model.LONG_SEQUENCES, True, (20, 40))
        patch.setitem(training_order.STAGE_EPOCHS, True, (3, 3, 3))
        patch.setitem(training_order.TOGETHER_EPOCHS, True, 6)
        patch.setitem(simplified_model.RIVAL_EPOCHS, True, 3)
        patch.setitem(simplified_model.TESTED_ROWS, True, 30)
        patch.setitem(real_transformer.SEEDS, True, 2)
        patch.setitem(real_transformer.STEPS, True, 4)
        patch.setitem(real_transformer.EVERY, True, 2)
        yield json.loads(reproduce(PAPER, Setting()).to_json())


def test_every_study_measures_its_claims(document: dict[str, Any]) -> None:
    claims = {entry["id"]: entry for entry in document["claims"]}
    assert claims["a7"]["verdict"] == claims["c1"]["verdict"] == "holds"
    unmeasured = {name for name, entry in claims.items() if entry["measured"] is None}
    assert unmeasured <= {"e1", "e4", "e5", "e6", "e7"}, "too short a run has no half of its way"


def test_the_page_with_all_some_and_no_claims(document: dict[str, Any], tmp_path: Path) -> None:
    written = write_report(document, PAPERS["chen2024"], tmp_path / "page.md", tmp_path)
    assert {path.stem for path in written[1:]} == {"chen2024-joint", "chen2024-watched"}
    for path in written[1:]:
        ElementTree.parse(path)
    text = written[0].read_text()
    for title in "abcde":
        assert f"\n## {title}. " in text
    some = {**document, "studies": {k: v for k, v in document["studies"].items() if "stages" in k}}
    assert "## b. Three stages" in write_report(some, PAPERS["chen2024"], tmp_path / "some.md", tmp_path)[0].read_text()
    none = {**document, "studies": {}, "claims": [{**entry, "measured": None} for entry in document["claims"]]}
    bare = write_report(none, PAPERS["chen2024"], tmp_path / "bare.md", tmp_path)[0].read_text()
    assert "## What came out" not in bare
    assert "## a." not in bare


@pytest.mark.parametrize("verdict", ["holds", "fails", "undecided"])
def test_sentences_follow_verdicts(document: dict[str, Any], tmp_path: Path, verdict: str) -> None:
    claims = [{**entry, "verdict": verdict, "measured": entry["measured"] or 0.0} for entry in document["claims"]]
    text = write_report({**document, "claims": claims}, PAPERS["chen2024"], tmp_path / "page.md", tmp_path)[
        0
    ].read_text()
    words = {
        "holds": "counts trigrams",
        "fails": "is nearer to shorter contexts",
        "undecided": "may or may not count trigrams",
    }
    assert words[verdict] in text
