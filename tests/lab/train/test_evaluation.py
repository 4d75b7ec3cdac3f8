"""The loss of a split: the sums over windows are those of each window by itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from locater_lab.models.transformer import Transformer
from locater_lab.train.data import make_numbers
from locater_lab.train.loop import Evaluation
from locater_lab.train.optimizer_and_learning_rate import shape_of
from locater_lab.train.plan import Plan

PLAN = Plan(task="sort", vocabulary=16, layers=1, width=16, heads=2, length=8, batch=64)


def evaluation() -> Evaluation:
    data = make_numbers(PLAN, torch.device("cpu"))
    torch.manual_seed(0)
    return Evaluation(Transformer(shape_of(PLAN, data)), data, torch.device("cpu"), half=False)


@pytest.mark.parametrize("most", [None, 100])
def test_loss_and_accuracy_are_those_of_all_targets(most: int | None) -> None:
    one = evaluation()
    loss, accuracy = one.loss_and_accuracy("select", most)
    windows = list(one.data.windows("select", most))
    inputs, targets = (torch.cat(part) for part in zip(*windows, strict=True))
    with torch.no_grad():
        logits = one.model.double().eval()(inputs).flatten(0, -2)
    assert len(inputs) == (most or 2048)
    assert loss == pytest.approx(float(cross_entropy(logits, targets.flatten())), rel=1e-6)
    assert accuracy == int((logits.argmax(-1) == targets.flatten()).sum()) / targets.numel()


def test_targets_that_do_not_count_are_left_out() -> None:
    one = evaluation()
    windows = [(inputs, targets.masked_fill(inputs < 8, -100)) for inputs, targets in one.data.windows("select", 128)]
    one.data.windows = lambda split, most=None: iter(windows)  # type: ignore[method-assign]
    loss, accuracy = one.loss_and_accuracy("select")
    with torch.no_grad():
        logits = torch.cat([one.model.eval()(inputs).flatten(0, -2) for inputs, _ in windows])
    targets = torch.cat([targets.flatten() for _, targets in windows])
    counted = targets >= 0
    assert loss == pytest.approx(float(cross_entropy(logits, targets)), rel=1e-6)
    assert accuracy == int((logits.argmax(-1) == targets)[counted].sum()) / int(counted.sum())


def test_a_model_that_denoises_has_a_squared_error_and_no_accuracy() -> None:
    one = evaluation()

    class Denoiser(torch.nn.Module):
        shape = SimpleNamespace(denoises=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    torch.manual_seed(0)
    windows = [(torch.randn(4, 5, 3), torch.randn(4, 5, 3)) for _ in range(3)]
    one.data.windows = lambda split, most=None: iter(windows)  # type: ignore[method-assign]
    loss, accuracy = replace(one, model=Denoiser()).loss_and_accuracy("select")
    inputs, targets = (torch.cat(part) for part in zip(*windows, strict=True))
    assert loss == pytest.approx(float(mse_loss(2 * inputs, targets)), rel=1e-6)
    assert accuracy is None
