"""Discovery for a checkpoint on disk whose architecture has no record, from its config.json.

The class that config.json names is built twice: in full without weights (meta device), for the names and shapes of all
tensors, and small with random weights (`small_config`), to be discovered and verified. The layouts are carried over to
all layers (`carried_layouts`), and tensors are read from disk by their names there (`checkpoints.renamed`).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch import nn

from locater.calls.coverage import attention_like
from locater.discovery.cache import Kept, cache_file, keep, kept
from locater.discovery.carried_layouts import Searched
from locater.discovery.searching import Discovered, Refusal
from locater.discovery.small_models import built, described, search_small
from locater.discovery.tree import tensor_names
from locater.errors import LocaterError
from locater.sources.renamed import Origin, Origins, RenamedWeights, origins_of
from locater.sources.sources import Config
from locater.sources.weights import ModuleWeights, Weights, quantised_modules, quantised_names

_SEARCHED: ContextVar[dict[int, Kept | LocaterError] | None] = ContextVar("searched", default=None)
MOST_TENSORS = 5_000  # of a model, beside four for each that its checkpoint holds
NO_PLACE = "the model that config.json describes has no place for it"


def discovered_on_disk(weights: Weights, config: Config, example: Mapping[str, Any] | None = None) -> Discovered:
    """Attention layers of a checkpoint, found in a small model of its class. `example` as for `discover`."""
    path = None if example is not None else cache_file(weights, config)
    content = kept(path)
    if content is None:
        content = _searched_once(weights, config, example)
        keep(path, content)
    renamed = RenamedWeights(weights, content.origins)
    searched = content.searched
    formats = quantised_modules(renamed)
    built_layers = [layout.build(renamed, index) for index, layout in enumerate(searched.layouts)]
    layers = [replace(layer, quantised=formats.get(layer.name)) for layer in built_layers]
    return Discovered(layers, searched.refused, searched.unreached)


@contextlib.contextmanager
def searched_once() -> Iterator[None]:
    """Inside, a checkpoint that is read twice (once to plan its reads) is searched once."""
    token = _SEARCHED.set({})
    try:
        yield
    finally:
        _SEARCHED.reset(token)


def _searched_once(weights: Weights, config: Config, example: Mapping[str, Any] | None) -> Kept:
    """What a search finds, or how it failed, as it was found before inside `searched_once`."""
    known = _SEARCHED.get()
    results: dict[int, Kept | LocaterError] = {} if known is None else known
    if id(weights) not in results:
        try:
            with _quiet():
                results[id(weights)] = _searched(weights, config, example)
        except LocaterError as error:
            results[id(weights)] = error
    result = results[id(weights)]
    if isinstance(result, LocaterError):
        raise result
    return result


def _searched(weights: Weights, config: Config, example: Mapping[str, Any] | None) -> Kept:
    """What a search finds, for the whole checkpoint, and where each of its tensors is on disk."""
    kind, settings = described(weights, config)
    most = MOST_TENSORS + 4 * len(weights.names())
    full = built(kind, settings, "meta", weights.where, most)
    origins, whole = origins_of(weights, full), ModuleWeights(full)
    _refuse_other_attention(weights, origins, whole)
    searched = search_small(weights, kind, settings, whole, example, _numbers_stored(weights, origins, full))
    unused = RenamedWeights(weights, {name: Origin((name,)) for name in origins.unused})
    refused = [*searched.refused, *(Refusal(path, NO_PLACE) for path in attention_like(unused))]
    known = set(whole.names())
    names = dict.fromkeys(name for layout in searched.layouts for name in tensor_names(layout, known))
    stored = {name: _stored(weights, origins, name, whole.shape(name)) for name in names}
    return Kept(Searched(searched.layouts, refused, searched.unreached), stored)


def _refuse_other_attention(weights: Weights, origins: Origins, whole: ModuleWeights) -> None:
    """Refuse a checkpoint that does not hold the attention of the model that config.json describes, by names and shapes
    alone, before anything runs: what runs has the size that config.json says.
    """
    paths = tuple(f"{path}." if path else "" for path in attention_like(whole))
    maps = [name for name, p in whole.module.named_parameters() if p.ndim > 1 and name.startswith(paths)]
    for name in maps if paths else ():
        if name not in origins.changed:
            _stored(weights, origins, name, whole.shape(name))


def _numbers_stored(weights: Weights, origins: Origins, full: nn.Module) -> int:
    """How many numbers the checkpoint holds; of packed tensors those that the model has there."""
    packed = quantised_names(weights)
    plain = sum(math.prod(weights.shape(name)) for name in weights.names() if name not in packed)
    held = {name for name, origin in origins.stored.items() if not packed.keys().isdisjoint(origin.names)}
    return plain + sum(p.numel() for name, p in full.named_parameters() if name in held)


def _stored(weights: Weights, origins: Origins, name: str, shape: tuple[int, ...]) -> Origin:
    """Where a tensor of the model is on disk; refused where it is not there, or not of the shape that it has."""
    if name in origins.changed:
        raise LocaterError(
            f"{weights.where}: {name} is changed when transformers loads it, and its rows cannot be followed "
            f"({origins.changed[name]}): load the model and scan that"
        )
    if name not in origins.stored:
        raise LocaterError(f"{weights.where}: the tensor {name} is missing; the checkpoint is incomplete")
    origin = origins.stored[name]
    there = RenamedWeights(weights, {name: origin}).shape(name)
    if there != shape:
        raise LocaterError(
            f"{weights.where}: {origin.names[0]} has shape {list(there)} but the configuration says {list(shape)}"
        )
    return origin


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of transformers: it warns of settings of models that nobody runs."""
    try:
        from transformers.utils import logging
    except ImportError:
        yield
        return
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
