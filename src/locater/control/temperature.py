"""Temperature: logits / t, with a learnable log t per head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from locater.calls.interceptors import AttentionRequest
from locater.control.base import Layers
from locater.control.forward_controls import (
    TEMPERATURE,
    ControlledLayer,
    ForwardChange,
    ForwardControl,
    Heads,
    per_head,
)
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.layers.norm_folding import Effective
from locater.numerics import is_number


class Temperature(ForwardControl["_TemperatureChange"]):
    """q.k becomes q.k / t_h, with log t_h learned for every head.

    Queries are divided by t, in float32, so it works with any backend and any cache. Position biases (T5), sinks and a
    soft-cap come later and are not divided. A temperature above 1 spreads attention, below 1 it sharpens it.

        control = locater.Temperature().attach(model)
        optimizer = torch.optim.AdamW([*model.parameters(), *control.parameters()])

    >>> Temperature(init=2.0)
    Temperature(init=2.0, learn=True, layers=None)
    """

    def __init__(self, init: float = 1.0, learn: bool = True, layers: Layers = None) -> None:
        if not (is_number(init) and init > 0):
            raise LocaterError(f"init={init!r}: a temperature must be a number above 0")
        self.init, self.learn, self.layers = init, learn, layers

    def _change(self, controlled: ControlledLayer) -> _TemperatureChange:
        log_t = torch.full((controlled.layer.heads,), math.log(self.init))
        return _TemperatureChange(controlled.heads, controlled.parameter(log_t, self.learn))

    def temperatures(self) -> dict[str, list[float]]:
        """t of every head, by layer."""
        return {
            name.removesuffix(".log_t"): p.detach().exp().tolist() for name, p in self._parameters_by_name().items()
        }


class _TemperatureChange(ForwardChange):
    order = TEMPERATURE

    def __init__(self, heads: Heads, log_t: nn.Parameter) -> None:
        self.heads, self.log_t = heads, log_t

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {"log_t": self.log_t}

    def fold(self, layer: AttentionLayer, fold: Callable[[AttentionLayer], Effective]) -> Effective:
        maps = fold(layer)
        share = torch.exp(-self.log_t.detach()).to(maps.query)
        return replace(maps, query=maps.query * share[:, None, None], key_term=maps.key_term * share[:, None])

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        q = request.query
        log_t = per_head(self.log_t, q.shape[1], "query", self.heads).to(q.device)
        # log_t is float32, so half-precision queries are multiplied in float32
        return replace(request, query=(q * torch.exp(-log_t)[:, None, None]).to(q.dtype))
