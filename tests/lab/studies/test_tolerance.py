"""Heads that can do with less: costs and estimates by hand, rules on made lines, and the page is that of the kept lines."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional

import locater
from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater_lab.engine.reproduction import Setting, round_numbers
from locater_lab.studies import tolerance
from locater_lab.studies.tolerance import judging, measuring
from tests import ROOT

DEMO = Path(str(locater.__file__)).parent / "demo"
IDS = torch.randint(5, 1000, (1, 24), generator=torch.Generator().manual_seed(0))
KEPT = ROOT / "docs/results/tolerance.jsonl"
SUBJECT = measuring.Subject("", False, 24, 24)


@cache
def demo() -> Any:
    return load_model(str(DEMO)).double()


def loss_of(logits: Tensor) -> float:
    """Of the last half of the sequence."""
    return float(functional.cross_entropy(logits[0, -13:-1].float(), IDS[0, -12:]))


@pytest.mark.parametrize("change", measuring.changes_of_a_head(24))
def test_costs_are_those_of_the_whole_model(change: str) -> None:
    how, heads = measuring.changes_of_a_head(24)[change], [(0, 1), (3, 2), (3, 3)]
    with measuring.judged(demo(), SUBJECT, {"input_ids": IDS}) as judged:
        got = [*judged.one_by_one(heads, how), *judged.change([measuring.together(heads)], how)]
        assert judged.loss is not None
    options = {"window": how.window, "sinks": how.sinks, "bits": how.bits}
    with torch.no_grad():
        plain = loss_of(demo()(IDS).logits)
        for some, cost in zip(([heads[0]], [heads[1]], [heads[2]], heads), got, strict=True):
            with locater.without(demo(), some, how.mode, **options):
                assert cost == pytest.approx(loss_of(demo()(IDS).logits) - plain, abs=1e-5)
    assert len({round(cost, 9) for cost in got}) == 4


@cache
def estimated() -> dict[str, Tensor]:
    return measuring.estimates(demo(), SUBJECT, {"input_ids": IDS})


def test_estimates_of_a_window_by_hand() -> None:
    """From the map of the head: its weights cut and made to sum to 1, the difference times values, and the slope of the
    loss along it by finite differences.
    """
    layer, head, at = 3, 2, 3 * 4 + 2
    weights = locater.attention_pattern(demo(), IDS, layers=[layer], heads=[head])[layer, head][0].double()
    near = (torch.arange(24)[:, None] - torch.arange(24)).abs() < 6
    seen = near | (torch.arange(24) < measuring.SINKS)
    cut = weights * seen
    change = cut / cut.sum(-1, keepdim=True) - weights
    assert float(estimated()["outside"][at]) == pytest.approx(float((weights * ~seen).sum(-1).mean()), abs=1e-5)
    attention, inputs = demo().model.layers[layer].self_attn, []
    hook = attention.v_proj.register_forward_hook(lambda _, given, out: inputs.append(out))
    demo()(IDS)
    hook.remove()
    delta = change @ inputs[0][0, :, (head // 2) * 32 :][:, :32]
    out = attention.o_proj.weight[:, head * 32 :][:, :32]
    written = (delta @ out.T).norm(dim=-1).mean()
    assert float(estimated()["written change: window"][at]) == pytest.approx(float(written), rel=1e-4)

    def loss(step: float) -> float:
        def add(_: Any, given: Any) -> Any:
            moved = given[0].clone()
            moved[0, :, head * 32 : head * 32 + 32] += step * delta
            return (moved,)

        hook = attention.o_proj.register_forward_pre_hook(add)
        with torch.no_grad():
            logits = demo()(IDS).logits
        hook.remove()
        return float(functional.cross_entropy(logits[0, -13:-1], IDS[0, -12:]))

    slope = (loss(0.05) - loss(-0.05)) / 0.1
    assert float(estimated()["gradient x change: window"][at]) == pytest.approx(slope, rel=0.02, abs=1e-6)


def test_the_estimate_of_an_encoder_is_its_distance_to_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig, BertModel

    monkeypatch.setattr(measuring, "DIRECTIONS", 600)
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=1000)
    model = BertModel(BertConfig(**sizes), add_pooling_layer=False).double().eval()
    with torch.no_grad():
        for layer in attention_layers(model):  # changes so small that higher orders are nothing
            layer.value.weight().mul_(0.1)  # type: ignore[union-attr]
    found = measuring.estimates(model, SUBJECT, {"input_ids": IDS})["gradient x change: zero"]
    with measuring.judged(model, SUBJECT, {"input_ids": IDS}) as judged:
        costs = judged.one_by_one([(0, 0), (0, 1), (1, 0), (1, 1)], measuring.Removal("zero"))
    assert found.tolist() == pytest.approx(costs, rel=0.15)
    assert min(costs) > 0


# ---- rules and claims, on made lines ----


def made(model: str, costs: list[float], columns: dict[str, list[float]], sequences: int = 2) -> list[Any]:
    heads = [[0, n] for n in range(len(costs))]
    lines: list[Any] = [{"model": model, "part": "predictors", "heads": heads, "columns": columns, "commit": "x"}]
    for change in judging.CHANGES:
        for n in range(sequences):
            own = [cost + 0.1 * (-1) ** n for cost in costs]
            of = {"part": "alone", "sequence": n, "change": change, "heads": heads, "costs": own, "loss": 1.0}
            lines.append({"model": model, "commit": "x", **of})
    return lines


def columns_of(costs: list[float], noise: list[float]) -> dict[str, list[float]]:
    every = [p for kind in measuring.CLASSES.values() for p in kind]
    names = [f"{p}: {change}" for p in judging.BY_CHANGE for change in judging.CHANGES]
    columns = dict.fromkeys([*every, *names], noise)
    return {**columns, "sink": [-cost for cost in costs]}


COSTS, NOISE = [float(x) for x in range(20)], [float(7 * x % 20) for x in range(20)]


def made_rules() -> list[Any]:
    makers = [name for name, subject in measuring.SUBJECTS.items() if not subject.judges]
    return [line for name in makers for line in made(name, COSTS, columns_of(COSTS, NOISE))]


def test_a_rule_is_what_orders_the_heads_of_the_models_that_make_rules() -> None:
    lines = made_rules()
    rules = judging.rules_of(lines)
    assert set(rules["all"].values()) == {("sink", -1)} == set(rules["one pass"].values())
    assert abs(stats.spearmanr(NOISE, COSTS).statistic) < 0.5
    lines += made("Gemma-3-270M", COSTS, columns_of(COSTS, NOISE))
    assert judging.list_of_rule(lines, "Gemma-3-270M", ("sink", -1), "zero", 3) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(("turned", "expected"), [(False, 1.0), (True, -1.0)])
def test_a_judge_has_no_say_in_the_rule(turned: bool, expected: float) -> None:
    """Where heads of the judge cost what the rule says, it holds; where it is the other way round, it fails."""
    costs = COSTS[::-1] if turned else COSTS
    lines = made_rules() + made("AntiBERTy", costs, columns_of(COSTS, NOISE))
    measured = judging.results_of(lines).measured
    at = 5 * judging.JUDGES.index("AntiBERTy") + 1
    found = measured[f"b{at}"]
    assert found is not None
    assert found.value == pytest.approx(expected)
    assert found.p is not None
    assert found.p < 0.001
    by_hand = stats.spearmanr(NOISE, costs).statistic * judging.rules_of(lines)["gradient"]["zero"][1]
    assert measured[f"c{at}"].value == pytest.approx(by_hand)  # type: ignore[union-attr]


def test_one_sequence_decides_nothing() -> None:
    lines = made_rules() + made("AntiBERTy", COSTS, columns_of(COSTS, NOISE), sequences=1)
    assert not judging.results_of(lines).measured


def test_lists_and_all_heads_at_once() -> None:
    lines = made_rules()
    for n in range(4):
        costs = {
            "all": dict.fromkeys(measuring.changes_of_all(1024), 0.001 * n),
            "rule": dict.fromkeys(measuring.LISTS, 0.1),
            "random": dict.fromkeys(measuring.LISTS, 0.5 + 0.01 * n),
        }
        lines.append({"model": "Gemma-3-270M", "part": "together", "sequence": n, "costs": costs, "commit": "x"})
    measured = judging.results_of(lines).measured
    first = 3 * judging.WITH_LOSS.index("Gemma-3-270M") + 1
    assert measured[f"d{first}"].value == pytest.approx(0.1 - 0.5 * 0.515)  # type: ignore[union-attr]
    assert measured[f"e{first}"].value == pytest.approx(0.0015)  # type: ignore[union-attr]
    claims = {claim.id: claim for claim in judging.CLAIMS}
    assert "Gemma" in claims[f"d{first}"].says
    assert len(claims) == len(judging.CLAIMS) == 67


# ---- measuring, and what is kept ----


def test_a_run_that_was_cut_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SEQUENCES", 1)
    small = replace(measuring.SUBJECTS["demo"], length=32, long=32, drawn=1)
    for module in (measuring, tolerance, judging):
        monkeypatch.setattr(module, "SUBJECTS", {"demo": small})
    text = "Return the value of the attribute. If it does not exist, the default is returned. " * 60
    setting, path = Setting(runs=tmp_path / "lines.jsonl", jobs=1), tmp_path / "lines.jsonl"
    vars(setting)["text"] = text
    tolerance.measure(setting)
    whole = path.read_text().splitlines()
    assert [json.loads(line)["part"] for line in whole] == ["predictors", "second order", *["alone"] * 7]
    path.write_text("\n".join(whole[:4]) + "\n")
    tolerance.measure(setting)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("change") for line in again] == [json.loads(line).get("change") for line in whole]
    for line, other in zip(again, map(json.loads, whole), strict=True):
        np.testing.assert_allclose(line.get("costs", 0.0), other.get("costs", 0.0), atol=1e-5)


def test_the_second_order_is_that_of_the_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that write little: the divergence of the prediction without them is known to second order."""
    monkeypatch.setattr(measuring, "DRAWS", 400)
    model = load_model(str(DEMO)).double()
    with torch.no_grad():
        for layer in attention_layers(model):
            layer.out.weight().mul_(0.1)  # type: ignore[union-attr]
        plain = model(IDS).logits[0, -13:-1].log_softmax(-1)
    found = measuring.second_order(model, SUBJECT, [{"input_ids": IDS}])["second order: zero"]
    with torch.no_grad():
        for layer, head in ((1, 0), (3, 2), (5, 3)):
            with locater.without(model, [(layer, head)]):
                changed = model(IDS).logits[0, -13:-1].log_softmax(-1)
            divergence = (plain.exp() * (plain - changed)).sum(-1).mean()
            assert found[4 * layer + head] == pytest.approx(float(divergence), rel=0.25)


def test_the_kept_figures_are_those_of_the_lines() -> None:
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()]
    assert all(line["commit"] and line["text"] for line in lines)
    kept = json.loads((ROOT / "docs" / tolerance.PAPER.document_file).read_text())
    (study,) = kept["studies"].values()
    assert study["tables"] == round_numbers(judging.results_of(lines).tables, 5), "locater reproduce tolerance"
    own = [x["costs"] for x in lines if (x["model"], x.get("change")) == ("all-MiniLM-L6-v2", "zero")]
    columns = next(x["columns"] for x in lines if (x["model"], x["part"]) == ("all-MiniLM-L6-v2", "predictors"))
    by_hand = stats.spearmanr(columns["depth"], np.mean(own, axis=0)).statistic
    assert study["tables"]["correlations"]["all-MiniLM-L6-v2"]["zero"]["depth"][0] == pytest.approx(by_hand, abs=1e-3)
