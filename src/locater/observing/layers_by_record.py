"""The attention layers of a model as an observation needs them, remembered as long as the model keeps its form.

Finding the layers takes names, patterns and a configuration: milliseconds, in which a GPU waits. The form of a model is
all that they follow from: its modules by name and class, the shapes of the parameters of attention, its configuration,
the settings of its attention modules, and the registered families. It is compared at each observation, so that a layer
that was replaced, pruned or adapted is found again. Modules are referred to weakly: nothing is kept from being freed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.parameter import UninitializedParameter

from locater.discovery import attention_layers
from locater.discovery.record_or_discovery import reader_for
from locater.families.record import Family
from locater.families.registry import BY_TYPE, family_of
from locater.sources.live_tensors import is_a
from locater.sources.open_source import open_source
from locater.sources.weights import ModuleWeights
from locater.torch_private import own_children, own_parameters

SETTINGS = (bool, int, float, str)  # of a module: what its layer may be read from besides its parameters


@dataclass(frozen=True)
class KnownLayer:
    """One attention layer, and which of the model's parts (`parts_of`) is its module."""

    number: int
    name: str
    kind: str
    heads: int
    group: int
    output_size: int | None  # of a head; None where the layer has no values of its own
    part: int


@dataclass(frozen=True)
class KnownLayers:
    """The layers of a model, numbered as in a scan, and its family."""

    layers: list[KnownLayer]
    family: Family | None


@dataclass(frozen=True)
class _Part:
    """A module as it was: its class, its children by name (numbers of parts, None for none), how many parameters."""

    module: ref[nn.Module]
    kind: type[nn.Module]
    names: tuple[str, ...]
    children: tuple[int | None, ...]
    parameters: int


@dataclass(frozen=True)
class _CachedForm:
    known: KnownLayers
    parts: list[_Part]
    configured: list[int]  # the parts that have a configuration
    configurations: list[tuple[type, Any]]
    settings: list[dict[str, Any]]
    shapes: list[list[Any]]
    registered: int


_cached_forms: WeakKeyDictionary[nn.Module, _CachedForm] = WeakKeyDictionary()


def known_layers(model: nn.Module) -> tuple[KnownLayers, list[nn.Module]]:
    """The layers of a model that a family reads, and the parts of the model; raises where no family does."""
    before = _cached_forms.get(model)
    parts = None if before is None else _unchanged_parts(before)
    if before is not None and parts is not None:
        return before.known, parts
    parts = parts_of(model)
    known = _read_layers(model, parts)
    with suppress(Exception):  # a configuration may hold anything, also what cannot be copied or compared
        if _is_stable(parts):
            _cached_forms[model] = _form_of(known, parts)
    return known, parts


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Every module once, as `model.modules()`, which takes five times as long."""
    parts: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        part = waiting.pop()
        if id(part) not in parts:
            parts[id(part)] = part
            if own_children(part):
                waiting += [child for child in own_children(part).values() if child is not None]
    return list(parts.values())


def _read_layers(model: nn.Module, parts: list[nn.Module]) -> KnownLayers:
    reader_for(*open_source(model))  # discovery reads more, but what it finds is observed by its calls
    weights, place = ModuleWeights(model), {id(part): at for at, part in enumerate(parts)}
    layers = [
        KnownLayer(
            number,
            layer.name,
            layer.kind,
            layer.heads,
            layer.group,
            None if layer.value is None else layer.value.shape[0] // layer.kv_heads,
            place[id(weights.submodule(layer.name))],
        )
        for number, layer in enumerate(attention_layers(model))
    ]
    return KnownLayers(layers, family_of(model))


def _is_stable(parts: Sequence[nn.Module]) -> bool:
    """Whether layers follow from the form. Lazy parameters have no shape yet; peft chooses among copies of modules."""
    lazy = any(isinstance(p, UninitializedParameter) for part in parts for p in own_parameters(part).values())
    return not lazy and not any(is_a(part, "peft.utils.other", "ModulesToSaveWrapper") for part in parts)


def _form_of(known: KnownLayers, parts: list[nn.Module]) -> _CachedForm:
    number = {id(part): at for at, part in enumerate(parts)}
    form = [
        _Part(
            ref(part),
            type(part),
            tuple(own_children(part)),
            tuple(None if child is None else number[id(child)] for child in own_children(part).values()),
            len(own_parameters(part)),
        )
        for part in parts
    ]
    configured = [at for at, part in enumerate(parts) if at == 0 or part.__dict__.get("config") is not None]
    configurations = copy.deepcopy(_configurations([parts[at] for at in configured]))
    settings, shapes = _settings(known.layers, parts), _shapes(known.layers, parts)
    return _CachedForm(known, form, configured, configurations, settings, shapes, BY_TYPE.changes)


def _unchanged_parts(before: _CachedForm) -> list[nn.Module] | None:
    """The parts of a model that is as it was; None where it is not."""
    parts = [part.module() for part in before.parts]
    for module, part in zip(parts, before.parts, strict=True):
        if module is None or type(module) is not part.kind or len(own_parameters(module)) != part.parameters:
            return None
        children = own_children(module)
        if part.names or children:
            if tuple(children) != part.names:
                return None
            for child, at in zip(children.values(), part.children, strict=True):
                if child is not (None if at is None else parts[at]):
                    return None
    there: list[nn.Module] = parts  # type: ignore[assignment]
    try:
        same = (
            before.registered == BY_TYPE.changes
            and before.configurations == _configurations([there[at] for at in before.configured])
            and before.settings == _settings(before.known.layers, there)
            and before.shapes == _shapes(before.known.layers, there)
        )
    except Exception:  # attributes of a configuration that cannot be compared count as changed
        return None
    return there if same else None


def _configurations(parts: Sequence[nn.Module]) -> list[tuple[type, Any]]:
    """The class and the attributes of each configuration that a module has."""
    each = {id(config): config for part in parts if (config := part.__dict__.get("config")) is not None}
    return [(type(config), getattr(config, "__dict__", config)) for config in each.values()]


def _settings(layers: Sequence[KnownLayer], parts: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Numbers and words among the attributes of each attention module."""
    return [
        {name: x for name, x in parts[layer.part].__dict__.items() if type(x) in SETTINGS and name != "training"}
        for layer in layers
    ]


def _shapes(layers: Sequence[KnownLayer], parts: Sequence[nn.Module]) -> list[list[Any]]:
    """Of the parameters of each attention module and of its children."""
    return [
        [
            None if p is None else p.shape
            for part in (parts[layer.part], *own_children(parts[layer.part]).values())
            if part is not None
            for p in own_parameters(part).values()
        ]
        for layer in layers
    ]
