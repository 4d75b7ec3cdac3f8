"""A forward pass on tape, walked and computed again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locater.tape import Tape, replay
from locater.tape.walking import linear_map, upstream


class Writing(nn.Module):
    """Writes into a slice of a slice after it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        before = y * 2
        y[:, :3][:, 1:].copy_(before[:, 4:] + 1)
        return y + before


def _taped(module: nn.Module, x: Tensor) -> tuple[Tape, Tensor]:
    tape = Tape(module, {"x": x})
    with torch.no_grad(), tape:
        out = module(x=x)
    return tape, out


def test_replay_gives_what_the_module_gives() -> None:
    torch.manual_seed(0)
    module, x, other = Writing(), torch.randn(3, 4), torch.randn(3, 4)
    tape, out = _taped(module, x)
    last = tape.nodes[-1]
    assert torch.equal(last.value, out)
    with torch.no_grad():
        assert torch.allclose(replay(last, {tape.node(x): other}), module(other))
        first = next(node for node in tape.nodes if linear_map(tape, node))
        assert torch.allclose(first.value, module.map(x))  # from before the write
        assert torch.allclose(replay(last, {first: module.map(other)}), module(other))


def test_upstream_ends_at_the_nearest_map() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    tape = Tape(module, {"input": x})
    with torch.no_grad(), tape:
        module(x)
    reached = upstream(tape, tape.nodes[-1], lambda node: False)
    assert [tape.parameter(part.constant) for part in reached.maps] == ["2.weight"]
    assert not reached.loose


def test_attention_of_torch_is_looked_into() -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 8)
    before = torch.nn.functional.has_torch_function
    tape = Tape(module, {"query": x})
    with torch.no_grad(), tape:
        module(x, x, x, need_weights=False)
    assert any(node.name == "scaled_dot_product_attention" for node in tape.nodes)
    assert torch.nn.functional.has_torch_function is before
    assert not module._forward_hooks
