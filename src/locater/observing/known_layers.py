"""The attention layers of a model as an observation needs them, remembered as long as the model keeps its form.

Finding the layers takes names, patterns and a configuration: milliseconds, in which a GPU waits. The form of a model is
all that they follow from: its modules by name and class, the shapes of their parameters, its configuration, the
settings of its attention modules, and the registered families. It is compared at each observation, so that a layer that
was replaced, pruned or adapted is found anew.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parameter import UninitializedParameter

from locater.checkpoints.live_tensors import is_a
from locater.checkpoints.sources import open_source
from locater.checkpoints.weights import ModuleWeights
from locater.families import attention_layers
from locater.families.reading import reader_for
from locater.families.record import Family
from locater.families.registry import BY_TYPE, family_of

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
class _Remembered:
    known: KnownLayers
    form: list[Any]
    configurations: list[tuple[type, Any]]
    settings: list[dict[str, Any]]
    registered: int


_remembered: WeakKeyDictionary[nn.Module, _Remembered] = WeakKeyDictionary()


def known_layers(model: nn.Module) -> tuple[KnownLayers, list[nn.Module]]:
    """The layers of a model that a family reads, and the parts of the model; raises where no family does."""
    parts, form = parts_of(model)
    before = _remembered.get(model)
    if before is not None and form is not None and _is_as_before(before, parts, form):
        return before.known, parts
    known = _found(model, parts)
    if form is not None:
        settings = _settings(known.layers, parts)
        with suppress(Exception):  # a configuration may hold anything, also what cannot be copied
            configurations = copy.deepcopy(_configurations(parts))
            _remembered[model] = _Remembered(known, form, configurations, settings, BY_TYPE.changes)
    return known, parts


def _found(model: nn.Module, parts: list[nn.Module]) -> KnownLayers:
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


def parts_of(model: nn.Module) -> tuple[list[nn.Module], list[Any] | None]:
    """Every module once, and the form of the model: names, classes, shapes. No form where the same modules may take
    another one by themselves: lazy parameters, and copies of modules among which peft chooses.
    """
    parts: list[nn.Module] = []
    form: list[Any] = []
    numbers: dict[int, int] = {}
    stable, waiting = True, [model]
    while waiting:
        part = waiting.pop()
        if id(part) in numbers:
            form.append(numbers[id(part)])
            continue
        numbers[id(part)] = len(parts)
        parts.append(part)
        children, parameters, buffers = part._modules, part._parameters, part._buffers
        form.append(type(part))
        if children:
            form.append(tuple(children))
            waiting.extend([child for child in reversed(children.values()) if child is not None])
            stable = stable and not is_a(part, "peft.utils.other", "ModulesToSaveWrapper")
        if parameters:
            if any(isinstance(p, UninitializedParameter) for p in parameters.values()):
                return parts + [x for x in model.modules() if id(x) not in numbers], None
            form.extend((name, None if p is None else (p.shape, p.dtype, p.device)) for name, p in parameters.items())
        if buffers:
            form.append(tuple(buffers))
    return parts, form if stable else None


def _is_as_before(before: _Remembered, parts: list[nn.Module], form: list[Any]) -> bool:
    try:
        return (
            before.registered == BY_TYPE.changes
            and before.form == form
            and before.configurations == _configurations(parts)
            and before.settings == _settings(before.known.layers, parts)
        )
    except Exception:  # nor compared
        return False


def _configurations(parts: Sequence[nn.Module]) -> list[tuple[type, Any]]:
    """The class and the attributes of each configuration that a module has."""
    each = {id(config): config for part in parts if (config := part.__dict__.get("config")) is not None}
    return [(type(config), getattr(config, "__dict__", config)) for config in each.values()]


def _settings(layers: Sequence[KnownLayer], parts: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Numbers and words among the attributes of each attention module."""
    return [
        {name: x for name, x in vars(parts[layer.part]).items() if type(x) in SETTINGS and name != "training"}
        for layer in layers
    ]
