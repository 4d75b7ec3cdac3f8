"""Qiu et al. 2025: gates against plain references, claims at sizes that take a moment, judges on made-up runs, and the
page.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from locater_lab.engine.claims import judge_together
from locater_lab.engine.mechanism_runs import GATES, TEXT_SEEDS, text_arms
from locater_lab.engine.pages import page
from locater_lab.engine.reproduction import Reproduction, Results
from locater_lab.engine.runs import Runs
from locater_lab.papers import PAPERS, Setting, reproduce, verdict_of
from locater_lab.papers.qiu2025 import gate_forms, linearity, training
from tests.lab.made_runs import fill_text, lifted_rules, made_line

PAPER = PAPERS["qiu2025"]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """One quick run, smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gate_forms.DRAWS, True, 2)
        patch.setitem(linearity.DRAWS, True, 3000)
        patch.setitem(linearity.SEEDS, True, 8)
        patch.setitem(linearity.RANK_DRAWS, True, 3)
        return reproduce(PAPER, Setting(quick=True)).to_dict()


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {entry["id"]: entry["verdict"] for entry in document["claims"]}


# --- a: gates ---------------------------------------------------------------------------------------------------------


def test_the_loops_are_the_definition_on_one_token() -> None:
    """One token sees itself: its value times the gate, whatever queries and keys are."""
    layer = gate_forms.DrawnLayer.draw(0, tokens=1)
    W_g = torch.randn(gate_forms.HEADS, gate_forms.WIDTH, dtype=torch.float64)
    heads = gate_forms.looped_output(layer, W_g, "output", "head", causal=True)
    x = layer.x[1, 0]
    by_hand = torch.sigmoid(W_g[3] @ x) * (x @ layer.W_V[1])  # query head 3 reads key head 1
    assert torch.allclose(heads[1, 3, 0], by_hand)
    assert not torch.allclose(heads[1, 3, 0], x @ layer.W_V[1]), "the gate acts"


@pytest.mark.parametrize("position", gate_forms.POSITIONS)
def test_loops_tell_a_wrong_gate(position: str) -> None:
    layer = gate_forms.DrawnLayer.draw(1)
    gated = gate_forms.gated_module(layer, 1, position=position)
    q, k, v = layer.projections
    wrong = gated.get_parameter("gate.weight").flip(0)
    assert (
        gate_forms.relative_difference(
            gated(q, k, v, layer.x), gate_forms.looped_output(layer, wrong, position, "head", False)
        )
        > 1e-3
    )


def test_readings_of_qwen_differ_in_which_rows_are_gates() -> None:
    rows = torch.arange(2.0 * gate_forms.QWEN_HEADS * gate_forms.QWEN_SIZE).view(1, 1, -1)
    first = {name: (int(q[0, 1, 0, 0]), int(g[0, 1, 0, 0])) for name in (gate_forms.PER_HEAD, gate_forms.HALVES, gate_forms.PER_GROUP)
             for q, g in [gate_forms.split_query_and_gate(rows, name)]}  # fmt: skip
    assert first == {gate_forms.PER_HEAD: (16, 24), gate_forms.HALVES: (8, 40), gate_forms.PER_GROUP: (8, 24)}


def test_qwen_has_the_gate_per_head() -> None:
    errors = gate_forms.reading_errors(seed=3)
    assert errors is not None
    assert errors[gate_forms.PER_HEAD] < 1e-6
    assert min(errors[gate_forms.HALVES], errors[gate_forms.PER_GROUP]) > 0.1


# --- b: nonlinearity --------------------------------------------------------------------------------------------------


def test_a_gate_of_one_sign_of_a_single_channel_has_a_known_fit() -> None:
    """x of -1 or 1 with o = x and a gate that is open for x > 0 only: g o = (1 + x) / 2, which is linear."""
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(50)[:, None]
    gate = (x > 0).double()
    assert linearity.linear_fit(x, gate * x) == pytest.approx(1.0)
    # o independent of the gate's token
    other = torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64).repeat(25)[:, None]
    both = torch.cat([x, other], 1)
    assert linearity.linear_fit(both, gate * other) == pytest.approx(0.5), "half of the variance is a product"


def test_maps_of_tokens_span_as_many_dimensions_as_gates_differ() -> None:
    assert linearity.map_dimensions(5, "element") == 1.0
    assert linearity.map_dimensions(5, "head") == pytest.approx(1 / gate_forms.SIZE)


# --- c: the table -----------------------------------------------------------------------------------------------------


def test_the_table_is_ordered_by_its_gates() -> None:
    assert [v.gate for v in linearity.VARIANTS] == sorted(v.gate for v in linearity.VARIANTS)
    assert [v.sink for v in linearity.VARIANTS] == sorted(v.sink for v in linearity.VARIANTS)
    assert linearity.share_of_orders([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]) == pytest.approx(4 / 24), (
        "itself, the sorted one, two more swaps"
    )
    assert linearity.perplexity_gain("NS-sigmoid") == pytest.approx(0.126)


# --- d, e: runs -------------------------------------------------------------------------------------------------------


def line(loss: float, first: float = 0.1, gate: float | None = None, spike: float = 20.0) -> dict[str, Any]:
    measures = {
        "first_mass": first,
        "sink_rate": 0.0,
        "sink_ratio": 0.0,
        "gate": gate,
        "spike_ratio": spike,
        "row_mass": 1.0,
    }
    return made_line(loss, measures=measures)


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Every arm done: gates close in the order of the paper's table, and the sink with them. Seeds hardly differ."""
    return filled(0.5)


def filled(rate: float) -> Runs:
    """`rate` of the heads of models of text have a sink."""
    runs = Runs()
    levels = {name: {"gate": 0.1 + 0.1 * n, "share": 0.02 + 0.05 * n} for n, name in enumerate(GATES)}
    fill_text(runs, levels, rate)
    gates_of = {GATES[name]: level["gate"] for name, level in levels.items()}
    for number, arm in enumerate(training.ARMS):
        gate = gates_of.get(arm.name)
        while missing := runs.missing(arm.rows(runs)):
            for row in missing:
                noise = 1e-6 * (number + 1) * (row.plan.seed - 1)
                loss = (3.0 if gate else 3.1) + (gate or 0) / 10 - row.plan.rate + row.plan.seed / 1000
                runs.add(row, line(loss + noise, 0.01, None if gate is None else gate + noise))
    return runs


@pytest.fixture(scope="module")
def results(runs: Runs) -> Results:
    with lifted_rules():
        return training.judge_training(runs)


def verdicts_of(results: Results) -> dict[str, str]:
    measured = {claim: results.measured[claim.id] for claim in training.TRAINING_CLAIMS}
    return {c.id: verdict_of(c, m, "").verdict for c, m in measured.items() if m is not None}


@pytest.mark.usefixtures("without_rules")
def test_verdicts_follow_the_runs(runs: Runs, results: Results) -> None:
    by_claim = verdicts_of(results)
    assert by_claim.keys() == {claim.id for claim in training.TRAINING_CLAIMS}
    first = results.measured["d1"]
    assert first is not None
    assert first.value == pytest.approx(-0.09, abs=1e-4)
    assert by_claim["d1"] == by_claim["d7"] == "holds"
    assert results.measured["d15"].value == pytest.approx(1.0)  # type: ignore[union-attr]
    assert by_claim["d15"] == "undecided", "four equal numbers decide nothing"
    assert by_claim["d18"] == "fails", "a gate without input is 0.05 ahead in these runs"
    table = results.tables["gates_in_training"]
    assert len(table["arms"]) == len(training.ARMS)
    assert not table["has_sink"]
    for seeds, known in ((3, True), (2, False)):
        less, element = Runs(), text_arms("start token")["element"]
        gone = {element.row(element.rates[0], seed).key for seed in range(seeds, TEXT_SEEDS)}
        less.lines = {key: end for key, end in runs.lines.items() if key not in gone}
        assert len(less.lines) == len(runs.lines) - len(gone)
        assert (training.judge_training(less).measured["d15"] is not None) == known, "three seeds are the least"


@pytest.mark.usefixtures("without_rules")
def test_without_a_sink_nothing_is_said_of_sinks(document: dict[str, Any]) -> None:
    results = training.judge_training(filled(0.0))
    by_claim = verdicts_of(results)
    assert {by_claim[key] for key in training.OF_SINKS} == {"undecided"}
    assert by_claim["d1"] == "holds"
    share = results.measured["d7"]
    assert share is not None
    assert "no sink" in share.spread_of
    text, _ = page(with_runs(document, results), PAPER)
    assert "under softmax the first token has 0.010 of a row, and uniform attention would give it 0.024" in text


def test_a_run_that_diverged_counts_as_a_uniform_guess() -> None:
    runs = Runs()
    assert training.judge_hot(runs) == Results({})
    for name, rows in training.hot_rows().items():
        for row in rows:
            runs.add(row, {"status": "diverged", "message": "", "device": "cpu"} if name == "softmax" else line(5.0))
    hot = training.judge_hot(runs)
    difference = hot.measured["e1"]
    assert difference is not None
    assert difference.value == pytest.approx(5.0 - training.UNIFORM_LOSS)
    assert hot.tables["hot_rate"]["losses"]["gated per element"] == [5.0, 5.0]


# --- all of it --------------------------------------------------------------------------------------------------------


def with_runs(document: dict[str, Any], results: Results) -> dict[str, Any]:
    """The document as it were if study d had been measured too."""
    verdicts = judge_together([verdict_of(claim, results.measured[claim.id], "") for claim in training.TRAINING_CLAIMS])
    more = Reproduction(PAPER, verdicts, {}, {training.TRAINING_STUDY.title: results.tables}).to_dict()
    by_id = {entry["id"]: entry for entry in more["claims"]}
    claims = [by_id.get(entry["id"], entry) for entry in document["claims"]]
    return {**document, "claims": claims, "studies": {**document["studies"], **more["studies"]}}


def test_what_holds_and_what_fails(document: dict[str, Any]) -> None:
    by_claim = verdicts(document)
    assert {key for key, verdict in by_claim.items() if verdict == "undecided"} == {
        key for key in by_claim if key[0] in "def"
    }
    assert {key for key, verdict in by_claim.items() if verdict == "fails"} == {"c4"}


def test_the_paper_says_what_is_laid_at_its_door() -> None:
    by = {claim.id: claim.by for claim in PAPER.claims}
    assert by["a2"] == by["c2"] == by["d18"] == "ours"
    for claim in PAPER.claims:
        assert claim.by == "ours" or claim.where or claim.id in ("a6", "b7", "e1"), claim.id


@pytest.mark.usefixtures("without_rules")
def test_the_page_stands_with_all_some_and_no_claims_measured(document: dict[str, Any], results: Results) -> None:
    json.dumps(document, allow_nan=False)
    text, figures = page(document, PAPER)
    assert set(figures) == {"linear", "table"}
    assert "## d." not in text
    assert "In training" not in text
    text, figures = page(with_runs(document, results), PAPER)
    assert set(figures) == {"linear", "table", "training", "first", "text"}
    assert "| per element | 0.0025 | 3.0" in text
    assert "In training, as seen at this size, a gate per element changes the loss by -0.090 (-0.090 to -0.090)" in text
    assert '(50% of softmax heads have a sink by the recipe "start token")' in text
    assert "### Where there is a sink" in text
    nothing = [{**entry, "measured": None, "verdict": "undecided"} for entry in document["claims"]]
    text, figures = page({**document, "claims": nothing, "studies": {}}, PAPER)
    assert figures == {}
    assert "## What came out" not in text
    assert "what was run here" in text
