"""Over-smoothing: the measure, the bounds, the theorem, models by depth, fusion judged by runs that were made up."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from locater.measures import token_cosine
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.mechanism_runs import SOFTMAX_MASKED
from locater_lab.engine.pages import write_report
from locater_lab.engine.runs import Arm, Runs
from locater_lab.papers import Setting, judge, reproduce
from locater_lab.papers.shi2022 import PAPER, depth_theorem, token_distance, trained_models
from locater_lab.theory import FunctionalBlock
from tests.lab.made_runs import fill, made_line, reproduce_without_rules

IDS = torch.arange(3, 15).reshape(2, 6)


def tiny_bert(seed: int = 0) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        attn_implementation="eager",
    )
    return BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)


def entry(name: str, model: Any, causal: bool) -> dict[str, Any]:
    curves = {
        key: [part.mean(0).tolist() for part in x.chunk(2)]
        for key, x in trained_models.readings_by_layer(model, [{"input_ids": IDS}]).items()
    }
    return {
        "model": name,
        "causal": causal,
        "curves": curves,
        "blocks": trained_models.promised_bounds(model, {"input_ids": IDS}),
    }


def halves(*cosines: float) -> dict[str, Any]:
    return {"halves": [{"cosine": x, "centred_cosine": 0.0, "residual": 1 - x} for x in cosines]}


def filled(path: Path) -> Path:
    """Arms with losses and a last cosine whose differences vary a little from seed to seed; gate changes nothing."""
    runs = Runs(path)

    def fill_arm(arm: Arm, loss: float, last: float, noise: float) -> None:
        for rate in arm.rates[1:]:
            runs.add(arm.row(rate, 0), made_line(loss + 1))
        for seed in range(arm.seeds):
            measures = halves(0.1, 0.2, 0.3, last + noise * seed)
            runs.add(arm.row(arm.rates[0], seed), made_line(loss + (0.1 + noise) * seed, measures=measures))

    fill_arm(SOFTMAX_MASKED, 3.0, 0.4, 0.0)
    fill_arm(depth_theorem.FUSIONS["concat"], 2.9, 0.3, 1e-5)
    fill_arm(depth_theorem.FUSIONS["max"], 3.1, 0.5, 1e-5)
    fill_arm(depth_theorem.FUSIONS["gate"], 3.0, 0.4, 0.0)
    fill_arm(depth_theorem.POST, 3.2, 0.9, 1e-5)
    return path


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One run at small sizes: a tiny BERT stands for trained models, and runs are made up."""
    path = filled(tmp_path_factory.mktemp("runs") / "runs.jsonl")
    small = {"COSINE_DRAWS": (token_distance, 6), "BOUND_DRAWS": (token_distance, 30)}
    small |= {"THEOREM_DRAWS": (depth_theorem, 240), "STACK_SEEDS": (depth_theorem, 3)}
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, count) in small.items():
            patch.setattr(module, name, {True: count})
        patch.setattr(token_distance, "SEEDS", {True: 8})
        patch.setattr(token_distance, "MAPS", {True: 12})
        bert = tiny_bert()
        patch.setattr(
            trained_models,
            "read_models",
            lambda setting: ([entry("a", bert, False), {**entry("b", bert, True), "blocks": []}], {"c": "why"}),
        )
        yield json.loads(reproduce_without_rules(PAPER, Setting(quick=True, runs=path)).to_json())


def test_the_distance_counts_pairs() -> None:
    x = draw_normal(7, 5, seed=3)
    assert token_distance.distance_from_equal(x) ** 2 == pytest.approx(
        sum((a - b).square().sum().item() for a in x for b in x) / (2 * 7)
    )


def test_centred_cosine_is_blind_where_lengths_are_equal() -> None:
    """Around the mean, tokens on a circle and tokens on a line have the same mean cosine."""
    angle = torch.arange(8) * math.pi / 4
    circle, line = (
        torch.stack([angle.cos(), angle.sin()], 1) + 3,
        torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(4, 1) + 3,
    )
    for x in (circle, line):
        assert token_cosine(x[None], centred=True).item() == pytest.approx(-1 / 7)


def test_lambda_is_the_largest_eigenvalue_and_can_exceed_one() -> None:
    a = token_distance.attention_map(0, 6, 2.0, causal=True)
    J = torch.full((6, 6), 1 / 6, dtype=torch.float64)
    assert token_distance.attention_eigenvalue(a) == pytest.approx(
        torch.linalg.eigvalsh(a.mT @ (torch.eye(6, dtype=torch.float64) - J) @ a)[-1].item()
    )
    copies = torch.zeros(6, 6)
    copies[:3, 0] = copies[3:, 1] = 1.0
    assert token_distance.attention_eigenvalue(copies) == pytest.approx(3.0), (
        "half of the queries copy one token, half another: n / 2"
    )
    assert token_distance.attention_map(0, 6, 2.0, causal=True).triu(1).abs().max() == 0


def test_the_steepest_slope_of_gelu() -> None:
    x = torch.linspace(-4, 4, 8001, dtype=torch.float64, requires_grad=True)
    slopes = torch.autograd.grad(functional.gelu(x).sum(), x)[0]
    assert slopes.max().item() == pytest.approx(token_distance.STEEPEST, abs=1e-6)


def test_a_post_block_is_the_block_of_the_theory() -> None:
    w = depth_theorem.BlockWeights(
        *(draw_normal(*shape, seed=n) for n, shape in enumerate([(2, 4, 4), (2, 4, 4), (4, 8), (8, 4)]))
    )
    x = token_distance.layer_norm(draw_normal(5, 4, seed=9))
    block = FunctionalBlock(
        w.W_QK, w.W_VO, 0.5, skip=True, mlp=lambda y: (y @ w.W_in).relu() @ w.W_out, mlp_skip=True, norm=True
    )
    got, v, sigma = depth_theorem.post_block(x, w)
    torch.testing.assert_close(got, block(x))
    largest = max(token_distance.attention_eigenvalue(a) for a in block.attention(x))
    s = max(torch.linalg.svdvals(each).max().item() for each in (w.W_VO, w.W_in, w.W_out))
    assert v == pytest.approx((1 + s * s) * (1 + 2 * s * largest**0.5) / sigma)
    assert token_distance.distance_from_equal(got) <= v * token_distance.distance_from_equal(x)


def test_norms_after_the_sums_collapse_faster() -> None:
    post, pre = (
        depth_theorem.cosines_by_depth(0, post=True, depth=8),
        depth_theorem.cosines_by_depth(0, post=False, depth=8),
    )
    assert post[0] == pre[0] == pytest.approx(0, abs=0.05)
    assert post[-1] > 0.9 > 0.8 > pre[-1]


def test_states_of_an_encoder_are_read_without_the_special_tokens() -> None:
    model = tiny_bert()
    by_layer = trained_models.readings_by_layer(model, [{"input_ids": IDS}])
    states = model(IDS, output_hidden_states=True).hidden_states
    assert by_layer["cosine"].shape == (2, 3)
    torch.testing.assert_close(by_layer["cosine"][:, 2], token_cosine(states[2][:, 1:-1]))


def test_blocks_of_a_bert_are_under_their_bounds() -> None:
    model = tiny_bert()
    blocks = trained_models.promised_bounds(model, {"input_ids": IDS})
    states = [x.double() for x in model(IDS, output_hidden_states=True).hidden_states]
    kept = [
        sum(token_distance.distance_from_equal(b[i]) / token_distance.distance_from_equal(a[i]) for i in range(2)) / 2
        for a, b in pairwise(states)
    ]
    assert [block["kept"] for block in blocks] == pytest.approx(kept)
    assert all(block["share"] <= 1 and block["close"] <= block["v"] for block in blocks)
    model.encoder.layer[1].output.LayerNorm.weight.mul_(2)
    assert trained_models.promised_bounds(model, {"input_ids": IDS})[1]["v"] == pytest.approx(
        2 * blocks[1]["v"], rel=1e-5
    )
    assert not model.encoder.layer[0].output.LayerNorm._forward_pre_hooks


def test_cosine_around_the_mean_by_seed() -> None:
    sets = [[{"centred_cosine": x} for x in values] for values in ([0.1, 0.2], [0.0, 0.1], [0.05, 0.5])]
    assert token_distance.centred_range(sets) == pytest.approx([0.05, 0.4]), "the third set has the largest mean"


def test_correlations_are_taken_part_by_part() -> None:
    steps = [
        depth_theorem.BlockStep(1.0, v=float(n), kept=n % 20 + 0.1 * (n % 3), sigma=-n, cosine=0.0) for n in range(160)
    ]
    measured = depth_theorem.correlation_by_parts(steps, "v")
    assert len(measured.sample) == depth_theorem.PARTS
    assert measured.value == pytest.approx(sum(measured.sample) / depth_theorem.PARTS)
    assert min(measured.sample) > 0.9 > 0.3 > measured.numbers["all_draws"]


def test_verdicts(document: dict[str, Any]) -> None:
    verdicts = {x["id"]: x["verdict"] for x in document["claims"]}
    sure = ("a1", "a2", "b1", "b2", "b5", "b6", "b8", "c1", "c4", "c5", "c6")
    assert {key: verdicts[key] for key in sure} == dict.fromkeys(sure, "holds")
    assert {verdicts[key] for key in ("a3", "a4", "a5", "b3", "b7", "c7", "c8")} == {"fails"}
    claim = next(c for c in PAPER.claims if c.id == "c1")
    assert judge(claim, 1.001, 0.0) == "fails", "a violation would be told"


def test_what_is_the_papers() -> None:
    said = {claim.id: claim for claim in PAPER.claims if claim.by == "paper"}
    assert list(said) == ["c6", "e1", "f1", "f2", "f3"]
    assert [key for key, claim in said.items() if claim.bound == "ours"] == ["c6", "e1"]


@pytest.mark.usefixtures("without_rules")
def test_fusion_is_judged_seed_by_seed(document: dict[str, Any]) -> None:
    claims = {x["id"]: x for x in document["claims"]}
    assert [claims[f"f{n}"]["verdict"] for n in range(1, 10)] == [
        "holds", "undecided", "undecided", "holds", "fails", "undecided", "undecided", "holds", "fails",
    ], "at this size nothing of the paper fails"  # fmt: skip
    assert claims["f1"]["numbers"]["by_seed"] == pytest.approx([-0.1, -0.1], abs=1e-4)
    assert claims["f4"]["measured"] == pytest.approx(-0.1, abs=1e-4)
    assert claims["f7"]["measured"] == pytest.approx(1.0)
    without = reproduce(PAPER, Setting(), claim="f").verdicts
    assert {(v.verdict, bool(v.waits_for)) for v in without} == {("undecided", True)}


@pytest.mark.usefixtures("without_rules")
def test_lines_without_measures_decide_nothing(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs.jsonl")
    for number, arm in enumerate(depth_theorem.ARMS):
        fill(runs, arm, [3.0 - 0.1 * number, 3.0 - 0.10001 * number, 3.0])
    verdicts = reproduce(PAPER, Setting(runs=tmp_path / "runs.jsonl"), claim="f").verdicts
    by_id = {v.claim.id: (v.verdict, v.measured is None) for v in verdicts}
    assert by_id["f1"] == ("holds", False)
    assert by_id["f4"] == by_id["f7"] == ("undecided", True)


def test_the_page_is_made_from_the_document(document: dict[str, Any], tmp_path: Path) -> None:
    written = write_report(document, PAPER, tmp_path / "page.md", tmp_path)
    text = written[0].read_text()
    figures = ("lambda", "theorem", "stacks", "models", "fusion")
    assert {path.stem for path in written[1:]} == {f"shi2022-{name}" for name in figures}
    for path in written[1:]:
        ElementTree.parse(path)
    assert "Fusing all layers changes the report loss" in text
    assert "Left out: c (why)." in text
    assert "| 1 direction |" in text
    for letter in "abcdef":
        assert f"## {letter}. " in text


def test_the_page_of_some_claims_and_of_none(document: dict[str, Any], tmp_path: Path) -> None:
    some = {
        **document,
        "claims": [
            {**x, "measured": None, "waits_for": "runs"} if x["id"][0] in "ef" else x for x in document["claims"]
        ],
        "studies": {k: x for k, x in document["studies"].items() if k not in ("trained models", "fusion in training")},
    }
    written = write_report(some, PAPER, tmp_path / "some.md", tmp_path)
    assert {path.stem for path in written[1:]} == {f"shi2022-{name}" for name in ("lambda", "theorem", "stacks")}
    assert "f1: waits for runs" in written[0].read_text()
    none = {**document, "claims": [{**x, "measured": None} for x in document["claims"]], "studies": {}}
    text = write_report(none, PAPER, tmp_path / "none.md", tmp_path)[0].read_text()
    assert "## a." not in text
    assert "## What came out" not in text


@pytest.mark.parametrize("verdict", ["holds", "fails", "undecided"])
def test_sentences_follow_their_verdicts(document: dict[str, Any], tmp_path: Path, verdict: str) -> None:
    claims = [{**x, "verdict": verdict} for x in document["claims"]]
    text = write_report({**document, "claims": claims}, PAPER, tmp_path / "page.md", tmp_path)[0].read_text()
    sentence = {
        "holds": "- v is a gauge:",
        "fails": "- v misleads as a gauge:",
        "undecided": "- Whether v is a gauge of how close tokens come is undecided",
    }
    assert [words in text for words in sentence.values()] == [key == verdict for key in sentence]
