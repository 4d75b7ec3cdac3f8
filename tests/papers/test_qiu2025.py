"""Qiu et al. 2025: gates against plain references, claims at sizes that take a moment, judges on made-up runs, and the
page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from locater_papers import PAPERS, Measured, Setting, judge, reproduce
from locater_papers.arms_page import sinks_said
from locater_papers.qiu2025 import gates, judged, nonlinear, qwen, table
from locater_papers.qiu2025.page import lead, page
from locater_papers.runs import Runs

PAPER = PAPERS["qiu2025"]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """One quick run, smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gates.DRAWS, True, 2)
        patch.setitem(nonlinear.DRAWS, True, 3000)
        patch.setitem(nonlinear.SEEDS, True, 2)
        patch.setitem(nonlinear.RANKED, True, 3)
        return reproduce(PAPER, Setting(quick=True)).to_dict()


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {entry["id"]: entry["verdict"] for entry in document["claims"]}


# --- a: gates ---------------------------------------------------------------------------------------------------------


def test_the_loops_are_the_definition_on_one_token() -> None:
    """One token sees itself: its value times the gate, whatever queries and keys are."""
    layer = gates.Layer.draw(0, tokens=1)
    W_g = torch.randn(gates.HEADS, gates.WIDTH, dtype=torch.float64)
    found = gates.looped(layer, W_g, "output", "head", causal=True)
    x = layer.x[1, 0]
    by_hand = torch.sigmoid(W_g[3] @ x) * (x @ layer.W_V[1])  # query head 3 reads key head 1
    assert torch.allclose(found[1, 3, 0], by_hand)
    assert not torch.allclose(found[1, 3, 0], x @ layer.W_V[1]), "the gate acts"


@pytest.mark.parametrize("position", gates.POSITIONS)
def test_loops_tell_a_wrong_gate(position: str) -> None:
    layer = gates.Layer.draw(1)
    gated = gates.module(layer, 1, position=position)
    q, k, v = layer.projected
    wrong = gated.get_parameter("gate.weight").flip(0)
    assert qwen.relative(gated(q, k, v, layer.x), gates.looped(layer, wrong, position, "head", False)) > 1e-3


def test_readings_of_qwen_differ_in_which_rows_are_gates() -> None:
    rows = torch.arange(2.0 * qwen.HEADS * qwen.SIZE).view(1, 1, -1)
    first = {name: (int(q[0, 1, 0, 0]), int(g[0, 1, 0, 0])) for name in (qwen.PER_HEAD, qwen.HALVES, qwen.PER_GROUP)
             for q, g in [qwen.split(rows, name)]}  # fmt: skip
    assert first == {qwen.PER_HEAD: (16, 24), qwen.HALVES: (8, 40), qwen.PER_GROUP: (8, 24)}


def test_qwen_has_the_gate_per_head() -> None:
    found = qwen.readings(seed=3)
    assert found is not None
    assert found[qwen.PER_HEAD] < 1e-6
    assert min(found[qwen.HALVES], found[qwen.PER_GROUP]) > 0.1


# --- b: nonlinearity --------------------------------------------------------------------------------------------------


def test_a_gate_of_one_sign_of_a_single_channel_has_a_known_fit() -> None:
    """x of -1 or 1 with o = x and a gate that is open for x > 0 only: g o = (1 + x) / 2, which is linear."""
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(50)[:, None]
    gate = (x > 0).double()
    assert nonlinear.linear_fit(x, gate * x) == pytest.approx(1.0)
    # o independent of the gate's token
    other = torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64).repeat(25)[:, None]
    both = torch.cat([x, other], 1)
    assert nonlinear.linear_fit(both, gate * other) == pytest.approx(0.5), "half of the variance is a product"


def test_maps_of_tokens_span_as_many_dimensions_as_gates_differ() -> None:
    assert nonlinear.map_dimensions(5, "element") == 1.0
    assert nonlinear.map_dimensions(5, "head") == pytest.approx(1 / gates.SIZE)


# --- c: the table -----------------------------------------------------------------------------------------------------


def test_the_table_is_ordered_by_its_gates() -> None:
    assert [v.gate for v in table.TABLE] == sorted(v.gate for v in table.TABLE)
    assert [v.sink for v in table.TABLE] == sorted(v.sink for v in table.TABLE)
    assert table.as_high([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]) == pytest.approx(4 / 24), (
        "itself, the sorted one, two more swaps"
    )
    assert table.gain("NS-sigmoid") == pytest.approx(0.126)


# --- d, e: runs -------------------------------------------------------------------------------------------------------


def line(loss: float, first: float = 0.1, gate: float | None = None, spike: float = 20.0) -> dict[str, Any]:
    held = {
        "first_mass": first,
        "sink_rate": 0.0,
        "sink_ratio": 0.0,
        "gate": gate,
        "spike_ratio": spike,
        "row_mass": 1.0,
    }
    heads = {"M": 0.0, "S": 0.0, "F": 1.0, "concentration": 0.0}
    end = {
        "status": "done",
        "select_loss": loss,
        "report_loss": loss,
        "entropy": 2.0,
        "accuracy": None,
        "heads": heads,
        "device": "cpu",
    }
    return {**end, "measures": held}


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Every arm done: gates close in the order of the paper's table, and the sink with them."""
    runs = Runs()
    levels = {arm.name: (0.1 + 0.1 * n, 0.02 + 0.05 * n) for n, arm in enumerate(judged.SIX)}
    for arm in judged.ARMS:
        gate, first = levels.get(arm.name, (None, 0.4))
        while missing := runs.missing(arm.rows(runs)):
            for row in missing:
                runs.add(
                    row,
                    line((3.0 if gate else 3.1) + (gate or 0) / 10 - row.plan.rate + row.plan.seed / 1000, first, gate),
                )
    return runs


@pytest.fixture(scope="module")
def found(runs: Runs) -> Mapping[str, Measured | None]:
    return judged.judge(runs)


def test_verdicts_follow_the_runs(runs: Runs, found: Mapping[str, Measured | None]) -> None:
    held = {claim.id: judge(claim, m.value, m.spread) for claim in judged.CLAIMS if (m := found[claim.id]) is not None}
    assert held.keys() == {claim.id for claim in judged.CLAIMS}
    first = found["d1"]
    assert first is not None
    assert first.value == pytest.approx(-0.09)
    assert held["d1"] == held["d7"] == held["d15"] == "holds"
    assert held["d18"] == "fails", "a gate without input is 0.05 ahead in these runs"
    assert len(first.numbers["arms"]) == len(judged.ARMS)
    less = Runs()
    less.lines = {
        key: end
        for key, end in runs.lines.items()
        if key != judged.ELEMENT.row(judged.ELEMENT.rate(runs) or 0.0, 1).key
    }
    assert len(less.lines) == len(runs.lines) - 1
    assert judged.judge(less)["d15"] is None, "an arm with a seed missing decides nothing"


def test_without_a_sink_nothing_is_said_of_sinks(runs: Runs) -> None:
    """Softmax whose first token has less than uniform attention would give it."""
    bare = Runs()
    bare.lines = {key: {**end, "measures": {**end["measures"], "first_mass": 0.01}} for key, end in runs.lines.items()}
    found = judged.judge(bare)
    held = {claim.id: judge(claim, m.value, m.spread) for claim in judged.CLAIMS if (m := found[claim.id]) is not None}
    assert {held[key] for key in judged.OF_SINKS} == {"undecided"}
    assert held["d1"] == "holds"
    first = found["d7"]
    assert first is not None
    assert "no sink" in first.spread_of
    numbers = found["d1"].numbers if found["d1"] is not None else {}
    told = sinks_said({"d1": numbers}, "nothing", judged.BASE.length)
    assert told.startswith(
        "No sink formed: under softmax the first token has 0.010 of a row, and uniform attention would give it 0.024"
    )


def test_a_run_that_diverged_counts_as_a_uniform_guess() -> None:
    runs = Runs()
    assert judged.judge_hot(runs) == {}
    for name, rows in judged.hot_rows().items():
        for row in rows:
            runs.add(row, {"status": "diverged", "message": "", "device": "cpu"} if name == "softmax" else line(5.0))
    found = judged.judge_hot(runs)["e1"]
    assert found is not None
    assert found.value == pytest.approx(5.0 - judged.UNIFORM)


# --- all of it --------------------------------------------------------------------------------------------------------


def test_what_holds_and_what_fails(document: dict[str, Any]) -> None:
    found = verdicts(document)
    assert found["c4"] == "fails"
    assert {key for key, said in found.items() if said == "undecided"} == {key for key in found if key[0] in "def"}
    assert {key for key, said in found.items() if said == "fails"} == {"c4"}


def test_page_and_lead_stand_with_runs_and_without(
    document: dict[str, Any], found: Mapping[str, Measured | None]
) -> None:
    json.dumps(document, allow_nan=False)
    lines, figures = page(document)
    assert set(figures) == {"linear", "table"}
    assert not any("## d." in text for text in lines)
    decided = {**document, "claims": [dict(entry) for entry in document["claims"]]}
    for entry in decided["claims"]:
        measured = found.get(entry["id"])
        if measured is not None:
            entry |= {"measured": measured.value, "numbers": dict(measured.numbers)}
    lines, figures = page(decided)
    assert set(figures) == {"linear", "table", "training", "first"}
    assert any(text.startswith("| per element | 0.0025 | 3.0") for text in lines)
    told = "\n".join(lead(decided))
    assert "In training, as seen at this size, the gate changes the loss by -0.090" in told
    assert "In training" not in "\n".join(lead(document))
