"""What all controls have in common. Controls compose: attach several, add their losses, step them all.

    control = locater.LocAteR().attach(model)
    (loss + control.loss()).backward(); optimizer.step(); control.after_step()
    control.detach()

`detach` restores the model, except for the side effects that the docstring of a control lists.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.layers import AttentionLayer

Layers = Sequence[int] | None


class Control:
    """A change to a model, or to its training, that can be undone.

    A subclass refuses models in `_check`, does its work in `_attach` and `_detach`, adds to the loss in `loss`, and
    acts after an optimizer step in `after_step`. Each of these does nothing by default.

    A class states what its controls need, learn and save, for the trainers that run them:

    - `needs_softmax`: it reads or changes attention logits as those of a softmax, so other mechanisms are refused.
    - `precedes_mechanism`: it acts before `SwapMechanism` does, so the model's own attention has to be a softmax.
    - `softmax_remedy`: what to do when `needs_softmax` is not met, for the message, such as "give it init=1.0".
    - `loss_needs_forward_graph`: `loss` uses the graph of the last forward pass, so it must come before `backward`.
    - `state_attributes`: names of attributes, such as counters and running means, that belong in a checkpoint.
    - `parameters()`: what it learns in addition to the parameters of the model.
    """

    model: nn.Module | None = None
    layers: Layers = None
    needs_softmax: bool = False
    precedes_mechanism: bool = False
    softmax_remedy: str = ""
    loss_needs_forward_graph: bool = False
    state_attributes: tuple[str, ...] = ()

    def attach(self, model: nn.Module) -> Self:
        """Start controlling a model, whose attention Locater must be able to read."""
        if self.model is not None:
            raise LocaterError(f"{type(self).__name__} is already attached: detach it first, or create another")
        self._attach(model)
        self.model = model
        return self

    def can_attach(self, model: nn.Module) -> bool:
        """Whether `attach` would accept the model as it is. Nothing is changed."""
        try:
            self._check(model)
        except Exception:  # a foreign model may raise anything while its weights are read: then the answer is no
            return False
        return self.model is None

    def detach(self) -> None:
        """Stop, and undo `attach`. May be called twice."""
        if self.model is not None:
            self._detach(self.model)
            self.model = None

    def loss(self) -> Tensor:
        """What to add to the loss of this step; a zero on the model's device if there is nothing to add."""
        return torch.zeros((), device=device_of(self.attached))

    def after_step(self) -> None:
        """Call after each optimizer step."""

    def parameters(self) -> list[nn.Parameter]:
        """What the control learns, for the optimizer. These are not among `model.parameters()`."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the run needs of this control; tensors are copied."""
        return {name: _copy(getattr(self, name)) for name in self.state_attributes}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a control of the same class and options."""
        if state.keys() != set(self.state_attributes):
            expected = ", ".join(self.state_attributes) or "nothing"
            raise LocaterError(
                f"{type(self).__name__}: this state holds {', '.join(state) or 'nothing'}, and {expected} was expected"
            )
        for name, value in state.items():
            current = getattr(self, name, None)
            if isinstance(current, Tensor) and isinstance(value, Tensor) and current.shape == value.shape:
                current.copy_(value)  # in place: others may use the same tensor
            else:
                setattr(self, name, _copy(value))

    def acts_on(self, layer: int) -> bool:
        """Whether the layer with this number, as in a scan, was chosen."""
        return self.layers is None or layer in self.layers

    def mechanism_of(self, layer: int, before: str) -> str:
        """The name of a layer's attention mechanism under this control; `before` is its name without the control."""
        return before

    @property
    def attached(self) -> nn.Module:
        """The model; an error if there is none."""
        if self.model is None:
            raise LocaterError(f"{type(self).__name__} is not attached: call control.attach(model) first")
        return self.model

    def _check(self, model: nn.Module) -> Any:
        """Raise if the control does not fit this model, without changing it. What it returns is for `_attach`."""

    def _attach(self, model: nn.Module) -> None:
        """Attach. Subclasses call `_check` first, which raises before anything is changed."""

    def _detach(self, model: nn.Module) -> None:
        """Undo `_attach`."""

    def __repr__(self) -> str:
        options = [name for name in known_options(type(self)) if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in options)})"


class Controls(Control):
    """Several controls as one: attached in this order, detached in reverse order."""

    def __init__(self, controls: Iterable[Control]) -> None:
        self.controls = list(controls)

    def _check(self, model: nn.Module) -> None:
        """Check each control on the model as it is, not as changed by the controls before it."""
        for control in self.controls:
            control._check(model)

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
        total = super().loss()
        for control in self.controls:
            total = total + control.loss()
        return total

    def after_step(self) -> None:
        for control in self.controls:
            control.after_step()

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for control in self.controls for parameter in control.parameters()]

    def state_dict(self) -> dict[str, Any]:
        """The state of each control, by its place in the list."""
        return {str(place): control.state_dict() for place, control in enumerate(self.controls)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state) != len(self.controls):
            raise LocaterError(f"this state has {len(state)} controls, and there are {len(self.controls)}")
        for place, control in enumerate(self.controls):
            control.load_state_dict(state[str(place)])

    def mechanism_of(self, layer: int, before: str) -> str:
        for control in self.controls:
            before = control.mechanism_of(layer, before)
        return before


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def self_layers(model: nn.Module, chosen: Layers) -> list[AttentionLayer]:
    """Self-attention layers of a live model: those numbered in `chosen`, as in a scan, or all.

    Re-read at each call: what is folded into a layer, such as 1 + gain, depends on the current weights.
    """
    return chosen_layers(attention_layers(model), chosen, type(model).__name__)


def chosen_layers(layers: Iterable[AttentionLayer], chosen: Layers, where: str) -> list[AttentionLayer]:
    """The layers numbered in `chosen`, without cross-attention; an error if none is left."""
    self_attention = [layer for layer in layers_numbered(layers, chosen) if layer.kind == "self"]
    if not self_attention:
        raise LocaterError(f"{where}: no self-attention among the chosen layers, so there is nothing to control")
    return self_attention


def layers_numbered(layers: Iterable[AttentionLayer], chosen: Layers) -> list[AttentionLayer]:
    """The layers numbered in `chosen`, or all if it is None. Numbers out of range and an empty list are refused."""
    every = list(layers)
    if chosen is None:
        return every
    if not chosen or any(not 0 <= i < len(every) for i in chosen):
        raise LocaterError(f"layers={list(chosen)}: there are {len(every)}, numbered from 0")
    return [every[i] for i in chosen]


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def known_options(kind: type[Control]) -> dict[str, Any]:
    """Options of a control and their defaults."""
    parameters = inspect.signature(kind.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}
