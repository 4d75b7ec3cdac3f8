"""LogitSoftcap: c tanh(logits / c), for models whose attention has none."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from locater.attention import softcap_attention
from locater.attention.changes import AttentionRequest, changes
from locater.control.base import Layers
from locater.control.forward import CAP, ControlledLayer, ForwardChange, ForwardControl, Heads
from locater.control.rows import terms_of
from locater.errors import LocaterError


class LogitSoftcap(ForwardControl):
    """Logits become cap * tanh(logits / cap), after scale and position bias and before mask and softmax.

    No logit exceeds the cap, so an entropy has a floor: logits in a range of 2 cap. The gradient of a logit vanishes as
    it nears the cap. No fused kernel is used: attention is plain matrix products with a float32 softmax, T x T,
    whatever implementation the model asks for. A model that caps already (Gemma 2) is refused.

    >>> LogitSoftcap(cap=30.0)
    LogitSoftcap(cap=30.0, layers=None)
    """

    def __init__(self, cap: float = 50.0, layers: Layers = None) -> None:
        if not (cap > 0 and math.isfinite(cap)):
            raise LocaterError(f"cap={cap}: a number above 0")
        self.cap, self.layers = cap, layers

    def _change(self, place: ControlledLayer) -> ForwardChange:
        held = [c.cap for c in changes(place.module) if isinstance(c, _Capped)]
        already = place.layer.softcap if place.layer.softcap is not None else next(iter(held), None)
        if already is not None:
            raise LocaterError(
                f"{place.layer.name}: its logits are capped at {already} already, and two caps are not one"
            )
        return _Capped(place.of, self.cap)


class _Capped(ForwardChange):
    order = CAP

    def __init__(self, of: Heads, cap: float) -> None:
        self.of, self.cap = of, cap

    def __call__(self, asked: AttentionRequest) -> AttentionRequest:
        return replace(asked, kw={**asked.kw, "softcap": self.cap}, attend=partial(_attend, asked.name))


def _attend(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *args: Any,
    dropout: float = 0.0,
    **kw: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stands for the attention function called `name`. Maps are returned where that one would, under eager."""
    call = AttentionRequest(module, name, _attend, query, key, mask, kw).call()
    S = call.key.shape[2]
    added = mask[..., :S] if isinstance(mask, Tensor) and mask.is_floating_point() and mask.ndim == 4 else None
    out, weights = softcap_attention(
        query, call.key, value[:, :, :S], terms_of(call), added, dropout if module.training else 0.0
    )
    return out.transpose(1, 2).contiguous(), weights if name == "eager" else None
