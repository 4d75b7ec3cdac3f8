"""Large random parameters in little memory."""

from __future__ import annotations

import torch
from torch import nn

from locater.discovery.redrawn_copy import LARGE, ThinProducts, is_thin, light_copy, redraw


def large() -> nn.Module:
    return nn.Sequential(nn.Embedding(3000, 200), nn.Linear(200, 4000), nn.Linear(4000, 7))


def test_a_light_copy_takes_little_memory_and_computes_the_same_as_full_matrices() -> None:
    model = light_copy(large(), "model", torch.float64)
    redraw(model, 0)
    stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(stored.values()) < 0.25 * sum(8 * p.numel() for p in model.parameters())
    table, up, down = (part.weight for part in model)  # type: ignore[union-attr]
    assert is_thin(table)
    assert is_thin(up)
    assert down.numel() < LARGE  # type: ignore[operator]
    assert down.is_contiguous()  # type: ignore[operator]
    ids = torch.tensor([[0, 2999, 5]])
    with ThinProducts():
        ours = model(ids)
    full = nn.functional.linear(table.clone()[ids], up.contiguous(), model[1].bias)  # type: ignore[operator,index]
    assert torch.allclose(ours, nn.functional.linear(full, down, model[2].bias), rtol=1e-12)  # type: ignore[index]


def test_rows_of_thin_matrices_are_all_different_and_drawn_anew() -> None:
    model = nn.Sequential(nn.Linear(300, 1000), nn.Linear(300, 1000)).double().requires_grad_(False)
    redraw(model, 0)
    first = torch.cat([part.weight for part in model])  # type: ignore[misc]
    assert len(first.unique(dim=0)) == len(first)
    assert abs(float(first.std()) * 300**0.5 - 1) < 0.05
    again = first.clone()
    redraw(model, 1)
    assert torch.equal(first, again)
    assert not (torch.cat([part.weight for part in model]) == first).any()  # type: ignore[misc]
