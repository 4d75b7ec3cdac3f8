"""Multiformer: kinds of heads, layouts, relevance, trained heads left out, and training judged by runs that were made
up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from locater.errors import LocaterError
from locater_lab.engine.mechanism_runs import SOFTMAX_MASKED
from locater_lab.engine.pages import page
from locater_lab.engine.runs import Arm, Runs
from locater_lab.papers import Setting, judge, reproduce
from locater_lab.papers.sant2022 import PAPER, kinds, relevance
from tests.lab.made_runs import fill, reproduce_without_rules

IDS = torch.arange(3, 15).reshape(2, 6)
EVEN, UNEVEN = [[0.25] * 4] * 2, [[0.7, 0.1, 0.1, 0.1]] * 2


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def fill_uneven(runs: Runs, arm: Arm, loss: float, even: float) -> None:
    """An arm whose heads but one have this relevance; seeds differ a little."""
    fill(runs, arm, [loss + 0.1 * seed + 0.001 * (seed - 1) ** 2 * loss for seed in range(3)])
    for seed in range(3):
        row = arm.row(arm.rates[0], seed)
        x = even + 0.001 * seed * loss
        line = runs.of(row)
        assert line is not None
        runs.add(row, {**line, "measures": {"relevance": [[1 - 3 * x, x, x, x]] * 2}})


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One run at small sizes: a tiny model stands for trained ones, and runs are made up."""
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    runs = Runs(path)
    arms = (relevance.LOCAL_COMPRESSED_MIX, relevance.FULL_MIX, relevance.COMPRESSED, SOFTMAX_MASKED, relevance.LOCAL)
    for step, arm in enumerate(arms):
        fill_uneven(runs, arm, 3.0 + 0.1 * step, even=0.25 - 0.05 * step)

    def one(name: str, folder: object, setting: Setting) -> dict[str, Any]:
        if name == "other":
            raise LocaterError("not known")
        return relevance.entry_of_halves(name, tiny_llama(), [{"input_ids": IDS}, {"input_ids": IDS + 1}])

    with pytest.MonkeyPatch.context() as patch:
        for module in (kinds, relevance):
            patch.setattr(module, "DRAWS", {True: 6})
        patch.setattr(relevance, "model_folders", lambda folder: {"tiny": None, "other": None})
        patch.setattr(relevance, "model_entry", one)
        yield reproduce_without_rules(PAPER, Setting(quick=True, runs=path)).to_dict()


def test_shortened_lengths_by_the_formula() -> None:
    for T in range(1, 60):
        for taps, stride in ((5, 2), (7, 3), (1, 1), (3, 1)):
            assert (
                kinds.shortened_length(T, taps, stride)
                == max(0, math.ceil((T + 2 * (stride // 2) - taps) / stride)) + 1
            )


def test_scores_of_a_local_head_by_its_mask() -> None:
    for T, window in ((5, 2), (30, 8), (10, 64), (7, 1)):
        at = torch.arange(T)
        assert kinds.head_scores("l", T, window=window) == int(((at[:, None] - at).abs() <= window // 2).sum())


def test_layouts_have_the_heads_of_the_paper() -> None:
    count = {name: "".join(g.kinds * g.layers for g in groups) for name, groups in kinds.LAYOUTS.items()}
    assert {name: [x.count(k) for k in "flc"] for name, x in count.items()} == {
        "lc": [0, 24, 24], "v1": [0, 18, 30], "v2": [0, 26, 22], "full mix": [8, 12, 28],
    }  # fmt: skip
    assert kinds.layout_scores(kinds.SINGLE_KINDS["full"], 10) == 4800


def test_a_published_window_by_hand() -> None:
    """Blocks of 21: the first of a block sees 21 back and 41 ahead."""
    seen = kinds.block_window(210)[63].nonzero().flatten()
    assert (63 - seen[0].item(), seen[-1].item() - 63, len(seen)) == (21, 41, 63)
    assert kinds.window_reach()["least"] == 21


def test_a_local_head_sees_its_own_window() -> None:
    outside, inside = kinds.local_change(5)
    assert outside == 0
    assert inside > 0.01


def test_relevance_of_a_cancelling_pair() -> None:
    heads = relevance.cancelling_heads()
    assert heads["relevance"] == pytest.approx(0.9, abs=0.02)
    assert heads["change"] < 1e-12


def test_leaving_a_head_out_is_a_zero_in_the_output_projection() -> None:
    model = tiny_llama()
    plain = model(IDS).logits
    (projection, heads), *_ = relevance.output_projections(model)
    with relevance.without_head(projection, 2, heads):
        dropped = model(IDS).logits
    torch.testing.assert_close(model(IDS).logits, plain)
    projection.weight[:, 8:12] = 0
    torch.testing.assert_close(model(IDS).logits, dropped)
    assert not torch.allclose(dropped, plain, atol=1e-6)


def test_relevance_of_a_model_is_that_of_its_heads() -> None:
    model = tiny_llama()
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model(IDS)
    hook.remove()
    weight = model.model.layers[1].self_attn.o_proj.weight
    parts = torch.stack(
        [(seen[0][..., 4 * h : 4 * h + 4] @ weight[:, 4 * h : 4 * h + 4].mT).abs().sum((1, 2)) for h in range(4)], 1
    )
    shares = parts / parts.sum(1, keepdim=True)
    torch.testing.assert_close(
        relevance.layer_relevances(model, {"input_ids": IDS})[1], shares.mean(0)
    )  # the median of two


def test_a_model_with_other_names_is_left_out() -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(LocaterError, match="GPT2Model: output projections are not called"):
        relevance.output_projections(model)


def test_verdicts(document: dict[str, Any]) -> None:
    claims = {x["id"]: x for x in document["claims"]}
    exact = ("a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4", "c1", "c2", "c4")
    assert {key: claims[key]["verdict"] for key in exact} == dict.fromkeys(exact, "holds")
    assert {claims[key]["verdict"] for key in ("a5", "a6", "b5", "c3", "c5", "c6")} == {"fails"}
    assert judge(next(c for c in PAPER.claims if c.id == "a2"), 1e-9, 0.0) == "fails", (
        "a key outside that is seen would be told"
    )


def test_the_papers_claims_are_what_its_abstract_says(document: dict[str, Any]) -> None:
    papers = {x["id"]: x for x in document["claims"] if x["by"] == "paper"}
    assert papers.keys() == {"f1", "f2"}
    assert {x["where"] for x in papers.values()} == {"abstract"}
    assert all(papers[name]["waits_for"].startswith("speech translation") for name in ("f1", "f2"))
    assert "--claim f1" not in page(document, PAPER)[0], "no command decides it"


@pytest.mark.usefixtures("without_rules")
def test_training_is_judged_seed_by_seed(document: dict[str, Any]) -> None:
    claims = {x["id"]: x for x in document["claims"]}
    assert {claims[f"e{n}"]["verdict"] for n in range(1, 5)} == {"holds"}
    assert claims["e5"]["verdict"] == "undecided", (
        "correlations of 1 with every seed: signs of few seeds decide nothing"
    )
    assert claims["e1"]["measured"] == pytest.approx(-0.4, abs=0.01)
    assert claims["e3"]["numbers"]["best"] == relevance.LOCAL_COMPRESSED_MIX.name
    assert claims["e5"]["measured"] == pytest.approx(1.0)
    without = reproduce(PAPER, Setting(), claim="e").verdicts
    assert {(v.verdict, bool(v.waits_for)) for v in without} == {("undecided", True)}


def test_the_better_mix_is_told_by_the_seeds_that_both_have() -> None:
    runs = Runs()
    fill(runs, relevance.FULL_MIX, [3.1, 3.1, 1.0])
    assert relevance.better_mix(runs) is None
    fill(runs, relevance.LOCAL_COMPRESSED_MIX, [3.0, 3.0])
    assert relevance.better_mix(runs) is relevance.LOCAL_COMPRESSED_MIX


def test_even_heads_that_do_worse_refute_the_claim() -> None:
    runs = Runs()
    for step, arm in enumerate(relevance.ARMS):
        fill(runs, arm, [3.0 + step] * 3, {"relevance": [[1 - 3 * x, x, x, x] for x in (0.05 * step,)]})
    correlation = relevance.evenness_correlation(runs)
    assert correlation is not None
    assert correlation.value == pytest.approx(-1.0)
    assert (
        relevance.unevenness({"measures": {"relevance": EVEN}})
        == 0
        < relevance.unevenness({"measures": {"relevance": UNEVEN}})
    )
    assert math.isnan(relevance.unevenness({"measures": None}))
    fill(runs, relevance.LOCAL_COMPRESSED_MIX, [3.0] * 3)
    assert relevance.evenness_correlation(runs) is None, "one arm was not measured"


@pytest.mark.usefixtures("without_rules")
def test_the_page_is_made_from_the_document(document: dict[str, Any]) -> None:
    copy = json.loads(json.dumps(document, allow_nan=False))
    text, figures = page(copy, PAPER)
    assert set(figures) == {"layouts", "relevance", "training"}
    assert all(f"(figure:{name})" in text for name in figures)
    assert "Left out: other (not known)." in text
    assert "the rank correlation of unevenness with loss is +1.00" in text
    assert "Does a mix do better than full attention? Yes, as seen at this size" in text
    assert "Does even relevance go with a lower loss? Undecided" in text


def test_the_page_shows_what_there_is(document: dict[str, Any]) -> None:
    titles = {study.title for study in PAPER.studies if study.claims[0].id[0] in "de"}
    some = {
        **document,
        "claims": [x if x["id"][0] not in "de" else {**x, "measured": None} for x in document["claims"]],
        "studies": {title: study for title, study in document["studies"].items() if title not in titles},
    }
    text, figures = page(some, PAPER)
    assert set(figures) == {"layouts"}
    assert "## d." not in text
    nothing = {**document, "studies": {}, "claims": [{**x, "measured": None} for x in document["claims"]]}
    text, figures = page(nothing, PAPER)
    assert not figures
    assert "The paper's own scores, BLEU in speech translation, are not measured here." in text
