"""The recipe of a run: optimizers, dropout, sinusoidal positions, learning rates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from locater import LocaterError, attention_layers, observe
from locater_lab.engine.runs import train
from locater_lab.train import Plan, Shape, Transformer, load, run
from locater_lab.train.optimizer_and_learning_rate import OptimizerPair, optimizer_for, rate_at
from tests.lab.train.test_parts import corpus
from tests.lab.train.test_runs import Cut, cut_at, plan, weights

SMALL = Shape(layers=2, width=16, heads=2, kv_heads=2, hidden=24, length=12)


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_an_optimizer_learns_and_goes_on_exactly(tmp_path: Path, optimizer: str) -> None:
    """With dropout, whose random numbers go on too."""
    corpus(tmp_path)
    rate = 0.3 if optimizer == "sgd" else 1e-2
    options: dict[str, Any] = dict(optimizer=optimizer, rate=rate, steps=40, dropout=0.1, checkpoint=20, evaluate=0)
    whole = run(plan(tmp_path, **options, out=str(tmp_path / "whole")))
    with pytest.raises(Cut):
        run(plan(tmp_path, **options, out=str(tmp_path / "cut")), cut_at(25))
    assert weights(run(plan(tmp_path, **options, out=str(tmp_path / "cut")))) == weights(whole)
    assert whole.report_loss < math.log(256) - 1


def test_muon_has_the_matrices_inside_blocks() -> None:
    model = Transformer(SMALL)
    pair = optimizer_for(Plan(optimizer="muon"), dict(model.named_parameters()), torch.device("cpu"))
    assert isinstance(pair, OptimizerPair)
    own = {id(p) for group in pair.pair[0].param_groups for p in group["params"]}
    expected = [p for block in model.model.layers for p in block.parameters() if p.ndim == 2]
    assert own == {id(p) for p in expected}
    every = [p for group in pair.param_groups for p in group["params"]]
    assert len(every) == len({id(p) for p in every}) == len(list(model.parameters()))
    for group in pair.param_groups:
        group["lr"] = 0.5
    assert all(group["lr"] == 0.5 for optimizer in pair.pair for group in optimizer.param_groups)


def test_sgd_is_that_of_its_definition() -> None:
    """v = 0.9 v + (g + decay w), w = w - rate v, computed by hand over two steps."""
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    optimizer = optimizer_for(Plan(optimizer="sgd", rate=0.1, decay=0.5), {"w": weight}, torch.device("cpu"))
    w, v = torch.tensor([[1.0, -2.0]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    for g in ([[0.3, 0.1]], [[-0.2, 0.4]]):
        weight.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        v = 0.9 * v + (weight.grad + 0.5 * w)
        w = w - 0.1 * v
    assert torch.allclose(weight.detach(), w, atol=1e-12)


def test_sinusoidal_positions_are_those_of_the_formula() -> None:
    model = Transformer(Shape(**{**vars(SMALL), "positions": "sinusoidal"}), scale=0.3)
    ids = torch.randint(256, (2, 9))
    stream, turn = model.model.embed(ids)
    assert turn is None
    for token in range(9):
        for channel in range(16):
            pair = channel % 8
            wave = math.sin if channel < 8 else math.cos
            added = wave(token / 10_000 ** (2 * pair / 16))
            expected = model.model.embed_tokens.weight[ids[:, token], channel] * 4 + added
            assert torch.allclose(stream[:, token, channel], expected, atol=1e-5)


def test_a_sinusoidal_model_is_saved_read_and_observed(tmp_path: Path) -> None:
    result = run(plan(tmp_path, positions="sinusoidal", norm="post", steps=2))
    model = load(result.model)
    layer = attention_layers(model)[0]
    assert layer.rotary is None
    x = model.model.embed(torch.arange(10)[None])[0]
    q, k, _ = model.model.layers[0].self_attn.operands(x, None)
    expected = (q @ k.mT * layer.scale).masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf).softmax(-1)
    assert torch.allclose(layer.attention(x), expected, atol=1e-6)
    with observe(model) as seen, torch.no_grad():
        model(torch.arange(10)[None])
    entropy = -torch.special.xlogy(expected, expected).sum(-1).mean((0, 2))
    assert [row.entropy for row in seen.rows if row.layer == 0] == pytest.approx(entropy.tolist(), abs=1e-4)


def test_dropout_keeps_the_mean_and_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL, scale=0.3, dropout=0.4)
    ids = torch.randint(256, (1, 12))
    exact = Transformer(SMALL)
    exact.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(ids), exact.eval()(ids))
    model.train()
    draws = torch.stack([model.model.embed(ids)[0] for _ in range(400)])
    stream = exact.model.embed(ids)[0]
    assert abs(float((draws == 0).float().mean()) - 0.4) < 0.01
    assert torch.allclose(draws.mean(0), stream, atol=0.3)
    state = torch.get_rng_state()
    exact.train()(ids)  # without dropout no random number is drawn
    assert torch.equal(torch.get_rng_state(), state)


def test_rates_fall_as_the_schedule_says() -> None:
    plan = Plan(steps=1000, warmup=200, rate=5e-4, schedule="inverse_sqrt")
    assert rate_at(plan, 99) == pytest.approx(5e-4 * 100 / 200)
    assert max(rate_at(plan, step) for step in range(1000)) == rate_at(plan, 199) == 5e-4
    assert rate_at(plan, 799) == pytest.approx(5e-4 / 2)
    assert rate_at(Plan(steps=100, warmup=20), 19) == rate_at(Plan(steps=100, warmup=0.2), 19) == 3e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, "these are shares, below 1"),
        ({"beta2": 1.0}, "these are shares, below 1"),
        ({"warmup": 10.5}, "above a whole number"),
        ({"positions": "sinusoidal", "width": 15, "heads": 3}, "give an even width"),
        ({"optimizer": "adam"}, "choose adamw or muon or sgd"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LocaterError, match=message):
        Plan(**options)


def test_a_line_of_a_run_has_the_curve_of_its_entropy(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    options = plan(tmp_path, corpus=(path.name,), steps=8, observe=4, checkpoint=0, evaluate=4).to_dict()
    line = train(options, str(tmp_path))
    assert [step for step, _ in line["entropies"]] == [step for step, _ in line["sinks"]] == [1, 5]
    assert all(0 < value < math.log(16) for _, value in line["entropies"])
    assert line["entropies"][-1][1] == pytest.approx(line["entropy"], rel=0.2)  # nearly that of the report split
