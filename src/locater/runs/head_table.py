"""The numbers of every head at an observed step: from activations, and M and the logit spread from weights."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.interceptors import INTERCEPTORS, interceptors
from locater.discovery import attention_layers
from locater.discovery.example_settings import BATCH, TOKENS
from locater.discovery.record_or_discovery import Reading, reading_of
from locater.discovery.replayed_maps import FoldedStacks, Spectra, spectra_of
from locater.discovery.verified_search import Discovered, discovered_in
from locater.errors import LocaterError
from locater.findings import key_variance
from locater.layers import AttentionLayer, effective
from locater.layers.norm_folding import Effective
from locater.numerics import finite_or_none
from locater.observing.layers_by_record import parts_of
from locater.observing.listening_site import Site
from locater.observing.seen_heads import head_numbers, totals
from locater.sources.live_tensors import is_a, next_training_pass
from locater.sources.weights import ModuleWeights
from locater.torch_private import is_compiled_wrapper, unwrap_compiled

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


# The query-key maps of a model without a record, discovered with the first batch that it is trained on. A copy of the
# model runs on two examples of that batch, on the CPU in float64 (`locater.discover`): of nine tokens where the model
# takes so few. The model, its gradients, its buffers and the random state stay as they are.


Example = Mapping[str, Any]


@dataclass(frozen=True)
class DiscoveredLayers:
    """Layers whose maps are known: those discovered in `part` of a model with `example`. `sites` has the site of each,
    by its place among them.
    """

    part: nn.Module
    example: Example | None
    sites: dict[int, Site]
    gaps: list[str]  # why the maps of other sites are not known, a line each

    def read(self, weights: ModuleWeights) -> Reading:
        return reading_of(discovered_in(weights, self.example), {})


class DiscoveredSpectra(WeightSpectra):
    """The same for discovered layers, numbered as in the log."""

    def __init__(self, discovered: DiscoveredLayers) -> None:
        super().__init__(discovered.part, list(discovered.sites), discovered.read)
        self._sites = discovered.sites

    def read(self) -> list[Spectra]:
        return [replace(part, layers=[self._sites[place].number for place in part.layers]) for part in super().read()]


def discover_layers(
    sites: Sequence[Site], part: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DiscoveredLayers:
    """The layers of the sites that a call `part(*args, **kwargs)` runs. Raises if none of them can be read."""
    part = _inside_wrappers(part)
    weights, failure = ModuleWeights(part), ""
    for example in _examples(part, args, kwargs):
        try:
            found = discovered_in(weights, example)
        except LocaterError as error:
            failure = failure or str(error)
            continue
        matched = _match_sites(sites, weights, found)
        gaps = list(_gaps(sites, weights, found, matched))
        if matched:
            return DiscoveredLayers(part, example, matched, gaps)
        failure = failure or "; ".join(gaps)
    raise LocaterError(failure)


def _inside_wrappers(part: Any) -> nn.Module:
    """The module whose forward has the names of the arguments."""
    while True:
        if is_compiled_wrapper(part):
            part = unwrap_compiled(part)
        elif is_a(part, "torch.nn.parallel.distributed", "DistributedDataParallel"):
            part = part.module
        else:
            return part


def _examples(part: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Example | None]:
    """The inputs to try discovery with: a few tokens of the batch, a few of its examples, and guessed inputs."""
    try:
        bound = inspect.signature(part.forward).bind(*args, **kwargs)
    except TypeError:
        yield None
        return
    named = dict(bound.arguments)
    variadic = [x.name for x in bound.signature.parameters.values() if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    for name in variadic:
        more = named.pop(name, ())
        if isinstance(more, Mapping):
            named |= more
        elif more:  # arguments without a name cannot be passed again
            yield None
            return
    tensors = list(_tensors(named))
    if tensors:
        rows = len(tensors[0]) if tensors[0].ndim else 0
        tokens = next((x.shape[1] for x in tensors if x.ndim > 1 and not x.is_floating_point() and len(x) == rows), 0)
        if tokens > TOKENS:
            yield _cut(named, rows, tokens)
        yield _cut(named, rows, 0)
    yield None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _cut(value: Any, rows: int, tokens: int) -> Any:
    """A copy on the CPU with the first of `rows` examples, and with the first of `tokens` unless that is 0."""
    if isinstance(value, Mapping):
        return {name: _cut(x, rows, tokens) for name, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cut(x, rows, tokens) for x in value)
    if not isinstance(value, Tensor):
        return value
    cut = value.detach()
    if cut.ndim and len(cut) == rows:
        cut = cut[:BATCH]
    for axis in range(1, cut.ndim) if tokens else ():
        if cut.shape[axis] == tokens:
            cut = cut.narrow(axis, 0, TOKENS)
    return cut.cpu().clone()


SEVERAL = "it attends in several ways with the same maps, behind other norms, and what is observed is of all together"


def _match_sites(sites: Sequence[Site], weights: ModuleWeights, found: Discovered) -> dict[int, Site]:
    """The site of each layer, by its place among those found. A module that attends in several ways must have as many
    sites as layers, in the order of its calls; otherwise none is matched.
    """
    layers: dict[tuple[int, int], list[int]] = {}
    for place, layer in enumerate(found.layers):
        if layer.unknown_scale is None:
            layers.setdefault((id(weights.submodule(layer.name)), layer.heads), []).append(place)
    matched: dict[int, Site] = {}
    for key, places in layers.items():
        own = [site for site in sites if (id(site.module), site.count) == key]
        if len(own) == len(places):
            matched |= dict(zip(places, own, strict=True))
    return matched


def _gaps(
    sites: Sequence[Site], weights: ModuleWeights, found: Discovered, matched: Mapping[int, Site]
) -> Iterator[str]:
    reasons = {refusal.name: f"not read, because {refusal.reason}" for refusal in found.refused}
    reasons |= {layer.name: layer.unknown_scale for layer in found.layers if layer.unknown_scale is not None}
    by_module = {id(weights.submodule(name)): reason for name, reason in reasons.items()}
    ways = Counter(id(weights.submodule(layer.name)) for layer in found.layers)
    by_module |= {module: SEVERAL for module, count in ways.items() if count > 1 and module not in by_module}
    known = {id(site) for site in matched.values()}
    for site in sites:
        if id(site) not in known:
            yield f"{site.name}: {by_module.get(id(site.module), 'it did not run in the copy of the model')}"
