"""What every control offers: attach, loss, after_step, detach. Controls compose: attach several, add their losses, step
them all.

    control = locater.LocAteR().attach(model)
    (loss + control.loss()).backward(); optimizer.step(); control.after_step()
    control.detach()

A control that is detached leaves no trace, but for what it says it leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.families import AttentionLayer, attention_layers

Layers = Sequence[int] | None


class Control:
    """A change to a model, or to its training, that can be taken off again.

    Subclasses say what they do in `_attach` and `_detach`, what they add to the loss in `loss`, and what they do after
    an optimizer step in `after_step`; each of these does nothing unless said.
    """

    model: nn.Module | None = None
    # whether `loss` needs the graph of the last forward pass, and so must come before backward
    penalty_of_forward = False

    def attach(self, model: nn.Module) -> Self:
        """Begin; the model must have attention that Locater can read."""
        if self.model is not None:
            raise LocaterError(f"{type(self).__name__} is attached already: detach it first, or make another")
        self._attach(model)
        self.model = model
        return self

    def detach(self) -> None:
        """End, and take everything off. May be called twice."""
        if self.model is not None:
            self._detach(self.model)
            self.model = None

    def loss(self) -> Tensor:
        """What to add to the loss of this step; a zero on the model's device where there is nothing."""
        return torch.zeros((), device=device_of(self.attached))

    def after_step(self) -> None:
        """Call after each optimizer step."""

    @property
    def attached(self) -> nn.Module:
        if self.model is None:
            raise LocaterError(f"{type(self).__name__} is not attached: control.attach(model) comes first")
        return self.model

    def _attach(self, model: nn.Module) -> None:
        """Subclasses begin here; raise before anything is changed."""

    def _detach(self, model: nn.Module) -> None:
        """Subclasses take off what they put on."""

    def __repr__(self) -> str:
        names = [n for n in inspect.signature(type(self).__init__).parameters if n != "self"]
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names if hasattr(self, n))})"


class Controls(Control):
    """Several controls as one, in the order given; detached in reverse."""

    def __init__(self, controls: Iterable[Control]) -> None:
        self.controls = list(controls)

    def _attach(self, model: nn.Module) -> None:
        done: list[Control] = []
        try:
            for control in self.controls:
                done.append(control.attach(model))
        except BaseException:
            for control in reversed(done):
                control.detach()
            raise

    def _detach(self, model: nn.Module) -> None:
        for control in reversed(self.controls):
            control.detach()

    def loss(self) -> Tensor:
        found = super().loss()
        for control in self.controls:
            found = found + control.loss()
        return found

    def after_step(self) -> None:
        for control in self.controls:
            control.after_step()


def self_layers(model: nn.Module, chosen: Layers) -> list[AttentionLayer]:
    """Self-attention layers of a live model, those numbered in `chosen` (as in a scan) or all.

    Read anew at each call: what is folded into a layer, such as 1 + gain, belongs to the weights of that moment.
    """
    return chosen_layers(attention_layers(model), chosen, type(model).__name__)


def chosen_layers(layers: Iterable[AttentionLayer], chosen: Layers, where: str) -> list[AttentionLayer]:
    """Those numbered in `chosen`, without cross-attention."""
    kept = [layer for layer in layers_numbered(layers, chosen) if layer.kind == "self"]
    if not kept:
        raise LocaterError(f"{where}: no self-attention among the chosen layers, so there is nothing to control")
    return kept


def layers_numbered(layers: Iterable[AttentionLayer], chosen: Layers) -> list[AttentionLayer]:
    """Those numbered in `chosen`, all where None; a number that is not there, or none at all, is refused."""
    found = list(layers)
    if chosen is None:
        return found
    if not chosen or any(not 0 <= i < len(found) for i in chosen):
        raise LocaterError(f"layers={list(chosen)}: there are {len(found)}, numbered from 0")
    return [found[i] for i in chosen]


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def trained(weight: Tensor) -> bool:
    """Whether a gradient can reach a weight."""
    return bool(weight.requires_grad)


def known_options(kind: type[Control]) -> dict[str, Any]:
    """Options of a control and their defaults."""
    return {n: p.default for n, p in inspect.signature(kind.__init__).parameters.items() if n != "self"}
