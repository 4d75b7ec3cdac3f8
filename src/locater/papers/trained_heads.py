"""Attention layers of trained models on real text: what each reads, so that its logits and maps can be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from locater.heads import AttentionLayer, Norm
from locater.papers.bao2024.gaussian import inputs, sources
from locater.papers.paper import Setting
from locater.probing.load import load_model
from locater.probing.text import batches

LENGTH = 128
SEQUENCES = {True: 2, False: 12}  # of each half of the text
CHARACTERS = {True: 20_000, False: 80_000}  # of each half
HALVES = "half the difference of two halves of the text"


@dataclass(frozen=True)
class TrainedLayer:
    """One self-attention layer of a trained model, and what came out of the norm in front of it on one half of the text."""

    model: str
    number: int
    half: int
    layer: AttentionLayer
    x: Float[Tensor, "sequences tokens width"]

    @property
    def causal(self) -> bool:
        return bool(self.layer.causal)

    @torch.no_grad()
    def logits(self) -> Float[Tensor, "sequences heads tokens tokens"]:
        """Before the mask, float64."""
        return self.layer.logits(self.x).double()

    @torch.no_grad()
    def maps(self) -> Float[Tensor, "sequences heads tokens tokens"]:
        """As they act, float64."""
        return self.layer.attention(self.x).double()


def trained_layers(setting: Setting) -> Iterator[TrainedLayer]:
    """Every model at hand, on two halves of a text, which give the spread."""
    size = CHARACTERS[setting.quick]
    for name, folder in setting.each(list(sources(setting.models).items())):
        model = load_model(str(folder))
        for half in range(2):
            text = setting.text[half * size : (half + 1) * size]
            held = batches(model, text, length=LENGTH, tokens=LENGTH * SEQUENCES[setting.quick])
            for number, (layer, x) in enumerate(inputs(model, held)):
                yield TrainedLayer(name, number, half, replace(layer, norm=Norm(), memory_norm=None), x[: SEQUENCES[setting.quick]])
