"""SwapMechanism: attention by another mechanism of `locater_lab.mechanisms`, one that has nothing to learn."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.interceptors import AttentionRequest
from locater.control.base import Layers
from locater.control.forward_controls import CAP, ControlledLayer, ForwardChange, ForwardControl, Heads, forward_changes
from locater.control.registry import register_control
from locater.control.row_entropy import real_tokens, terms_of
from locater.errors import LocaterError
from locater_lab.mechanisms.mechanism_record import Mechanism
from locater_lab.mechanisms.registry import mechanism, mechanisms, other_attention


@partial(register_control, name="mechanism")
class SwapMechanism(ForwardControl["_ReplacedLayer"]):
    """Attention becomes that of `locater_lab.mechanisms.mechanism(name)`, on the model's own queries, keys and values.

    The scale is the model's, except for mechanisms of linear cost, which have one of their own: 1, on queries before
    any scale. Masks are translated: padding, causality and windows stay in force. A row that sees no key is zero. Under
    eager attention the maps in use are returned. Mechanisms have no dropout of weights: attention dropout has to be 0
    in training.

    Refused: mechanisms with parameters to learn; those that cannot be causal, in causal layers; layers with a soft-cap,
    sinks or a position bias, which a mechanism does not take; masks with numbers in them.

    >>> SwapMechanism("sigmoid")
    SwapMechanism(name='sigmoid', layers=None)
    """

    def __init__(self, name: str, layers: Layers = None) -> None:
        self.name, self.layers = without_parameters(name).name, layers

    def mechanism_of(self, layer: int, before: str) -> str:
        return self.name if self.acts_on(layer) else before

    def _change(self, controlled: ControlledLayer) -> _ReplacedLayer:
        layer, new = controlled.layer, mechanism(self.name)
        where = layer.name or type(controlled.module).__name__
        if layer.unknown_mask is not None:
            raise LocaterError(f"{where}: which keys its queries see is not known: {layer.unknown_mask}")
        check_causality(new, layer.causal, where)
        if new.causal == "never" and layer.kind == "cross":
            raise LocaterError(
                f"{where}: {new.name} sums over queries, and cross-attention is not told which are padding; "
                "layers=[...] leaves it out"
            )
        unsupported = {
            "a soft-cap": layer.softcap,
            "sinks": layer.sinks,
            "a position bias": layer.bias,
            "relative terms": layer.relative,
        }
        for name, term in unsupported.items():
            if term is not None:
                raise LocaterError(
                    f"{where}: its attention has {name}, which {new.name} does not take; layers=[...] leaves it out"
                )
        capped = any(change.cap is not None for change in forward_changes(controlled.module))
        before = "LogitSoftcap" if capped else acting_mechanism(controlled.module)
        if before != "softmax":
            raise LocaterError(
                f"{where}: its attention is that of {before} already, and {new.name} would replace it: use one of them"
            )
        return _ReplacedLayer(controlled.heads, new.name)


def without_parameters(name: str) -> Mechanism:
    """The mechanism called `name`, which must have nothing to learn.

    >>> without_parameters("centred").kind
    'signed'
    """
    named = mechanism(name)
    if named.has_parameters or named.needs:
        learned = ", ".join(named.learned or named.needs)
        others = ", ".join(other.name for other in mechanisms() if not (other.has_parameters or other.needs))
        raise LocaterError(
            f"{name} attention has parameters to learn ({learned}), which this control does not make; without: {others}"
        )
    return named


def check_causality(chosen: Mechanism, causal: bool, where: str) -> None:
    """Raises where a mechanism that cannot be causal would be, or one that must be causal would not."""
    if causal and chosen.causal == "never":
        raise LocaterError(f"{where}: {chosen.name} attention cannot be causal: {chosen.reason}")
    if not causal and chosen.causal == "only":
        raise LocaterError(f"{where}: {chosen.name} attention is causal only: {chosen.reason}")


def acting_mechanism(module: nn.Module) -> str:
    """The name of the mechanism by which a module attends: that of a control, or its own."""
    swapped = [change.mechanism for change in forward_changes(module) if change.mechanism is not None]
    name = swapped[0] if swapped else getattr(module, "attention", None)
    return name if isinstance(name, str) else "softmax"


class _ReplacedLayer(ForwardChange):
    order = CAP
    mechanism: str

    def __init__(self, heads: Heads, mechanism: str) -> None:
        self.heads, self.mechanism, self.other = heads, mechanism, other_attention(mechanism)

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        prescale = self.heads.scale / request.scale
        new = mechanism(self.mechanism)
        weights = partial(_weights, new, self.heads.causal, prescale, request)
        kw = {**request.kw, "mechanism": self.other, "weights": weights}
        return replace(request, kw=kw, attend=partial(_attend, new, self.heads.causal, prescale, request.name))


def _attend(
    new: Mechanism,
    causal: bool,
    prescale: float,
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *args: Any,
    dropout: float = 0.0,
    mechanism: Any = None,
    weights: Any = None,
    **kw: Any,
) -> tuple[Tensor, Tensor | None]:
    """In the place of the attention function called `name`. The model has multiplied its queries by `prescale`."""
    if dropout and module.training:
        raise LocaterError(
            f"{new.name} attention has no dropout of weights, and {type(module).__name__} has {dropout}: "
            "set the model's attention dropout to 0"
        )
    request = AttentionRequest(module, name, _attend, query, key, mask, kw)
    query, key, options = _operands(new, causal, prescale, request)
    value = value[:, :, : key.shape[2]]
    device = query.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        out = new(query, key, value, **options).to(value.dtype)
        maps = None
        if name == "eager":  # eager attention returns its maps
            with torch.no_grad():
                maps = new.map(query, key, **options).to(query.dtype)
    return out.transpose(1, 2).contiguous(), maps


def _operands(
    new: Mechanism, causal: bool, prescale: float, request: AttentionRequest
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries, keys and arguments of a mechanism for a call that the model makes."""
    call, query = request.call(), request.query
    has_own_scale = new.cost == "linear"
    if has_own_scale and abs(prescale - 1) > 1e-6:
        query = query / prescale
    return query, call.key, {**_mask_options(call, new, causal), "scale": None if has_own_scale else call.terms.scale}


def _weights(
    new: Mechanism,
    causal: bool,
    prescale: float,
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    heads: Tensor | None,
) -> Tensor:
    """The map (B, H, T, S) of the same call, of all query heads or of some."""
    plain = {name: value for name, value in request.kw.items() if name not in ("mechanism", "weights")}
    query, key, options = _operands(new, causal, prescale, replace(request, query=query, key=key, kw=plain))
    maps = new.map(query, key, **options)
    return maps if heads is None else maps[:, heads]


def _mask_options(call: Call, new: Mechanism, causal: bool) -> dict[str, Any]:
    """Which keys each query sees, as arguments of a mechanism."""
    terms = call.terms
    for term, value in (("a soft-cap", terms.softcap), ("sinks", terms.sinks), ("slopes", terms.alibi)):
        if value is not None:
            raise LocaterError(f"{new.name} attention does not take {term}, which came with this call")
    T, S = call.query.shape[2], call.key.shape[2]
    if all(x is None for x in (terms.window, terms.documents, terms.mask, terms.bias)):
        return {"causal": terms.causal or (causal and T == 1), "padding": terms.padding}
    visible = terms_of(call).visible(slice(0, T), T, S, call.query.device)
    if terms.bias is not None:
        shown = terms.bias > -torch.inf
        if not torch.compiler.is_compiling() and bool((terms.bias != 0)[shown].any()):
            raise LocaterError(
                f"{new.name} attention does not take numbers that are added to logits: give a mask that only hides"
            )
        visible = visible & shown
    if new.causal == "never":  # it sums over queries: a token that no query may look at is padding, and so is its row
        return {"mask": visible, "query_padding": real_tokens(call, own=True)[0]}
    if new.cost == "linear" and T > 1:
        return _as_padding(visible, causal)
    return {"mask": visible, "causal": causal and T == 1 and new.causal == "only"}


def _as_padding(visible: Tensor, causal: bool) -> dict[str, Any]:
    """The mask as padding and a causal flag, where these say it all; otherwise as it is, which a linear mechanism
    refuses.
    """
    T, S = visible.shape[2:]
    keys = visible.any(2, keepdim=True)  # (b, h, 1, S)
    whole = keys.expand_as(visible)
    if causal:
        whole = whole & torch.ones(T, S, dtype=torch.bool, device=visible.device).tril(S - T)
    return {"mask": keys, "causal": causal} if torch.equal(visible, whole) else {"mask": visible}
