"""A model that is nothing but attention maps and skips: x -> x + A(x) x in each layer. Its operator is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from locater import Block, Family
from locater.calls.call_and_masks import Call
from locater.calls.patching import record_parts
from locater.kernels import Terms
from locater.layers import AttentionLayer
from locater.layers.build import projection


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.scale = width**-0.5

    def maps(self, x: Tensor) -> Tensor:
        logits = self.q(x) @ self.k(x).mT * self.scale
        return logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -torch.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.maps(x) @ self.v(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = Attention(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class MapsOnly(nn.Module):
    """Values and outputs pass unchanged; the logits are the last stream itself."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.config = {"model_type": "maps_only", "width": width}
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        with torch.no_grad():
            for layer in self.layers:
                for part in (layer.attn.v, layer.attn.o):  # type: ignore[union-attr]
                    part.weight.copy_(torch.eye(width))  # type: ignore[union-attr, operator]
                for part in (layer.attn.q, layer.attn.k):  # type: ignore[union-attr]
                    nn.init.normal_(part.weight, std=0.7)  # type: ignore[union-attr, arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def layers(weights: Any, config: Any) -> Iterator[AttentionLayer]:
    width = config["width"]
    for index in range(sum(name.endswith("attn.q.weight") for name in weights.names())):
        stem = f"layers.{index}.attn"
        maps = {part: projection(weights, f"{stem}.{part}") for part in "qkvo"}
        yield AttentionLayer(
            name=stem, index=index, heads=1, kv_heads=1, head_dim=width, query=maps["q"], key=maps["k"],
            value=maps["v"], out=maps["o"], scale=width**-0.5, causal=True,
        )  # fmt: skip


def describe(module: Any, passage: Any) -> Call:
    q, k = (passage.heads(part, 1).transpose(1, 2) for part in "qk")
    return Call(q, k, Terms(module.scale, causal=True), passage.heads("o", 1))


def tap(module: nn.Module) -> Iterator[Any]:
    yield from record_parts(module, describe, outputs=["q", "k"], inputs=["o"])


FAMILY = Family(("maps_only",), layers, Block(attention="attn", stack="layers"), tap)
