"""What controls of the forward pass share. They act at the attention interface of transformers, with any backend.

Changes to one call come in a fixed order, whichever control was attached first: QKNorm, Temperature, LogitSoftcap or
SwapMechanism, EntropyPenalty. Then `observe` and `Monitor` see the result. So a temperature is not normalised away, and
entropy is that of the attention map in use. A scan reads weights alone and sees none of these changes.

Parameters of a control are its own: give `control.parameters()` to the optimizer and save `control.state_dict()` with
that of the model. In a distributed run every rank has all of them. DDP and FSDP2 do not know of them, so their
gradients are averaged here, in each backward pass; where heads are split over ranks each rank uses the entries of its
heads.

A copy of the model (`copy.deepcopy`, pickling, `torch.save(model)`, a running average) computes what the model
computes. It carries the changes, with parameters of its own, and keeps them when the control is detached from the
original. `carried_changes(copy)` lists them. They are not part of `state_dict`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from locater.brief import brief
from locater.calls import attention_interface
from locater.calls.head_removal import InterceptedHeads
from locater.calls.interceptors import Interceptor, add_interceptor, interceptors, remove_interceptor, renumber
from locater.calls.patching import CONTROL, force_retrace, replace_method
from locater.control.base import Control, Layers, device_of, layers_numbered
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.families.registry import family_of
from locater.families.taps import refuse_unobservable
from locater.layers import AttentionLayer
from locater.layers.layer import Kind
from locater.layers.tensor_parallel import WHOLE, Split, SplitHeads
from locater.sources.weights import ModuleWeights

logger = logging.getLogger("locater")
NORM, TEMPERATURE, CAP, MEASURE = range(4)  # order of changes on one module
SUPPORTED = (
    "GPT-2, GPT-NeoX, Llama, Mistral, Qwen, Gemma, Phi, OPT, DeepSeek, BERT, T5, BART, Whisper, ViT, CLIP "
    "and their relatives do"
)


@dataclass(frozen=True)
class Heads:
    """What a change knows about its layer: plain numbers, so that a copy of the model can carry them."""

    name: str
    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    split: Split = WHOLE  # which of them this rank computes

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class ControlledLayer:
    """An attention layer that a control changes, and the module that computes it."""

    layer: AttentionLayer
    module: nn.Module
    device: torch.device
    split: Split = WHOLE

    @property
    def heads(self) -> Heads:
        layer = self.layer
        numbers = layer.heads, layer.kv_heads, layer.head_dim, layer.scale
        return Heads(layer.name, layer.kind, *numbers, layer.causal, self.split)

    def parameter(self, values: Tensor, learn: bool) -> nn.Parameter:
        """A new parameter in float32, on the device of the module. Its gradient is that of all ranks."""
        parameter = nn.Parameter(values.to(self.device, torch.float32), requires_grad=learn)
        if learn:
            parameter.register_hook(partial(_average_over_ranks, self.split.parts))
        return parameter


def _average_over_ranks(parts: int, gradient: Tensor) -> Tensor:
    """The mean of a gradient over the batches of all ranks. If heads are split, each rank has that of its part."""
    total = gradient.contiguous().clone()  # autograd may use the same memory elsewhere
    return total * (parts / add_over_ranks(total))


def add_over_ranks(x: Tensor) -> int:
    """Sum a tensor over all ranks of a distributed run, in place. Returns the number of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    dist.all_reduce(x)
    return dist.get_world_size()


class ForwardChange(Interceptor):
    """A change that a control has made to one attention module.

    `control` is the repr of the control. `mechanism` is the name of the attention mechanism of the module under this
    change, and `cap` the soft-cap on its logits; None if the change does not affect them.
    """

    heads: Heads
    control = ""
    mechanism: str | None = None
    cap: float | None = None

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Its parameters by name."""
        return {}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A copy of the model, or a saved one, has a copy of the change: without it that would be another model."""
        if any(p.requires_grad for p in self.parameters_by_name().values()):
            _warn_about_parameters(self.control)
        return _rebuild_change, (type(self), {name: value for name, value in vars(self).items() if name != "number"})


def _rebuild_change(kind: type[ForwardChange], attributes: dict[str, Any]) -> ForwardChange:
    change = kind.__new__(kind)
    vars(change).update(attributes)
    attention_interface.keep_installed(renumber(change))
    return change


@cache  # once for each kind of control
def _warn_about_parameters(control: str) -> None:
    logger.warning(
        "%s: a copy of its model has parameters that are not among model.parameters(), so a running average "
        "does not update them: average those of locater.control.carried_changes(copy) too",
        control,
    )


def forward_changes(module: nn.Module) -> list[ForwardChange]:
    """The changes that controls have made to an attention module, in the order in which they act."""
    return [change for change in interceptors(module) if isinstance(change, ForwardChange)]


@dataclass(frozen=True)
class CarriedChange:
    """What a control has changed in one module of a model, or of the model that it was copied from."""

    module: str
    control: str
    parameters: dict[str, nn.Parameter]

    __repr__ = brief


def carried_changes(model: nn.Module) -> list[CarriedChange]:
    """Changes of controls that act in the forward pass of a model: attached to it, or to the model it was copied from.

    >>> import copy
    >>> from locater.control import Temperature
    >>> from locater_lab.train import Shape, Transformer
    >>> model = Transformer(Shape(width=16, heads=2, kv_heads=2, layers=1, hidden=24))
    >>> _ = Temperature(learn=False).attach(model)
    >>> [(change.module, change.control) for change in carried_changes(copy.deepcopy(model))]
    [('model.layers.0.self_attn', 'Temperature(init=1.0, learn=False, layers=None)')]
    """
    rows: list[CarriedChange] = []
    for name, module in model.named_modules():
        rows += [CarriedChange(name, change.control, change.parameters_by_name()) for change in forward_changes(module)]
        removed = [change.control for change in interceptors(module) if isinstance(change, InterceptedHeads)]
        rows += [CarriedChange(name, control, {}) for control in removed if control is not None]
        parts = (module, *vars(module).values())  # a parametrization, and what stands for a method
        rows += [
            CarriedChange(name, vars(part)[CONTROL], {}) for part in parts if CONTROL in getattr(part, "__dict__", ())
        ]
    return rows


Change = TypeVar("Change", bound=ForwardChange)


class ForwardControl(Control, Generic[Change]):
    """A control that changes each chosen attention module. `layers` are numbers as in a scan; None chooses all."""

    _changes: list[tuple[nn.Module, Change]]

    def _change(self, controlled: ControlledLayer) -> Change:
        """The change for one layer; raises if the layer cannot have it."""
        raise NotImplementedError

    def _check(self, model: nn.Module) -> list[tuple[nn.Module, Change]]:
        layers = controlled_layers(model, self.layers, type(self).__name__)
        return [(layer.module, self._change(layer)) for layer in layers]

    def _attach(self, model: nn.Module) -> None:
        new = self._check(model)
        attention_interface.install()
        self._changes = new
        for module, change in new:
            change.control = repr(self)
            add_interceptor(module, change)
        # a model compiled before looks at the forward of its parts, and not at the table of attention functions
        self._undo = [replace_method(module, "forward", force_retrace) for module, _ in new]

    def _detach(self, model: nn.Module) -> None:
        for module, change in self._changes:
            remove_interceptor(module, change)
        for undo in self._undo:
            undo()
        attention_interface.remove(change for _, change in self._changes)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """A control that is copied together with its model, as an attribute of it, controls the copy."""
        vars(self).update(attributes)
        if self.model is not None:
            self._changes = [(module, change) for module, change in self._changes if change is not None]
            if self._changes:
                attention_interface.install()
            else:  # this kind of change is not carried
                self.model = None

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, for the optimizer."""
        return [p for p in self._parameters_by_name().values() if p.requires_grad]

    def state_dict(self) -> dict[str, Tensor]:
        """Its parameters by layer, to be saved with those of the model."""
        return {name: p.detach() for name, p in self._parameters_by_name().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the parameters of an attached control of the same kind."""
        parameters = self._parameters_by_name()
        if parameters.keys() != state.keys() or any(parameters[name].shape != x.shape for name, x in state.items()):
            raise LocaterError(
                f"{type(self).__name__}: this state has other layers or heads than those it is attached to"
            )
        for name, value in state.items():
            parameters[name].copy_(value)

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        _ = self.attached
        return {
            f"{change.heads.name}.{name}": p
            for _, change in self._changes
            for name, p in change.parameters_by_name().items()
        }

    def after_step(self) -> None:
        if not any(change.called for _, change in self._changes):
            model = type(self.attached).__name__
            raise LocaterError(
                f"{type(self).__name__}: a step has passed without reaching the attention of {model}: "
                "run the model that was passed to attach(), with attn_implementation='sdpa' or 'eager'"
            )


def controlled_layers(model: nn.Module, chosen: Layers, control: str) -> list[ControlledLayer]:
    """Every chosen attention module once; raises if one cannot be controlled. `control` is a name for the message."""
    weights, family, split = ModuleWeights(model), family_of(model), SplitHeads(model)
    by_module: dict[int, ControlledLayer] = {}
    for layer in layers_numbered(attention_layers(model), chosen):
        module = weights.submodule(layer.name)
        refuse_unobservable(module, family, layer.name)
        if not attention_interface.always_uses_interface(module):
            kind = type(module).__name__
            raise LocaterError(
                f"{layer.name or kind}: {kind} does not use the attention interface of transformers, where {control} "
                f"acts; {SUPPORTED}. If only some layers do: layers=[...]"
            )
        own = split.of(layer.name, layer.kv_heads)
        by_module.setdefault(id(module), ControlledLayer(layer, module, device_of(module), own))
    return list(by_module.values())


def per_head(values: Tensor, count: int, side: str, layer: Heads) -> Tensor:
    """The entries of `values` (heads,) for the heads of this rank, of which the call has `count`; `side` is "query" or
    "key".
    """
    first, end = layer.split.run(len(values))
    if end - first != count:
        raise LocaterError(
            f"{layer.name}: {count} {side} heads arrived and {end - first} were expected: attach controls after the "
            "model is split over ranks"
        )
    return values if layer.split.parts == 1 else values[first:end]
