"""The query-key maps of a model without a record, discovered with the first batch that it is trained on.

A copy of the model runs on two examples of that batch, on the CPU in float64 (`locater.discover`): of nine tokens where
the model takes so few. The model, its gradients, its buffers and the random state stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from locater.discovery.example_settings import BATCH, TOKENS
from locater.discovery.record_or_discovery import Reading, reading_of
from locater.discovery.verified_search import Discovered, discovered_in
from locater.errors import LocaterError
from locater.observing.listening_site import Site
from locater.sources.live_tensors import is_a
from locater.sources.weights import ModuleWeights
from locater.torch_private import is_compiled_wrapper, unwrap_compiled

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
    known = {id(site) for site in matched.values()}
    for site in sites:
        if id(site) not in known:
            yield f"{site.name}: {by_module.get(id(site.module), 'it did not run in the copy of the model')}"
