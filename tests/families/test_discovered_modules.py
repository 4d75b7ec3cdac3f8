"""Discovery in plain PyTorch: attention written by hand, a block with adaptive norms, a compiled model, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.errors import LocaterError

X = {"x": torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.to_v, self.to_out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.to_q, self.to_k, self.to_v))
        weights = (q @ k.transpose(-1, -2) * 0.3).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.RMSNorm(32), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Adaptive(nn.Module):
    """As in a DiT: what attention reads is scaled and shifted by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(32, elementwise_affine=False), Attention()
        self.modulation = nn.Linear(32, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale, shift = self.modulation(t)[:, None].chunk(2, -1)
        return x + self.attn(self.norm(x) * (1 + scale) + shift)


def test_attention_written_by_hand() -> None:
    model, x = Block().double(), torch.randn(1, 7, 32, dtype=torch.float64)
    (layer,) = locater.discover(model, X).layers
    assert (layer.norm.kind, layer.heads, layer.scale) == ("rms", 4, pytest.approx(0.3))
    wanted = model.attn(model.norm(x))
    assert (layer.output(x) - wanted).abs().max() < 1e-6 * wanted.std()
    assert len(locater.scan(Block(), example=X).rows) == 4


def test_the_stream_of_an_adaptive_norm_is_what_the_maps_read() -> None:
    model, x = Adaptive().double(), torch.randn(1, 7, 32, dtype=torch.float64)
    (layer,) = locater.discover(model, {**X, "t": torch.randn(2, 32)}).layers
    wanted = model.attn(x)
    assert layer.norm.kind == "none"
    assert (layer.output(x) - wanted).abs().max() < 1e-6 * wanted.std()


def test_layers_follow_the_weights_of_the_model() -> None:
    model = Block()
    (before,) = locater.discover(model, X).layers
    with torch.no_grad():
        model.attn.to_q.weight.mul_(2)
    (after,) = locater.discover(model).layers  # from what is kept with the model
    x = torch.randn(1, 3, 32)
    assert torch.allclose(after.queries(x), before.queries(x))  # both read the live tensor
    assert torch.equal(after.query.weight(), model.attn.to_q.weight)


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (nn.Bilinear(3, 5, 2), None, "Give them: example={'input1': tensor, 'input2': tensor}"),
        (Block(), {"y": 1}, "unexpected keyword"),
        (Block().to("meta"), X, "meta device"),
        ("a folder", None, "not a live model"),
    ],
)
def test_bad_input_is_one_line(model: Any, example: Any, says: str) -> None:
    with pytest.raises(LocaterError) as error:
        locater.discover(model, example)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


class Mixed(Block):
    """Distances to points that are in float32 whatever the model is in, as of a codebook."""

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, torch.linspace(-1, 1, 96).view(1, 3, 32).expand(len(x), -1, -1))
        return super().forward(x + near.mean(-1, keepdim=True))


def test_a_model_that_makes_tensors_in_another_dtype_runs() -> None:
    model, x = Mixed().double(), torch.randn(1, 7, 32, dtype=torch.float64)
    (layer,) = locater.discover(model, X).layers
    wanted = model.attn(model.norm(x))
    assert (layer.output(x) - wanted).abs().max() < 1e-6 * wanted.std()


class Shared(nn.Module):
    """Keys and values of an earlier stream, hidden where they are later, as layers of Gemma 4 share them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm, self.between = Attention(), nn.RMSNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        part, y = self.attn, self.norm(self.between(x).tanh())
        q, k, v = (
            f(z).unflatten(-1, (4, 8)).transpose(1, 2) for f, z in ((part.to_q, y), (part.to_k, x), (part.to_v, x))
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2) * 0.3).masked_fill(later, -torch.inf).softmax(-1)
        return part.to_out((weights @ v).transpose(1, 2).flatten(2))


def test_a_causal_mask_over_keys_of_another_stream_has_to_be_given() -> None:
    model, x = Shared().double(), torch.randn(1, 7, 32, dtype=torch.float64)
    (layer,) = locater.discover(model, X).layers
    assert layer.kind == "cross"
    y = model.between(x).tanh()
    with pytest.raises(LocaterError, match="hidden by their distance"):
        layer.output(y, x)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    wanted = model(x)
    assert (layer.output(y, x, mask=seen[None, None]) - wanted).abs().max() < 1e-6 * wanted.std()
