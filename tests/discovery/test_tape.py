"""A forward pass on tape, walked and computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from locater.discovery.tape import Tape, replay
from locater.discovery.tape.linear_maps import linear_map, upstream, with_bias
from locater.discovery.verified_search import discover


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


class WritingIntoForms(nn.Module):
    """Writes into forms of a tensor that share its memory, and into a copy of it, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        y.unflatten(-1, (2, 3)).mul_(3.0)
        y.swapaxes(0, 1).add_(1.0)
        y.mT.reshape(-1).mul_(5.0)  # no form of it is flat: a copy
        return y + 0


def test_a_write_into_a_form_of_a_tensor_is_one_into_the_tensor() -> None:
    torch.manual_seed(0)
    module, x, other = WritingIntoForms(), torch.randn(3, 4), torch.randn(3, 4)
    tape, out = _taped(module, x)
    last = tape.nodes[-1]
    assert torch.equal(last.value, out)
    with torch.no_grad():
        first = next(node for node in tape.nodes if linear_map(tape, node))
        assert torch.allclose(first.value, module.map(x))  # from before the writes
        assert torch.allclose(replay(last, {first: module.map(other)}), module(other))


@pytest.mark.parametrize("how", ["x @ w.mT + b", "b + x @ w.mT", "(x @ w.mT).view(-1, 6) + b", "(x @ w.mT).add_(b)"])
def test_a_bias_that_is_added_after_the_product_is_one_of_the_map(how: str) -> None:
    module = nn.Linear(4, 6)
    module.forward = lambda x: eval(how, {"x": x, "w": module.weight, "b": module.bias})  # type: ignore[method-assign]
    tape, _ = _taped(module, torch.randn(3, 4))
    linear = linear_map(tape, tape.nodes[-1])
    assert linear is not None
    assert linear.bias is not None
    assert (tape.parameter(linear.constant), tape.parameter(linear.bias)) == ("weight", "bias")
    product = next(node for node in tape.nodes if "matmul" in node.name)
    bare = linear_map(tape, product)
    assert bare is not None
    assert bare.bias is None
    whole = with_bias(tape, bare)
    assert (whole.node, whole.bias) == (linear.node, linear.bias)


def test_what_is_added_and_is_no_bias_is_left_apart() -> None:
    """A vector for each row, and a residual stream."""
    for more in (torch.ones(3, 6), torch.ones(6, requires_grad=True).repeat(3, 1)):
        module = nn.Linear(4, 6)
        module.forward = lambda x, module=module, more=more: x @ module.weight.mT + more  # type: ignore[method-assign]
        tape, _ = _taped(module, torch.randn(3, 4))
        assert linear_map(tape, tape.nodes[-1]) is None


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


class ByAxis(nn.Module):
    """Attention with the names that numpy has for `dim` and `keepdim`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (3, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        logits = (q[..., None, :] * k[..., None, :, :]).sum(axis=-1, keepdims=False)
        weights = torch.softmax(logits, axis=-1)
        mixed = torch.stack([weights[:, head] @ v[:, head] for head in range(3)], axis=1)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Casts(nn.Module):
    """Attention behind steps that return their own argument: a cast to the dtype that a tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        x = x.to(x.dtype) / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        q, k, v = (m(x).unflatten(-1, (2, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        weights = (q @ k.mT / 8**0.5).to(q.dtype).exp().to(q.dtype)
        return self.o((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


def test_what_returns_its_own_argument_is_passed_by() -> None:
    """As ImageGPT's norm, whose search did not end."""
    torch.manual_seed(0)
    found = discover(Casts(), example={"x": torch.randn(2, 7, 16)})
    assert [(layer.heads, layer.unknown_output) for layer in found.layers] == [(2, None)]


def test_axes_by_the_names_of_numpy() -> None:
    torch.manual_seed(0)
    found = discover(ByAxis().eval(), {"x": torch.randn(2, 5, 12)})
    assert not found.gaps
    assert [(layout.heads, layout.out is not None) for layout in found.layouts] == [(3, True)]
