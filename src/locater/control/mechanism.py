"""SwapMechanism: another way to attend, of those in `locater.attention` that have nothing to learn."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.attention import mechanism, mechanisms
from locater.attention.call import Call
from locater.attention.changes import AttentionRequest, changes
from locater.attention.mechanism_record import Mechanism
from locater.control.base import Layers
from locater.control.forward import CAP, ControlledLayer, ForwardChange, ForwardControl, Heads
from locater.control.rows import real_tokens, terms_of
from locater.control.softcap import _Capped
from locater.errors import LocaterError


class SwapMechanism(ForwardControl):
    """Attention becomes that of `locater.attention.mechanism(name)`, on the model's own queries, keys and values.

    The scale is the model's, but for mechanisms of linear cost, which have one of their own (1, of queries as they are
    before any scale). Masks are translated: padding, causality and windows hold. A row that sees no key is zero. Under
    eager attention maps are returned, as they act. Weights cannot be dropped at random: attention dropout has to be 0
    in training.

    Refused: mechanisms with parameters to learn; those that cannot be causal, in causal layers; layers with a soft-cap,
    sinks or a position bias, for which a mechanism has no place; masks with numbers in them.

    >>> SwapMechanism("sigmoid")
    SwapMechanism(name='sigmoid', layers=None)
    """

    def __init__(self, name: str, layers: Layers = None) -> None:
        self.name, self.layers = without_parameters(name).name, layers

    def _change(self, place: ControlledLayer) -> ForwardChange:
        layer, held = place.layer, mechanism(self.name)
        where = layer.name or type(place.module).__name__
        fits(held, layer.causal, where)
        if held.causal == "never" and layer.kind == "cross":
            raise LocaterError(
                f"{where}: {held.name} sums over queries, and cross-attention is not told which are padding; layers=[...]"
            )
        for term, what in (
            (layer.softcap, "a soft-cap"), (layer.sinks, "sinks"), (layer.bias, "a position bias"), (layer.relative, "relative terms"),
        ):  # fmt: skip
            if term is not None:
                raise LocaterError(
                    f"{where}: its attention has {what}, for which {held.name} has no place; layers=[...] leaves it out"
                )
        capped = any(isinstance(c, _Capped) for c in changes(place.module))
        first = "LogitSoftcap" if capped else acting(place.module)
        if first != "softmax":
            raise LocaterError(
                f"{where}: its attention is that of {first} already, and {held.name} would take its place: one of them"
            )
        return _Replaced(place.of, held.name)


def without_parameters(name: str) -> Mechanism:
    """The mechanism called `name`, which must have nothing to learn.

    >>> without_parameters("centred").kind
    'signed'
    """
    found = mechanism(name)
    if found.has_parameters or found.needs:
        lone = ", ".join(m.name for m in mechanisms() if not (m.has_parameters or m.needs))
        what = ", ".join(found.learned or found.needs)
        raise LocaterError(
            f"{name} attention has something to learn ({what}), which nothing here makes; without: {lone}"
        )
    return found


def fits(held: Mechanism, causal: bool, where: str) -> None:
    """Raises where a mechanism that cannot be causal would be, or one that must be would not."""
    if causal and held.causal == "never":
        raise LocaterError(f"{where}: {held.name} attention cannot be causal: {held.reason}")
    if not causal and held.causal == "only":
        raise LocaterError(f"{where}: {held.name} attention is causal only: {held.reason}")


def acting(module: nn.Module) -> str:
    """The mechanism by which a module attends: that of a control, or its own."""
    held = next((c.name for c in changes(module) if isinstance(c, _Replaced)), None) or getattr(
        module, "attention", None
    )
    return held if isinstance(held, str) else "softmax"


class _Replaced(ForwardChange):
    order = CAP

    def __init__(self, of: Heads, name: str) -> None:
        self.of, self.name = of, name

    def __call__(self, asked: AttentionRequest) -> AttentionRequest:
        attend = partial(_attend, mechanism(self.name), self.of.causal, self.of.scale / asked.scale, asked.name)
        return replace(asked, kw={**asked.kw, "mechanism": self.name}, attend=attend)


def _attend(
    held: Mechanism, causal: bool, scaled: float, name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    *args: Any, dropout: float = 0.0, mechanism: str = "", **kw: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Stands for the attention function called `name`; `scaled` is what the model has multiplied its queries by
    before.
    """
    if dropout and module.training:
        raise LocaterError(
            f"{held.name} attention has no dropout of weights, and {type(module).__name__} asks for {dropout}: set the model's to 0"
        )
    call = AttentionRequest(module, name, _attend, query, key, mask, kw).call()
    key, value, scale = call.key, value[:, :, : call.key.shape[2]], call.scale
    own = held.cost == "linear"
    if own and abs(scaled - 1) > 1e-6:
        query = query / scaled
    given: dict[str, Any] = {**_sight(call, held, causal), "scale": None if own else scale}
    with (
        torch.autocast(query.device.type, enabled=False)
        if torch.is_autocast_enabled(query.device.type)
        else nullcontext()
    ):
        out = held(query, key, value, **given).to(value.dtype)
        weights = None
        if name == "eager":  # which would return its maps
            with torch.no_grad():
                weights = held.map(query, key, **given).to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights


def _sight(call: Call, held: Mechanism, causal: bool) -> dict[str, Any]:
    """Who sees whom, as a mechanism is told."""
    for term, what in ((call.softcap, "a soft-cap"), (call.sinks, "sinks"), (call.alibi, "slopes")):
        if term is not None:
            raise LocaterError(f"{held.name} attention has no place for {what}, which came with this call")
    T, S = call.query.shape[2], call.key.shape[2]
    if all(x is None for x in (call.window, call.documents, call.mask, call.bias)):
        return {"causal": call.causal or (causal and T == 1), "padding": call.padding}
    seen = terms_of(call).visible(slice(0, T), T, S, call.query.device)
    if call.bias is not None:
        shown = call.bias > -torch.inf
        if not torch.compiler.is_compiling() and bool((call.bias != 0)[shown].any()):
            raise LocaterError(
                f"{held.name} attention has no place for numbers that are added to logits: give a mask that only hides"
            )
        seen = seen & shown
    if held.causal == "never":  # sums over queries: a token that nobody may look at is padding, and so is its row
        return {"mask": seen, "query_padding": real_tokens(call, own=True)[0]}
    if held.cost == "linear" and T > 1:
        return _without_rows(seen, causal)
    return {"mask": seen, "causal": causal and T == 1 and held.causal == "only"}


def _without_rows(seen: Tensor, causal: bool) -> dict[str, Any]:
    """Padding and a flag, where that is all that a mask says; the mask as it is where not, which a linear mechanism
    refuses.
    """
    T, S = seen.shape[2:]
    keys = seen.any(2, keepdim=True)  # (b, h, 1, S)
    whole = keys.expand_as(seen)
    if causal:
        whole = whole & torch.ones(T, S, dtype=torch.bool, device=seen.device).tril(S - T)
    return {"mask": keys, "causal": causal} if torch.equal(seen, whole) else {"mask": seen}
