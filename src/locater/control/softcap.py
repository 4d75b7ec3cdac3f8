"""LogitSoftcap: c tanh(logits / c), for models whose attention has none."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from locater.attention import softcap_attention
from locater.attention.call import ADD, hidden_by
from locater.attention.changes import AttentionRequest
from locater.control.base import Layers
from locater.control.forward import CAP, ControlledLayer, ForwardChange, ForwardControl, Heads, forward_changes
from locater.control.rows import terms_of
from locater.errors import LocaterError


class LogitSoftcap(ForwardControl["_Capped"]):
    """Logits become cap * tanh(logits / cap), after scale and position bias and before mask and softmax.

    No logit exceeds the cap, so logits have a range of 2 cap, and entropy cannot fall below what that allows. The
    gradient of a logit vanishes as it nears the cap. No fused kernel is used: attention is plain matrix products with a
    float32 softmax, T x T, whatever implementation the model is set to. A model that caps already (Gemma 2) is refused.

    >>> LogitSoftcap(cap=30.0)
    LogitSoftcap(cap=30.0, layers=None)
    """

    needs_softmax = True

    def __init__(self, cap: float = 50.0, layers: Layers = None) -> None:
        if not (cap > 0 and math.isfinite(cap)):
            raise LocaterError(f"cap={cap}: a number above 0")
        self.cap, self.layers = cap, layers

    def _change(self, controlled: ControlledLayer) -> _Capped:
        caps = [controlled.layer.softcap, *(change.cap for change in forward_changes(controlled.module))]
        already = next((cap for cap in caps if cap is not None), None)
        if already is not None:
            raise LocaterError(
                f"{controlled.layer.name}: its logits are capped at {already} already: a second cap is not supported"
            )
        return _Capped(controlled.heads, self.cap)


class _Capped(ForwardChange):
    order = CAP

    cap: float

    def __init__(self, heads: Heads, cap: float) -> None:
        self.heads, self.cap = heads, cap

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        return replace(request, kw={**request.kw, "softcap": self.cap}, attend=partial(_attend, request.name))


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
    """In the place of the attention function called `name`. Like that one, it returns attention maps under eager."""
    added = None
    if isinstance(mask, Tensor) and mask.ndim == 4 and (mask.is_floating_point() or name in ADD):
        # numbers are added after the cap; of the call only what is hidden is asked
        added, mask = mask[..., : key.shape[2]], ~hidden_by(mask)
    call = AttentionRequest(module, "sdpa" if added is not None else name, _attend, query, key, mask, kw).call()
    S = call.key.shape[2]
    out, weights = softcap_attention(
        query, call.key, value[:, :, :S], terms_of(call), added, dropout if module.training else 0.0
    )
    return out.transpose(1, 2).contiguous(), weights if name == "eager" else None
