"""Logits of a vocabulary that is no multiple of what matrix units like: those of the plain product."""

from __future__ import annotations

import pytest
import torch

from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer, vocabulary_logits


@pytest.mark.parametrize("words", [1, 63, 64, 65, 131])
def test_logits_and_gradients_are_those_of_the_plain_product(words: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(words, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(words, (15,))
    results = []
    for logits in (x @ weight.T, vocabulary_logits(x, weight)):
        assert logits.shape == (3, 5, words)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
def test_a_model_with_an_odd_vocabulary_has_the_same_loss_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = Transformer(Shape(width=32, layers=1, hidden=48, vocabulary=257)).double()
    ids = torch.randint(257, (2, 9))
    expected = model(ids[:, :-1], ids[:, 1:])
    on_gpu = model.cuda()(ids[:, :-1].cuda(), ids[:, 1:].cuda())
    torch.testing.assert_close(on_gpu.cpu(), expected, rtol=1e-10, atol=1e-10)
