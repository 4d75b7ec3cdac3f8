"""A small model of two streams that look at each other, as LXMERT's do, with its attention written out beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.attention_interface import listening_function
from locater.families import Family
from locater.layers import AttentionLayer
from locater.layers.build import projection
from locater.sources.open_source import Config
from locater.sources.weights import Weights
from locater_lab.models.transformer import fused_attention

TYPE, WIDTH, HEADS = "two_streams_of_a_test", 16, 2
ATTEND = listening_function("sdpa", fused_attention)


class Attention(nn.Module):
    """Queries of x, keys and values of y. With `written_out` the map is in the graph, and `map` holds it."""

    written_out = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.map: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (f(z).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, z in ((self.q, x), (self.k, y), (self.v, y)))
        if self.written_out:
            self.map = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            return self.o((self.map @ v).transpose(1, 2).flatten(2))
        mixed, _ = ATTEND(self, q, k, v, None, scaling=q.shape[-1] ** -0.5, is_causal=False)
        return self.o(mixed.flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross, self.self_attn = Attention(), Attention()


class TwoStreams(nn.Module):
    """Two layers: both streams look at the other at once, then each at itself. Class logits from text token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"model_type": TYPE}
        self.words = nn.Embedding(12, WIDTH)
        self.text, self.image = (nn.ModuleList([Layer(), Layer()]) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, features: Tensor) -> Tensor:
        t, i = self.words(input_ids), features
        for words, patches in zip(self.text, self.image, strict=True):
            t, i = t + words.cross(t, i), i + patches.cross(i, t)  # type: ignore[operator, union-attr]
            t = t + words.self_attn(t, t)  # type: ignore[operator, union-attr]
            i = i + patches.self_attn(i, i)  # type: ignore[operator, union-attr]
        return self.head(torch.tanh(t[:, 0]))


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    for stream in ("text", "image"):
        for index in range(2):
            for part, kind in (("cross", "cross"), ("self_attn", "self")):
                name = f"{stream}.{index}.{part}"
                maps: dict[str, Any] = {
                    field: projection(weights, f"{name}.{letter}")
                    for field, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))
                }
                size = WIDTH // HEADS
                yield AttentionLayer(name, index, HEADS, HEADS, size, scale=size**-0.5, kind=kind, **maps)  # type: ignore[arg-type]


FAMILY = Family((TYPE,), layers)
