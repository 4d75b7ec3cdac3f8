"""Which tokens are sinks, which activations are massive, and what that does to keys of few bits: one batch of a model.

Axes: B sequences, H query heads, K key heads, S keys, D channels of a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.listeners import ListeningSwitch
from locater.inputs.text import Batch
from locater.kernels import row_statistics
from locater.layers import AttentionLayer
from locater.measures import massive_activations
from locater.numerics import finite_or_none, known_median, upcast
from locater.observing.listening_site import listening_to
from locater.observing.residual_stream import StreamPoint, stream_points
from locater.observing.run_model import run_model
from locater.sources.weights import ModuleWeights

SINK = 0.3  # mean weight that a token receives from the rows that may look at it, above which it is a sink
LATEST = 0.75  # of the sequence: later tokens are seen by few rows, and weight on oneself would look like a sink
NAMED = 4  # tokens that are named
Names = Callable[[int], str]


@dataclass(eq=False)
class _KeySite:
    """Listens to one layer: the weight that each key receives, and the ranges of keys."""

    name: str
    module: nn.Module
    first: int  # keys that are left out of a range
    switch: ListeningSwitch = field(default_factory=ListeningSwitch)
    received: Float[Tensor, "B H S"] | None = None
    steps: list[float | None] = field(default_factory=list)

    def receive(self, call: Call) -> None:
        if call.why_unmeasurable is not None or call.query.shape[2] != call.key.shape[2]:
            return
        (B, H, T, _), S = call.query.shape, call.key.shape[2]
        terms = call.terms.checked(B, H, T, S)
        self.received = row_statistics(call.query, call.key, terms, extended=False, per_key=True).received
        self.steps = [finite_or_none(float(x)) for x in key_steps(call.key, self.first)]


def key_steps(key: Float[Tensor, "B K S D"], first: int) -> Float[Tensor, " K"]:
    """How much finer the steps of rounded keys are without the first tokens: the range of a channel over all keys, over
    its range without them; the median over channels and sequences.

    >>> key = torch.tensor([8.0, 0.0, 1.0, 0.5]).view(1, 1, 4, 1)
    >>> key_steps(key, 1).tolist()
    [8.0]
    """
    wide = upcast(key)
    whole, rest = (x.amax(2) - x.amin(2) for x in (wide, wide[:, :, first:]))
    return (whole / rest).transpose(0, 1).flatten(1).median(1).values


def sinks_and_massive(
    module: nn.Module, layers: Sequence[AttentionLayer], batch: Batch, first: int, names: Names
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What one batch shows: sinks and ranges of keys by layer, massive activations by block."""
    weights = ModuleWeights(module)
    own = Counter(layer.name for layer in layers)
    numbers = [at for at, layer in enumerate(layers) if layer.kind == "self" and own[layer.name] == 1]
    sites = [_KeySite(layers[at].name, weights.submodule(layers[at].name), first) for at in numbers]
    points = stream_points(module, [site.name for site in sites])
    massive: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for point in points:
            hook = partial(_note_massive, point, batch, names, massive)
            if point.block >= 0:
                stack.callback(point.module.register_forward_hook(hook).remove)
        stack.enter_context(listening_to(module, sites))
        run_model(module, batch)
    found = zip(numbers, sites, strict=True)
    return [_sinks_of(at, site, batch, names) for at, site in found if site.received is not None], massive


def _sinks_of(layer: int, site: _KeySite, batch: Batch, names: Names) -> dict[str, Any]:
    """Which tokens are sinks of how many heads of one layer."""
    assert site.received is not None
    mean = site.received.double()
    until = max(1, int(LATEST * mean.shape[2]))
    sinks = mean[..., :until] > SINK  # (B, H, S)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    first = torch.zeros(len(ids), dtype=torch.long) if mask is None else mask.long().argmax(1).cpu()
    at_first = torch.stack([sinks[b, :, place] for b, place in enumerate(first.tolist())])
    others = sinks.clone()
    for b, place in enumerate(first.tolist()):
        others[b, :, place] = False
    found = Counter[int](int(ids[b, s]) for b, _, s in others.nonzero().tolist())
    return {
        "layer": layer,
        "heads": mean.shape[1],
        "first_heads": int((at_first.double().mean(0) > 0.5).sum()),  # in more than half of the sequences
        "first_weight": finite_or_none(float(mean[torch.arange(len(ids)), :, first].mean())),
        "other_heads": int(others.any(-1).any(0).sum()),
        "other_tokens": [names(token) for token, _ in found.most_common(NAMED)],
        "key_step": known_median(site.steps),
        "largest_key_step": max((x for x in site.steps if x is not None), default=None),
    }


def _note_massive(
    point: StreamPoint, batch: Batch, names: Names, into: list[dict[str, Any]], module: nn.Module, args: Any, out: Any
) -> None:
    """What sticks out of the stream after one block."""
    x = out[0] if isinstance(out, tuple) else out
    if not isinstance(x, Tensor) or x.shape[:2] != batch["input_ids"].shape:
        return
    mask = batch.get("attention_mask")
    found = massive_activations(x.detach(), None if mask is None else mask.bool().to(x.device))
    ids, places = batch["input_ids"], found.token.tolist()
    tokens = Counter(names(int(ids[b, place])) for b, place in enumerate(places) if place >= 0)
    into.append(
        {
            "stack": point.stack,
            "block": point.block,
            "top": finite_or_none(float(found.top.mean())),
            "ratio": finite_or_none(float(found.ratio.mean())),
            "massive": bool(found.is_massive.double().mean() > 0.5),
            "places": sorted({int(place) for place in places if place >= 0})[:NAMED],
            "tokens": [token for token, _ in tokens.most_common(NAMED)],
            "channels": [channel for channel, _ in Counter(found.channel.tolist()).most_common(NAMED)],
        }
    )


def token_names(tokenizer: Any) -> Names:
    """What tokens are called; their numbers where there is no tokenizer."""

    def name(token: int) -> str:
        if tokenizer is None:
            return str(token)
        return repr(tokenizer.decode([token]))

    return name


def summary_of_keys(sinks: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """The median and the largest step ratio over layers."""
    known = [layer["key_step"] for layer in sinks if layer["key_step"] is not None]
    largest = [layer["largest_key_step"] for layer in sinks if layer["largest_key_step"] is not None]
    return known_median(known), max(largest, default=None)
