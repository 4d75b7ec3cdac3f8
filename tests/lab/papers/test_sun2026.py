"""Sun et al. 2026: measures against loops, a small model with a planted spike, judges on made-up runs, and the page."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from locater.commands.load_model import load_model
from locater.errors import LocaterError
from locater_lab.engine.claims import judge_together
from locater_lab.engine.pages import page
from locater_lab.engine.reproduction import Reproduction, Results
from locater_lab.engine.runs import Runs
from locater_lab.engine.trained_models import model_folders
from locater_lab.papers import PAPERS, Setting, reproduce, verdict_of
from locater_lab.papers.sun2026 import sinks_and_spikes, trained_models, training
from tests.lab.made_runs import fill_text, made_line

PAPER = PAPERS["sun2026"]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """One quick run, smaller, on the package's model alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sinks_and_spikes.HEAD_DRAWS, True, 6)
        patch.setitem(sinks_and_spikes.RANDOM_HEADS, True, 400)
        patch.setitem(sinks_and_spikes.SPIKE_TOKENS, True, 40)
        patch.setitem(sinks_and_spikes.NORM_DRAWS, True, 8)
        patch.setitem(trained_models.SEQUENCES, True, 4)
        patch.setitem(sinks_and_spikes.FIRST_DRAWS, True, 60)
        patch.setattr(trained_models, "model_folders", lambda models: {"demo": next(iter(SOURCES.values()))})
        patch.setattr(Setting, "text", "Words of a text that has some. " * 2500)
        return reproduce(PAPER, Setting(quick=True)).to_dict()


SOURCES = model_folders(None)


@pytest.fixture(scope="module")
def llama() -> Any:
    """A model of two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


# --- a: measures ------------------------------------------------------------------------------------------------------


def test_loops_by_hand() -> None:
    assert sinks_and_spikes.alpha_in_loops([[1.0, 0.0], [0.5, 0.5]]) == [0.75, 0.5]
    assert sinks_and_spikes.massive_by_sorting([[0.1, 0.1, 101.0]])
    assert not sinks_and_spikes.massive_by_sorting([[0.1, 0.1, 99.0]])
    assert not sinks_and_spikes.massive_by_sorting([[0.2, 0.2, 150.0]])


def test_a_planted_sink_is_seen_where_it_is() -> None:
    from locater_lab.train.map_measures_and_diverged_layer import map_numbers

    for at, first_too in ((0, 1.0), (16, 0.0)):
        q, k = sinks_and_spikes.planted_head(0, strength=12.0, at=at)
        maps = (q @ k.mT).masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        counted = map_numbers(maps, causal=True)
        assert (counted["sink_rate"], counted["sink_ratio"]) == (first_too, 1.0)


def test_a_share_of_none_is_not_zero() -> None:
    """With 0 of n the upper end solves (1 - p)^n = 0.025; of all the lower end is its mirror image."""
    assert sinks_and_spikes.share_interval(0, 400)[1] == pytest.approx(1 - 0.025 ** (1 / 400))
    assert sinks_and_spikes.share_interval(30, 30) == pytest.approx((0.025 ** (1 / 30), 1.0))
    low, high = sinks_and_spikes.share_interval(3, 50)
    more = sum(math.comb(50, k) * low**k * (1 - low) ** (50 - k) for k in range(3, 51))
    less = sum(math.comb(50, k) * high**k * (1 - high) ** (50 - k) for k in range(4))
    assert (more, less) == pytest.approx((0.025, 0.025))


def test_the_longest_uniform_sink_is_where_the_harmonic_sum_says() -> None:
    assert sum(1 / i for i in range(1, 10)) / 9 > 0.3 > sum(1 / i for i in range(1, 11)) / 10
    assert sinks_and_spikes.uniform_limit() == 9


# --- b: norms ---------------------------------------------------------------------------------------------------------


def test_without_noise_spike_tokens_are_one_vector_and_without_spike_they_are_apart() -> None:
    assert sinks_and_spikes.predicted_cosine(torch.tensor([1e9, 2e9]), 64) == pytest.approx(1.0)
    assert sinks_and_spikes.predicted_cosine(torch.zeros(3), 64) == 0.0
    assert sinks_and_spikes.predicted_small(0.0, 64) == pytest.approx(math.erf(0.01 / math.sqrt(2)))


def test_medians_needed_grow_with_the_root_of_the_width() -> None:
    small, large = (sinks_and_spikes.medians_needed(width, 24) for width in (64, 1024))
    assert large / small == pytest.approx(4.0, rel=0.05)
    assert small == pytest.approx(math.sqrt(99 * 64) / sinks_and_spikes.MEDIAN, rel=0.05), "s^2 / (s^2 + n) = 0.99"


# --- c: the first position --------------------------------------------------------------------------------------------


def test_first_positions() -> None:
    assert "doubly_normalized" not in sinks_and_spikes.causal_names()
    softmax, sink = (
        sinks_and_spikes.first_outputs("softmax", 40),
        sinks_and_spikes.first_outputs("softmax_plus_one", 40),
    )
    assert softmax.error < 1e-12
    assert sink.error > 0.1
    assert sinks_and_spikes.linear_fit(sink.x, sink.out) < 0.95


# --- d: trained models ------------------------------------------------------------------------------------------------


def test_the_stream_is_read_after_every_half_block(llama: Any) -> None:
    ids = torch.arange(12).view(2, 6)
    states, attention, mlps = trained_models.half_blocks(llama, ids)
    assert (len(states), len(attention), len(mlps)) == (5, 2, 2)
    hidden = llama(input_ids=ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], hidden[0])
    assert torch.equal(states[2], hidden[1])
    assert torch.allclose(states[1], states[0] + attention[0][1])
    assert torch.allclose(states[4], states[3] + mlps[1][1])
    assert trained_models.first_error(llama, attention) < 1e-5
    assert trained_models.first_error(llama, [(x[:, 1:], out[:, 1:]) for x, out in attention]) > 0.01, (
        "later tokens see more than themselves"
    )


def test_the_form_is_the_mlp_with_silu_gone(llama: Any) -> None:
    mlp = llama.model.layers[0].mlp
    h = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    plain = mlp.down_proj(mlp.gate_proj(h) * mlp.up_proj(h))
    assert torch.allclose(trained_models.quadratic_mlp(mlp, h).float(), plain, atol=1e-4)
    assert trained_models.form_error(mlp, h) < 1e-12
    before = mlp.gate_proj.weight.clone()
    try:
        mlp.gate_proj.weight.mul_(torch.sign(mlp.gate_proj(h[0]))[:, None])  # every neuron open for the first vector
        cosines = [
            trained_models.alignment(trained_models.quadratic_mlp(mlp, size * h[0]), mlp(size * h[0]))
            for size in (0.1, 1.0, 100.0)
        ]
    finally:
        mlp.gate_proj.weight.copy_(before)
    assert cosines[1] < cosines[2]
    assert cosines[2] == pytest.approx(1.0, abs=1e-3)
    assert trained_models.alignment(trained_models.quadratic_mlp(mlp, 100 * h), mlp(100 * h)) < 0.9, (
        "size alone does not do it: half of the neurons are shut"
    )


def test_a_planted_step_is_found_and_told_from_its_token(llama: Any) -> None:
    """A neuron of the first MLP that answers to one direction, which token 7 has: it spikes wherever it stands."""
    mlp, embeddings = llama.model.layers[0].mlp, llama.model.embed_tokens.weight
    before = [p.clone() for p in (embeddings, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)]
    try:
        direction = torch.zeros(16)
        direction[5] = 1.0
        embeddings[:, 5] = 0.0
        embeddings[7] = 4 * direction
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight[0] = 3 * direction
        mlp.down_proj.weight[:, 0] = 0.0
        mlp.down_proj.weight[9, 0] = 5.0
        ids = torch.randint(8, 64, (6, 10), generator=torch.Generator().manual_seed(1))
        ids[:, 0] = 7
        half = trained_models.measure_half(llama, ids)
    finally:
        for p, old in zip(
            (embeddings, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight), before, strict=True
        ):
            p.copy_(old)
    assert (half["up"], half["is_mlp"], half["channel"]) == (2, True, 9)
    assert half["factor"] > trained_models.STEP
    assert half["dominance"] > 0.5, "one neuron makes the form of its channel"
    assert half["moved"] > 0.5, "the token and not the position"
    assert half["vocabulary"] < 0.5
    assert half["cosine"] > 0.9


def test_models_of_another_build_are_refused() -> None:
    with pytest.raises(LocaterError, match=r"Linear: no pre-norm blocks"):
        trained_models.swiglu_blocks(nn.Linear(2, 2))
    assert len(trained_models.swiglu_blocks(load_model(str(next(iter(SOURCES.values())))))) == 6


# --- e: runs ----------------------------------------------------------------------------------------------------------


def line(loss: float, share: float, spike: float) -> dict[str, Any]:
    measures = {
        "first_mass": share,
        "sink_rate": 0.0,
        "sink_ratio": share,
        "gate": None,
        "spike": 10 * spike,
        "spike_ratio": spike,
    }
    return made_line(loss, measures=measures)


def made_up(rate: float = 0.5) -> Runs:
    """Sinks grow with head size, gates have none, norms lower spikes alone. Seeds hardly differ."""
    runs = Runs()
    for number, arm in enumerate(training.ARMS):
        while missing := runs.missing(arm.rows(runs)):
            for row in missing:
                noise = 1e-6 * (number + 1) * (row.plan.seed - 1)
                runs.add(row, line(3.0 + row.plan.rate, 0.01, 30.0 + noise))
    levels: dict[str, dict[str, Any]] = {
        "heads of 8": {"share": 0.05, "spike": 50.0},
        "heads of 16": {"share": 0.1, "spike": 45.0},
        "heads of 128": {"share": 0.6, "spike": 20.0},
        "head": {"share": 0.02},
        "element": {"share": 0.01},
        "gelu": {"share": 0.5},
        "no mlp": {"share": 0.5},
        "sigmoid": {"share": 0.2, "first_weight": 0.01},
        "no decay": {"share": 0.3},
        "other start": {"share": 0.1, "rate": 0.0},
    }
    fill_text(runs, levels, rate)
    return runs


def verdicts_of(results: Results) -> dict[str, str]:
    measured = {claim: results.measured[claim.id] for claim in training.TRAINING_CLAIMS}
    return {c.id: verdict_of(c, m, "").verdict for c, m in measured.items() if m is not None}


@pytest.mark.usefixtures("without_rules")
def test_verdicts_follow_the_runs() -> None:
    results = training.judge_training(made_up())
    by_claim = verdicts_of(results)
    assert by_claim.keys() == {claim.id for claim in training.TRAINING_CLAIMS}
    assert {key for key in by_claim if by_claim[key] == "fails"} == {"e2"}
    assert {by_claim[key] for key in ("e3", "e5", "e6", "e8", "e10", "e11")} == {"holds"}
    assert {by_claim[key] for key in training.OF_SPIKES} == {"undecided"}, "there is no spike"
    sizes = results.measured["e4"]
    assert sizes is not None
    assert sizes.value == pytest.approx(1.0)
    assert not results.tables["drivers"]["has_sink"]
    empty = training.judge_training(Runs())
    assert empty.measured.get("e4") is None
    assert empty.tables == {}


def test_without_a_sink_nothing_is_said_of_sinks() -> None:
    by_claim = verdicts_of(training.judge_training(made_up(rate=0.0)))
    assert {by_claim[key] for key in training.OF_SINKS} == {"undecided"}
    measured = training.judge_growth(made_up(rate=0.0)).measured.values()
    assert all(x is not None and x.spread == math.inf for x in measured)


def test_what_a_sink_on_text_is() -> None:
    results = training.judge_growth(made_up())
    by_claim = {c.id: verdict_of(c, results.measured[c.id], "").verdict for c in training.GROWTH_CLAIMS}
    assert by_claim["g2"] == "fails", "it has the whole of it still"
    assert {by_claim[key] for key in ("g1", "g3", "g6")} == {"holds"}
    assert len(results.tables["text_sinks"]["recipes"]) == 8
    assert training.judge_growth(Runs()) == Results({}, {})


# --- all of it --------------------------------------------------------------------------------------------------------


def test_what_holds_and_what_waits(document: dict[str, Any]) -> None:
    by_id = {entry["id"]: entry for entry in document["claims"]}
    for key in ("a1", "a2", "a3", "a4", "a5", "b1", "b2", "b5", "b7", "c1", "c2", "c3", "d1", "d2"):
        assert by_id[key]["verdict"] == "holds", key
    assert by_id["d3"]["verdict"] == "fails"
    assert by_id["b8"]["undecided_by"], "tokens drawn here cannot fail a paper on large models"
    assert by_id["d6"]["measured"] is None, "no step up, nothing to measure of it"
    assert "--models FOLDER" in by_id["d6"]["waits_for"]
    assert by_id["e1"]["verdict"] == "undecided"


def with_runs(document: dict[str, Any], results: Results) -> dict[str, Any]:
    """The document as it were if studies e and g had been measured too."""
    grown = training.judge_growth(made_up())
    measured = {**results.measured, **grown.measured}
    verdicts = judge_together(
        [verdict_of(c, measured[c.id], "") for c in (*training.TRAINING_CLAIMS, *training.GROWTH_CLAIMS)]
    )
    tables = {training.TRAINING_STUDY.title: results.tables, training.GROWTH_STUDY.title: grown.tables}
    more = Reproduction(PAPER, verdicts, {}, tables).to_dict()
    by_id = {entry["id"]: entry for entry in more["claims"]}
    claims = [by_id.get(entry["id"], entry) for entry in document["claims"]]
    return {**document, "claims": claims, "studies": {**document["studies"], **more["studies"]}}


def test_the_page_stands_with_all_some_and_no_claims_measured(document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    text, figures = page(document, PAPER)
    assert set(figures) == {"norm", "stream"}
    assert "## e." not in text
    text, figures = page(with_runs(document, training.judge_training(made_up())), PAPER)
    assert set(figures) == {"norm", "stream", "sinks", "spikes", "growth", "text"}
    assert "| heads of 8 |" in text
    assert "heads of 8 by -0.35" in text
    assert 'It picks "start token".' in text
    assert ">start token<" in figures["growth"]
    assert "50% of the heads have a sink (section g)" in text
    nothing = [{**entry, "measured": None, "verdict": "undecided"} for entry in document["claims"]]
    text, figures = page({**document, "claims": nothing, "studies": {}}, PAPER)
    assert figures == {}
    assert "## What came out" not in text
