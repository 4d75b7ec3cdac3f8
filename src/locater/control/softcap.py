"""LogitSoftcap: c tanh(logits / c), for models whose attention has none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.call_and_masks import ADD, hidden_by
from locater.calls.interceptors import AttentionRequest
from locater.control.base import Layers
from locater.control.forward_controls import CAP, ControlledLayer, ForwardChange, ForwardControl, Heads, forward_changes
from locater.control.row_entropy import terms_of
from locater.errors import LocaterError
from locater.kernels import Terms
from locater.numerics import is_number


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap): the identity near 0, never beyond the cap. Its slope 1 - tanh^2 vanishes once it is
    reached.

    >>> softcap(torch.tensor([0.0, 25.0, 1e4]), 50.0).round().tolist()
    [0.0, 23.0, 50.0]
    """
    return cap * torch.tanh(logits / cap)


def softcap_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    terms: Terms,
    added: Float[Tensor, "b h t S"] | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T S"]]:
    """softmax(cap tanh((scale q.k + bias) / cap) + mask) v, and the weights. T x S matrices are built, as by plain
    attention.

    The cap is `terms.softcap`. `added` comes after it, like a mask. Products in the precision of q, softmax in float32
    at least; a row that sees no key is zero. Sinks take weight and are not capped.

    >>> q = k = v = torch.full((1, 1, 2, 4), 100.0)
    >>> softcap_attention(q, k, v, Terms(scale=0.5, causal=True, softcap=30.0))[1].tolist()
    [[[[1.0, 0.0], [0.5, 0.5]]]]
    """
    if terms.softcap is None:
        raise LocaterError("softcap_attention needs Terms(softcap=...), a number above 0")
    T, S, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    products = query @ key.mT
    logits = products.to(torch.promote_types(products.dtype, torch.float32)) * terms.scale_for(query.shape[-1])
    if terms.bias is not None:
        logits = logits + terms.bias
    logits = softcap(logits, terms.softcap)
    if added is not None:
        logits = logits + added
    hidden = ~terms.visible(slice(0, T), T, S, query.device)
    if terms.bias is not None:  # of -inf is a mask
        hidden = hidden | (terms.bias == -torch.inf)
    # not -inf: the gradient of an empty row would be NaN
    logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    if terms.sinks is not None:
        logits = torch.cat([logits, terms.sinks.to(logits).view(-1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    weights = logits.softmax(-1)[..., :S].masked_fill(hidden, 0.0).to(query.dtype)
    mixed = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    return mixed @ value, weights


class LogitSoftcap(ForwardControl["_SoftcapChange"]):
    """Logits become cap * tanh(logits / cap), after scale and position bias and before mask and softmax.

    No logit exceeds the cap, so logits have a range of 2 cap, and entropy cannot fall below what that allows. The
    gradient of a logit vanishes as it nears the cap. No fused kernel is used: attention is plain matrix products with a
    float32 softmax, T x T, whatever implementation the model is set to. A model that already caps its logits (Gemma 2)
    is refused.

    >>> LogitSoftcap(cap=30.0)
    LogitSoftcap(cap=30.0, layers=None)
    """

    needs_softmax = True

    def __init__(self, cap: float = 50.0, layers: Layers = None) -> None:
        if not (is_number(cap) and cap > 0):
            raise LocaterError(f"cap={cap!r}: must be a number above 0")
        self.cap, self.layers = cap, layers

    def _change(self, controlled: ControlledLayer) -> _SoftcapChange:
        caps = [controlled.layer.softcap, *(change.cap for change in forward_changes(controlled.module))]
        already = next((cap for cap in caps if cap is not None), None)
        if already is not None:
            raise LocaterError(
                f"{controlled.layer.name}: its logits are already capped at {already}: a second cap is not supported"
            )
        return _SoftcapChange(controlled.heads, self.cap)


class _SoftcapChange(ForwardChange):
    order = CAP

    cap: float

    def __init__(self, heads: Heads, cap: float) -> None:
        self.heads, self.cap = heads, cap

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        return replace(request, kw={**request.kw, "softcap": self.cap}, attend=partial(_attend_capped, request.name))


def _attend_capped(
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
    """Replaces the attention function called `name`. Like that function, it returns attention maps under eager."""
    added = None
    if isinstance(mask, Tensor) and mask.ndim == 4 and (mask.is_floating_point() or name in ADD):
        # numbers are added after the cap; of the call only what is hidden is asked
        added, mask = mask[..., : key.shape[2]], ~hidden_by(mask)
    call = AttentionRequest(module, "sdpa" if added is not None else name, _attend_capped, query, key, mask, kw).call()
    S = call.key.shape[2]
    out, weights = softcap_attention(
        query, call.key, value[:, :, :S], terms_of(call), added, dropout if module.training else 0.0
    )
    return out.transpose(1, 2).contiguous(), weights if name == "eager" else None
