"""The numbers of every head at an observed step: from activations, and M and the logit spread from weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from locater.calls.interceptors import INTERCEPTORS, interceptors
from locater.discovery import attention_layers
from locater.discovery.record_or_discovery import Reading
from locater.discovery.replayed_maps import FoldedStacks, Spectra, spectra_of
from locater.errors import LocaterError
from locater.findings import key_variance
from locater.layers import AttentionLayer, effective
from locater.layers.norm_folding import Effective
from locater.numerics import finite_or_none
from locater.observing.layers_by_record import parts_of
from locater.observing.listening_site import Site
from locater.observing.seen_heads import head_numbers, totals
from locater.runs.discovery_on_first_batch import DiscoveredLayers
from locater.sources.live_tensors import next_training_pass
from locater.sources.weights import ModuleWeights

COLUMNS = ("entropy", "entropy_ratio", "max_logit", "sink", "participation", "distance")
SPECTRUM = ("M", "spread")  # of the weights: mean self-logit, and the spread of logits over unit tokens
_MEANS = tuple(name for name in COLUMNS if name != "max_logit")

ReadModel = Callable[[ModuleWeights], Reading]
Table = dict[tuple[int, int], dict[str, Any]]  # (layer, head): columns


def head_table(sites: Sequence[Site], numbers: Sequence[list[float]]) -> Table:
    """Columns and flags of every head, for the sites that were called; `numbers` are those of their tensors."""
    table: Table = {}
    for site, total in zip(sites, totals(sites, numbers), strict=True):
        if total.called:
            for head, sums, top in zip(site.heads, total.sums, total.tops, strict=True):
                table[site.number, head] = head_numbers(site, sums, top, _MEANS)
    return table


def add_spectra(table: Table, spectra: Sequence[Spectra], numbers: Sequence[list[float]]) -> None:
    """Add M and spread to the table; `numbers` are those of each `Spectra.tensors`, one after another."""
    remaining = iter(numbers)
    for part in spectra:
        F, term = next(remaining), next(remaining)
        trace = None if part.trace is None else next(remaining)
        count = len(F) // len(part.layers)
        for at, (layer, scale) in enumerate(zip(part.layers, part.scales, strict=True)):
            for head in range(count):
                row = table.get((layer, head))
                if row is not None:
                    i = at * count + head
                    row["spread"] = finite_or_none(math.sqrt(max(0.0, key_variance(scale**2 * F[i], scale * term[i]))))
                    row["M"] = None if trace is None else finite_or_none(scale * trace[i])


class WeightSpectra:
    """Reads the query-key maps of chosen layers from a model's weights, again at each step.

    Layers of one shape are read together, except under changes that controls have put on attention. `read` finds all
    layers of the model; without it they are those of a scan.
    """

    def __init__(self, model: nn.Module, numbers: Sequence[int], read: ReadModel | None = None) -> None:
        self.model, self.numbers, self._read_model = model, list(numbers), read
        self._stacks: FoldedStacks | None = None
        with contextlib.suppress(LocaterError):  # `read` raises it again, and a run goes on without
            self._stacks = FoldedStacks(model, self.numbers, read=read)

    @torch.no_grad()
    def read(self) -> list[Spectra]:
        """Of the weights as they are now, as the next training pass uses them: parametrized, and under the changes of
        controls.
        """
        parts = parts_of(self.model)
        with next_training_pass(parts):
            if self._stacks is None or any(INTERCEPTORS in part.__dict__ for part in parts):
                return self._layer_by_layer()
            return self._stacks.spectra()

    def _layer_by_layer(self) -> list[Spectra]:
        weights = ModuleWeights(self.model)
        # re-read: norm gains are folded in as they are at this step
        layers = attention_layers(self.model) if self._read_model is None else self._read_model(weights).layers
        return [
            spectra_of(number, changed_maps(layers[number], weights.submodule(layers[number].name)))
            for number in self.numbers
        ]


def changed_maps(layer: AttentionLayer, module: nn.Module) -> Effective:
    """The effective maps of a layer, under the changes that controls have put on its module."""
    fold: Callable[[AttentionLayer], Effective] = effective
    for change in interceptors(module):
        fold = partial(change.fold, fold=fold)
    return fold(layer)


class DiscoveredSpectra(WeightSpectra):
    """The same for discovered layers, numbered as in the log."""

    def __init__(self, discovered: DiscoveredLayers) -> None:
        super().__init__(discovered.part, list(discovered.sites), discovered.read)
        self._sites = discovered.sites

    def read(self) -> list[Spectra]:
        return [replace(part, layers=[self._sites[place].number for place in part.layers]) for part in super().read()]
