"""The layers of a model that a family reads, as places where attention is listened to."""

from __future__ import annotations

from torch import nn

from locater.attention.listeners import Switch
from locater.checkpoints.sources import open_source
from locater.checkpoints.weights import ModuleWeights
from locater.families import AttentionLayer, attention_layers
from locater.families.listening import refuse_unobservable
from locater.families.reading import reader_for
from locater.families.registry import family_of
from locater.families.split_heads import SplitHeads
from locater.observing.choosing import Choice, chosen, chosen_heads
from locater.observing.site import Site
from locater.observing.tally import StatisticsOptions


def layers_by_record(model: nn.Module) -> list[AttentionLayer]:
    """The layers of a model that a family reads; raises where none does."""
    reader_for(*open_source(model))
    return attention_layers(model)


def sites_of(
    model: nn.Module,
    known: list[AttentionLayer],
    options: StatisticsOptions,
    layers: Choice,
    heads: Choice,
    switch: Switch,
) -> list[Site]:
    """A site for each of the chosen layers, which knows the heads that this rank computes."""
    weights, family, split = ModuleWeights(model), family_of(model), SplitHeads(model)
    sites = []
    for number, layer in chosen(list(enumerate(known)), layers, "layers"):
        module = weights.submodule(layer.name)
        refuse_unobservable(module, family, layer.name)
        site = Site(
            name=layer.name,
            number=number,
            kind=layer.kind,
            module=module,
            group=layer.group,
            count=layer.heads,
            heads=chosen_heads(layer, heads),
            switch=switch,
            options=options,
            layer=layer,
            split=split.of(layer.name, layer.heads),
        )
        sites.append(site)
    return sites
