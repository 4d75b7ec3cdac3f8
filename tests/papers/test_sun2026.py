"""Sun et al. 2026: measures against loops, a small model with a planted spike, judges on made-up runs, and the page."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from locater.errors import LocaterError
from locater.verbs.load import load_model
from locater_papers import PAPERS, Setting, judge, reproduce
from locater_papers.qiu2025.judged import ELEMENT, HEAD
from locater_papers.runs import Runs
from locater_papers.sun2026 import first, forms, judged, metrics, norms, spikes
from locater_papers.sun2026.page import lead, page
from locater_papers.trained_heads import sources

PAPER = PAPERS["sun2026"]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """One quick run, smaller, on the package's model alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(metrics.HEADS, True, 6)
        patch.setitem(metrics.RANDOM, True, 100)
        patch.setitem(norms.TOKENS, True, 40)
        patch.setitem(norms.DRAWS, True, 6)
        patch.setitem(spikes.SEQUENCES, True, 4)
        patch.setitem(first.DRAWS, True, 60)
        patch.setattr(spikes, "sources", lambda models: {"demo": next(iter(SOURCES.values()))})
        patch.setattr(Setting, "text", "Words of a text that has some. " * 2500)
        return reproduce(PAPER, Setting(quick=True)).to_dict()


SOURCES = sources(None)


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
    assert metrics.looped([[1.0, 0.0], [0.5, 0.5]]) == [0.75, 0.5]
    assert metrics.massive_by_sorting([[0.1, 0.1, 101.0]])
    assert not metrics.massive_by_sorting([[0.1, 0.1, 99.0]])
    assert not metrics.massive_by_sorting([[0.2, 0.2, 150.0]])


def test_a_planted_sink_is_seen_where_it_is() -> None:
    from locater.train.measured import of_map

    for at, first_too in ((0, 1.0), (16, 0.0)):
        q, k = metrics.planted(0, strength=12.0, at=at)
        maps = (q @ k.mT).masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        found = of_map(maps, causal=True)
        assert (found["sink_rate"], found["sink_ratio"]) == (first_too, 1.0)


def test_the_longest_uniform_sink_is_where_the_harmonic_sum_says() -> None:
    assert sum(1 / i for i in range(1, 10)) / 9 > 0.3 > sum(1 / i for i in range(1, 11)) / 10
    assert metrics.uniform_limit() == 9


# --- b: norms ---------------------------------------------------------------------------------------------------------


def test_without_noise_spike_tokens_are_one_vector_and_without_spike_they_are_apart() -> None:
    assert norms.predicted_cosine(torch.tensor([1e9, 2e9]), 64) == pytest.approx(1.0)
    assert norms.predicted_cosine(torch.zeros(3), 64) == 0.0
    assert norms.predicted_small(0.0, 64) == pytest.approx(math.erf(0.01 / math.sqrt(2)))


def test_medians_needed_grow_with_the_root_of_the_width() -> None:
    small, large = (norms.medians_needed(width, 24) for width in (64, 1024))
    assert large / small == pytest.approx(4.0, rel=0.05)
    assert small == pytest.approx(math.sqrt(99 * 64) / norms.MEDIAN, rel=0.05), "s^2 / (s^2 + n) = 0.99"


# --- c: the first position --------------------------------------------------------------------------------------------


def test_first_positions() -> None:
    assert "doubly_normalized" not in first.causal_names()
    softmax, sink = first.outputs("softmax", 40), first.outputs("softmax_plus_one", 40)
    assert softmax.error < 1e-12
    assert sink.error > 0.1
    assert first.fit(sink.x, sink.out) < 0.95


# --- d: trained models ------------------------------------------------------------------------------------------------


def test_the_stream_is_read_after_every_half_block(llama: Any) -> None:
    ids = torch.arange(12).view(2, 6)
    states, attention, mlps = spikes.half_blocks(llama, ids)
    assert (len(states), len(attention), len(mlps)) == (5, 2, 2)
    hidden = llama(input_ids=ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], hidden[0])
    assert torch.equal(states[2], hidden[1])
    assert torch.allclose(states[1], states[0] + attention[0][1])
    assert torch.allclose(states[4], states[3] + mlps[1][1])
    assert spikes.first_error(llama, attention) < 1e-5
    assert spikes.first_error(llama, [(x[:, 1:], out[:, 1:]) for x, out in attention]) > 0.01, (
        "later tokens see more than themselves"
    )


def test_the_form_is_the_mlp_with_silu_gone(llama: Any) -> None:
    mlp = llama.model.layers[0].mlp
    h = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    plain = mlp.down_proj(mlp.gate_proj(h) * mlp.up_proj(h))
    assert torch.allclose(forms.quadratic(mlp, h).float(), plain, atol=1e-4)
    assert forms.form_error(mlp, h) < 1e-12
    kept = mlp.gate_proj.weight.clone()
    try:
        mlp.gate_proj.weight.mul_(torch.sign(mlp.gate_proj(h[0]))[:, None])  # every neuron open for the first vector
        found = [forms.alignment(forms.quadratic(mlp, size * h[0]), mlp(size * h[0])) for size in (0.1, 1.0, 100.0)]
    finally:
        mlp.gate_proj.weight.copy_(kept)
    assert found[1] < found[2]
    assert found[2] == pytest.approx(1.0, abs=1e-3)
    assert forms.alignment(forms.quadratic(mlp, 100 * h), mlp(100 * h)) < 0.9, (
        "size alone does not do it: half of the neurons are shut"
    )


def test_a_planted_step_is_found_and_told_from_its_token(llama: Any) -> None:
    """A neuron of the first MLP that answers to one direction, which token 7 has: it spikes wherever it stands."""
    mlp, embeddings = llama.model.layers[0].mlp, llama.model.embed_tokens.weight
    kept = [p.clone() for p in (embeddings, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)]
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
        found = spikes.one_half(llama, ids)
    finally:
        for p, old in zip(
            (embeddings, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight), kept, strict=True
        ):
            p.copy_(old)
    assert (found["up"], found["is_mlp"], found["channel"]) == (2, True, 9)
    assert found["factor"] > spikes.STEP
    assert found["dominance"] > 0.5, "one neuron makes the form of its channel"
    assert found["moved"] > 0.5, "the token and not the position"
    assert found["vocabulary"] < 0.5
    assert found["cosine"] > 0.9


def test_models_of_another_build_are_refused() -> None:
    with pytest.raises(LocaterError, match=r"Linear: no pre-norm blocks"):
        spikes.blocks(nn.Linear(2, 2))
    assert len(spikes.blocks(load_model(str(next(iter(SOURCES.values())))))) == 6


# --- e: runs ----------------------------------------------------------------------------------------------------------


def line(loss: float, share: float, spike: float) -> dict[str, Any]:
    held = {
        "first_mass": share,
        "sink_rate": 0.0,
        "sink_ratio": share,
        "gate": None,
        "spike": 10 * spike,
        "spike_ratio": spike,
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


def made_up() -> Runs:
    """Sinks grow with head size, gates have none, norms lower spikes alone."""
    runs = Runs()
    of = {judged.SIZES[8].name: (0.05, 50.0), judged.SIZES[16].name: (0.1, 45.0), judged.SIZES[128].name: (0.4, 20.0)}
    of |= {HEAD.name: (0.02, 48.0), ELEMENT.name: (0.01, 47.0), judged.SANDWICH.name: (0.3, 5.0)}
    for arm in judged.ARMS:
        while missing := runs.missing(arm.rows(runs)):
            for row in missing:
                runs.add(row, line(3.0 + row.plan.rate, *of.get(arm.name, (0.3, 30.0))))
    return runs


def test_verdicts_follow_the_runs() -> None:
    found = judged.judge(made_up())
    held = {claim.id: judge(claim, m.value, m.spread) for claim in judged.CLAIMS if (m := found[claim.id]) is not None}
    assert held.keys() == {claim.id for claim in judged.CLAIMS}
    assert {key for key in held if held[key] == "fails"} == {"e2"}
    sizes = found["e4"]
    assert sizes is not None
    assert sizes.value == pytest.approx(1.0)
    assert judged.judge(Runs())["e4"] is None


# --- all of it --------------------------------------------------------------------------------------------------------


def test_what_holds_and_what_waits(document: dict[str, Any]) -> None:
    found = {entry["id"]: entry for entry in document["claims"]}
    for key in ("a1", "a2", "a3", "a4", "b1", "b2", "b5", "b7", "c1", "c2", "c3", "d1", "d2"):
        assert found[key]["verdict"] == "holds", key
    assert found["b8"]["verdict"] == found["d3"]["verdict"] == "fails"
    assert found["d6"]["measured"] is None, "no step up, nothing to ask of it"
    assert "--models FOLDER" in found["d6"]["waits_for"]
    assert found["e1"]["verdict"] == "undecided"


def test_page_and_lead_stand_with_runs_and_without(document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    lines, figures = page(document)
    assert set(figures) == {"norm", "stream"}
    decided = {**document, "claims": [dict(entry) for entry in document["claims"]]}
    found = judged.judge(made_up())
    for entry in decided["claims"]:
        measured = found.get(entry["id"])
        if measured is not None:
            entry |= {"measured": measured.value, "numbers": dict(measured.numbers)}
    lines, figures = page(decided)
    assert set(figures) == {"norm", "stream", "sinks", "spikes"}
    assert any(text.startswith("| heads of 8 |") for text in lines)
    assert "heads of 8 change its share by -0.2500" in "\n".join(lead(decided))
