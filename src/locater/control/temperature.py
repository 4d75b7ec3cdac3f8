"""Temperature: logits / t, with a learnable log t per head."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from locater.attention.changes import AttentionRequest
from locater.control.base import Layers
from locater.control.forward import TEMPERATURE, ControlledLayer, ForwardChange, ForwardControl, Heads, per_head
from locater.errors import LocaterError


class Temperature(ForwardControl):
    """q.k becomes q.k / t_h, with log t_h learned for every head.

    Queries are divided by t, in float32, so any backend and any cache will do. Position biases (T5), sinks and a
    soft-cap come after it and are not divided. Above 1 it spreads attention, below 1 it sharpens.

        control = locater.Temperature().attach(model)
        optimizer = torch.optim.AdamW([*model.parameters(), *control.parameters()])

    >>> Temperature(init=2.0)
    Temperature(init=2.0, learn=True, layers=None)
    """

    def __init__(self, init: float = 1.0, learn: bool = True, layers: Layers = None) -> None:
        if not (init > 0 and math.isfinite(init)):
            raise LocaterError(f"init={init}: a temperature is a number above 0")
        self.init, self.learn, self.layers = init, learn, layers

    def _change(self, place: ControlledLayer) -> ForwardChange:
        return _Divided(place.of, place.parameter(torch.full((place.layer.heads,), math.log(self.init)), self.learn))

    def temperatures(self) -> dict[str, list[float]]:
        """t of every head, by layer."""
        return {name.removesuffix(".log_t"): p.detach().exp().tolist() for name, p in self._named().items()}


class _Divided(ForwardChange):
    order = TEMPERATURE

    def __init__(self, of: Heads, log_t: nn.Parameter) -> None:
        self.of, self.log_t = of, log_t

    def named(self) -> dict[str, nn.Parameter]:
        return {"log_t": self.log_t}

    def __call__(self, asked: AttentionRequest) -> AttentionRequest:
        q = asked.query
        log_t = per_head(self.log_t, q.shape[1], "query", self.of).to(q.device)
        # float32 is what half precision times float32 is made in
        return replace(asked, query=(q * torch.exp(-log_t)[:, None, None]).to(q.dtype))
