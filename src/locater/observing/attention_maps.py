"""Attention maps of the few heads that are asked for, from the queries, keys and terms of a call.

The model attends by whatever backend it has: only the maps of these heads are built beside it, none of the others.
Axes: B sequences, H query heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.listeners import ListeningSwitch
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.numerics import upcast
from locater.observing.layer_choice import Choice, choose, choose_heads
from locater.observing.listening_site import listening_to
from locater.observing.row_masks import call_for_heads
from locater.observing.run_model import as_keywords, check_model, run_checked
from locater.sources.weights import ModuleWeights
from locater.torch_private import disable_dynamo, in_backward_pass, unwrap_compiled


def attention_pattern(
    model: nn.Module, inputs: Mapping[str, Tensor] | Tensor, layers: Choice = None, heads: Choice = None
) -> dict[tuple[int, int], Float[Tensor, "B T S"]]:
    """Run `model` once on `inputs` (keywords, or its first argument): the maps of some heads, by (layer, head).

    `layers` and `heads` are indices, or a count of evenly spaced ones; all where left out. Layers are numbered as in a
    scan. The model runs under its own attention backend, and only these maps are built: float32 at least, on the
    model's device. A row that sees no key is zero; with sinks a row sums to less than 1.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 3, enable_nested_tensor=False)
    >>> maps = attention_pattern(encoder, torch.zeros(4, 1, 16), layers=[2])
    >>> list(maps), maps[2, 0][0, 0].tolist()                  # equal tokens: every key gets the same weight
    ([(2, 0), (2, 1)], [0.25, 0.25, 0.25, 0.25])
    """
    check_model(model)
    model = unwrap_compiled(model)
    known = list(enumerate(attention_layers(model)))
    switch, weights = ListeningSwitch(), ModuleWeights(model)
    sites = [
        PatternSite(layer.name, weights.submodule(layer.name), switch, number, choose_heads(layer.heads, heads))
        for number, layer in choose(known, layers, "layers")
    ]
    with listening_to(model, sites):
        run_checked(model, as_keywords(model, inputs))
    for site in sites:
        if site.calls > 1:
            raise LocaterError(
                f"{site.name}: called {site.calls} times in one run of the model, so its maps cannot be told apart: "
                "choose other layers with layers=[...]"
            )
    return {(site.number, head): site.map_of(head) for site in sites for head in site.heads}


@dataclass(eq=False)
class PatternSite:
    """One attention module that is listened to for the maps of some heads, those of its last call."""

    name: str
    module: nn.Module
    switch: ListeningSwitch
    number: int
    heads: list[int]
    maps: Float[Tensor, "B H T S"] | None = None  # of `heads`
    calls: int = 0
    picked: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        self.picked = torch.tensor(self.heads, device=device)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()

    @disable_dynamo
    def receive(self, call: Call) -> None:
        """Build the maps. A compiled model is interrupted here; activation checkpointing does not count twice."""
        if in_backward_pass():
            return
        self.calls += 1
        with torch.no_grad(), without_autocast(call.query.device):
            self.maps = attention_maps(call, self.picked)

    def map_of(self, head: int) -> Float[Tensor, "B T S"]:
        """The map of one head at the last call."""
        if self.maps is None:
            raise LocaterError(
                f"{self.name}: no attention call was observed: load the model with attn_implementation='sdpa' or "
                "'eager', or give inputs that reach this layer"
            )
        return self.maps[:, self.heads.index(head)]


def pattern_sites(model: nn.Module, patterns: Sequence[tuple[int, int]], switch: ListeningSwitch) -> list[PatternSite]:
    """Where to listen for the maps of these (layer, head)."""
    pairs = _pairs(patterns)
    if not pairs:
        return []
    layers, weights, by_layer = attention_layers(model), ModuleWeights(model), dict[int, list[int]]()
    for layer, head in pairs:
        if not 0 <= layer < len(layers) or not 0 <= head < layers[layer].heads:
            sizes = f"{len(layers)} layers" + (f" of {layers[layer].heads} heads" if 0 <= layer < len(layers) else "")
            raise LocaterError(f"patterns: ({layer}, {head}): there are {sizes}, numbered from 0")
        by_layer.setdefault(layer, []).append(head)
    return [
        PatternSite(layers[at].name, weights.submodule(layers[at].name), switch, at, sorted(set(heads)))
        for at, heads in sorted(by_layer.items())
    ]


def _pairs(patterns: Any) -> list[tuple[int, int]]:
    """(layer, head) as whole numbers; anything else is refused."""
    try:
        return [(index(layer), index(head)) for layer, head in patterns]
    except (TypeError, ValueError):
        raise LocaterError(
            f"patterns={patterns!r:.60}: give pairs of layer and head, such as patterns=[(3, 0)]"
        ) from None


def attention_maps(call: Call, heads: Tensor | None = None) -> Float[Tensor, "B H T S"]:
    """The weights of a call, computed again from its queries, keys and masks, of all query heads or of some.

    A row that sees no key is zero; with sinks a row sums to less than 1. Mechanisms with learned parts compute the maps
    of all heads, of which the others are dropped.
    """
    if call.weights is not None:
        return upcast(call.weights(heads))
    (B, H, T, _), S = call.query.shape, call.key.shape[2]
    call = replace(call, terms=call.terms.checked(B, H, T, S))
    if heads is not None:
        call, H = call_for_heads(call, heads), len(heads)
    q, k, terms = upcast(call.query), upcast(call.key), call.terms
    logits = terms.logits(q, k.repeat_interleave(H // k.shape[1], 1), slice(0, T), T)
    hidden = ~terms.visible(slice(0, T), T, S, q.device) | (logits == -torch.inf)
    logits = logits.masked_fill(hidden, -torch.inf)
    if terms.sinks is not None:
        logits = torch.cat([logits, terms.sinks.to(logits).view(-1, 1, 1).expand(B, H, T, 1)], -1)
    return logits.softmax(-1)[..., :S].masked_fill(hidden, 0.0)


def without_autocast(device: torch.device) -> torch.autocast | nullcontext[None]:
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
