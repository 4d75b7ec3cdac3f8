"""The layers of a model that a family reads, as places where attention is listened to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from locater.calls.listeners import Switch
from locater.families.taps import refuse_unobservable
from locater.layers.tensor_parallel import SplitHeads
from locater.observing.accumulators import StatisticsOptions
from locater.observing.choosing import Choice, chosen, chosen_heads
from locater.observing.known_layers import KnownLayers
from locater.observing.site import Site, clear


def sites_of(
    model: nn.Module,
    known: KnownLayers,
    parts: Sequence[nn.Module],
    options: StatisticsOptions,
    layers: Choice,
    heads: Choice,
    switch: Switch,
) -> list[Site]:
    """A site for each of the chosen layers, which knows the heads that this rank computes."""
    split = SplitHeads(model)
    sites = []
    for number, layer in chosen(list(enumerate(known.layers)), layers, "layers"):
        module = parts[layer.part]
        refuse_unobservable(module, known.family, layer.name)
        site = Site(
            name=layer.name,
            number=number,
            kind=layer.kind,
            module=module,
            group=layer.group,
            count=layer.heads,
            heads=chosen_heads(layer.heads, heads),
            switch=switch,
            options=options,
            layer=layer,
            output_size=layer.output_size,
            split=split.of(layer.name, layer.heads),
        )
        sites.append(site)
    clear(sites)
    return sites
