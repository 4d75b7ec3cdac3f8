"""`discover`: the attention layers of a model without a record, found in a forward pass and verified in another.

A copy of the model runs twice in float64, each time with all its parameters redrawn. From the first pass follows a
layout (`discovered_layout`): names of tensors, rows, norms, frequencies. On the second pass the layers of that layout
must give the logits and the output that the copy computed, every number within 1e-6 of their standard deviation. What
does not is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from locater.checkpoints.sources import config_of
from locater.checkpoints.weights import ModuleWeights
from locater.errors import LocaterError, first_line
from locater.families.coverage import attention_like
from locater.families.discovered_calls import UnreadableError
from locater.families.discovered_layout import AttentionLayout
from locater.families.discovered_passes import passes
from locater.families.discovered_reading import plain, read_layout
from locater.families.discovered_verifying import verified
from locater.families.layer import AttentionLayer


@dataclass(frozen=True)
class Refusal:
    """An attention call that could not be read or verified."""

    name: str  # path of its module
    reason: str


@dataclass(frozen=True)
class Discovered:
    """Attention layers that were verified, those that were refused, and modules that look like attention and did not
    run."""

    layers: list[AttentionLayer]
    refused: list[Refusal]
    unreached: list[str]


def discover(model: nn.Module, example: Mapping[str, Any] | None = None) -> Discovered:
    """Find and verify every softmax attention of a live model. `example` holds arguments of its forward pass: small
    inputs of any content, guessed where they are not given.

    The model is not changed: a copy of it runs, on the CPU in float64. What was found is kept with the model, and used
    again while its tensors and its configuration stay the same.
    """
    weights = ModuleWeights(model)
    state = _state(weights)
    if example is None and model in _CACHE and _CACHE[model][0] == state:
        layouts, refused, unreached = _CACHE[model][1:]
    else:
        layouts, refused, unreached = _searched(model, weights, example)
        _CACHE[model] = (state, layouts, refused, unreached)
    return Discovered(
        [layout.build(weights, index) for index, layout in enumerate(layouts)], list(refused), list(unreached)
    )


# model -> (its state, layouts, refusals, modules that did not run)
_CACHE: WeakKeyDictionary[nn.Module, tuple[Any, list[AttentionLayout], list[Refusal], list[str]]] = WeakKeyDictionary()


def _state(weights: ModuleWeights) -> tuple[Any, ...]:
    shapes = tuple((name, weights.shape(name)) for name in weights.names())
    return shapes, repr(sorted(config_of(weights.module).items(), key=lambda item: item[0]))


@torch.no_grad()
def _searched(
    model: nn.Module, weights: ModuleWeights, example: Mapping[str, Any] | None
) -> tuple[list[AttentionLayout], list[Refusal], list[str]]:
    """(layouts, refusals, modules that look like attention and did not run)."""
    runs = passes(model, example)
    first = next(runs)
    readings = [_attempt(partial(read_layout, first.tape, call)) for call in first.calls]
    names = [plain(call.path) for call in first.calls]
    second = next(runs)
    if names != [plain(call.path) for call in second.calls]:
        raise LocaterError(f"{weights.where}: it runs other attention when its parameters are redrawn")
    layouts: list[AttentionLayout] = []
    refused: list[Refusal] = []
    for reading, name, call in zip(readings, names, second.calls, strict=True):
        if isinstance(reading, AttentionLayout):
            reading = _attempt(partial(verified, reading, second, call))
        if isinstance(reading, str):
            refused.append(Refusal(name, reading))
        elif reading not in layouts:  # a module that runs twice is one layer
            layouts.append(reading)
    ran = {plain(path) for path in first.tape.called}
    return layouts, refused, [path for path in attention_like(weights) if path not in ran]


def _attempt(read: Callable[[], AttentionLayout]) -> AttentionLayout | str:
    """A layout, or the reason why there is none."""
    try:
        return read()
    except UnreadableError as error:
        return str(error)
    except (LocaterError, RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        return f"reading it failed ({type(error).__name__}: {first_line(error)})"
