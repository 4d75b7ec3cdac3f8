"""`discover`: the attention layers of a model without a record, found in a forward pass and verified in another.

A copy of the model runs twice in float64, each time with all its parameters redrawn. From the first pass follows a
layout (`discovered_layout`): names of tensors, rows, norms, frequencies. On the second pass the layers of that layout
must give the logits and the output that the copy computed, every number within 1e-6 of their standard deviation. What
does not is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from locater.checkpoints.weights import ModuleWeights
from locater.errors import LocaterError, first_line
from locater.families.coverage import attention_like
from locater.families.discovered_calls import UnreadableError
from locater.families.discovered_layout import AttentionLayout
from locater.families.discovered_passes import two_passes
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
    layouts: list[AttentionLayout]


def discover(model: nn.Module, example: Mapping[str, Any] | None = None) -> Discovered:
    """Find and verify every softmax attention of a live model. `example` are arguments of its forward pass: small
    inputs of any content; they are guessed where they are not given.

    The model is not changed: a copy of it runs.
    """
    weights = ModuleWeights(model)
    first, second = two_passes(model, example)
    layouts: list[AttentionLayout] = []
    refused: list[Refusal] = []
    if [call.path for call in first.calls] != [call.path for call in second.calls]:
        raise LocaterError(f"{weights.where}: with other weights it runs other attention: give it a record")
    for one, two in zip(first.calls, second.calls, strict=True):
        try:
            layout = verified(read_layout(first.tape, one), second, two)
        except UnreadableError as error:
            refused.append(Refusal(plain(one.path), str(error)))
        except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
            refused.append(Refusal(plain(one.path), f"reading it failed ({type(error).__name__}: {first_line(error)})"))
        else:
            if layout not in layouts:  # a module that runs twice is one layer
                layouts.append(layout)
    layers = [layout.build(weights, index) for index, layout in enumerate(layouts)]
    ran = {plain(path) for path in first.tape.called}
    unreached = [path for path in attention_like(weights) if path not in ran]
    return Discovered(layers, refused, unreached, layouts)
