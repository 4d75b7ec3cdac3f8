"""What controls of the forward pass share. They act at the attention interface of transformers, under any backend.

Whichever is attached first, what acts on one call comes in this order: QKNorm, Temperature, LogitSoftcap,
EntropyPenalty; then `observe` and `Monitor` see the result. So a temperature is not normalised away, and entropy is
that of the map which acts. A scan reads weights and knows of none of them.

Parameters of a control are its own: give `control.parameters()` to the optimizer, save `control.state_dict()` beside
the model's, and average their gradients over ranks in a distributed run, since DDP and FSDP do not know of them.

A copy of the model (`copy.deepcopy`, pickling, `torch.save(model)`, a running average) computes what the model
computes: it carries what controls changed, with parameters of its own, and keeps it when the control is detached from
the original. `carried(copy)` says what that is. `state_dict` holds nothing of it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from locater.attention import interface
from locater.attention.changes import AttentionChange, changes, numbered, put, take
from locater.attention.stand_ins import CONTROL, instead, through
from locater.checkpoints.weights import ModuleWeights
from locater.control.base import Control, Layers, device_of, layers_numbered
from locater.errors import LocaterError
from locater.families import AttentionLayer, attention_layers
from locater.families.layer import Kind
from locater.observing import taps

logger = logging.getLogger("locater")
NORM, TEMPERATURE, CAP, MEASURE = range(4)  # order of changes on one module
WORK = "GPT-2, GPT-NeoX, Llama, Mistral, Qwen, Gemma, Phi, OPT, DeepSeek, BERT, T5, BART, Whisper, ViT, CLIP and their relatives do"


@dataclass(frozen=True)
class Heads:
    """What a change knows of its layer: plain numbers, so that a copy of the model can carry them."""

    name: str
    kind: Kind
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class ControlledLayer:
    """A module whose attention a control changes."""

    layer: AttentionLayer
    module: nn.Module
    device: torch.device

    @property
    def of(self) -> Heads:
        held = self.layer
        return Heads(held.name, held.kind, held.heads, held.kv_heads, held.head_dim, held.scale, held.causal)

    def parameter(self, values: Tensor, learn: bool) -> nn.Parameter:
        """float32, where the module is."""
        return nn.Parameter(values.to(self.device, torch.float32), requires_grad=learn)


class ForwardChange(AttentionChange):
    """A change with parameters by name. `of` says which layer's it is, `control` in words which control put it
    there.
    """

    of: Heads
    control = ""

    def named(self) -> dict[str, nn.Parameter]:
        return {}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Its own, in a copy of a model and in a saved one: without it that would be another model."""
        if any(p.requires_grad for p in self.named().values()):
            _say_what_is_learned(self.control)
        return _in_a_copy, (type(self), {name: value for name, value in vars(self).items() if name != "number"})


def _in_a_copy(kind: type[ForwardChange], held: dict[str, Any]) -> ForwardChange:
    change = kind.__new__(kind)
    vars(change).update(held)
    interface.keep(numbered(change))
    return change


@cache  # once for each kind of control
def _say_what_is_learned(control: str) -> None:
    logger.warning(
        "%s: a copy of its model has parameters of it that are not among model.parameters(), so a running average does not move them: "
        "average those of locater.control.carried(copy) too", control,
    )  # fmt: skip


@dataclass(frozen=True)
class Carried:
    """What a control has changed in one module of a model, or of the model that this one is a copy of."""

    module: str
    control: str
    parameters: dict[str, nn.Parameter]


def carried(model: nn.Module) -> list[Carried]:
    """What acts in the forward pass of a model and is not its own: of controls attached to it, or to the model it is a
    copy of.

    >>> import copy
    >>> from locater.control import Temperature
    >>> from locater.train import Shape, Transformer
    >>> model = Transformer(Shape(width=16, heads=2, kv_heads=2, layers=1, hidden=24))
    >>> _ = Temperature(learn=False).attach(model)
    >>> [(held.module, held.control) for held in carried(copy.deepcopy(model))]
    [('model.layers.0.self_attn', 'Temperature(init=1.0, learn=False, layers=None)')]
    """
    found: list[Carried] = []
    for name, module in model.named_modules():
        put_on = [change for change in changes(module) if isinstance(change, ForwardChange)]
        found += [Carried(name, change.control, change.named()) for change in put_on]
        words = (module, *vars(module).values())  # a parametrization, and what stands for a method
        found += [Carried(name, vars(part)[CONTROL], {}) for part in words if CONTROL in getattr(part, "__dict__", ())]
    return found


class ForwardControl(Control):
    """A control that puts a change on each chosen attention module; `layers` are numbers as in a scan, all where
    None.
    """

    layers: Layers = None

    def _change(self, place: ControlledLayer) -> ForwardChange:
        raise NotImplementedError

    def _attach(self, model: nn.Module) -> None:
        made = [
            (place.module, self._change(place)) for place in controlled_layers(model, self.layers, type(self).__name__)
        ]
        interface.install()
        self._made = made
        for module, change in made:
            change.control = repr(self)
            put(module, change)
        # a model compiled before looks at the forward of its parts, and not at the table of attention functions
        self._undo = [instead(module, "forward", through) for module, _ in made]

    def _detach(self, model: nn.Module) -> None:
        for module, change in self._made:
            take(module, change)
        for undo in self._undo:
            undo()
        interface.remove(change for _, change in self._made)

    def __setstate__(self, held: dict[str, Any]) -> None:
        """Copied together with its model, as a part of it may be: then it is the copy's control, and can be detached
        from it.
        """
        vars(self).update(held)
        if self.model is not None:
            self._made = [(module, change) for module, change in self._made if change is not None]
            if self._made:
                interface.install()
            else:  # what it puts on is not carried
                self.model = None

    def parameters(self) -> list[nn.Parameter]:
        """What there is to learn, for the optimizer."""
        return [p for p in self._named().values() if p.requires_grad]

    def state_dict(self) -> dict[str, Tensor]:
        """Its parameters by layer, to be saved beside those of the model."""
        return {name: p.detach() for name, p in self._named().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Into an attached control of the same kind."""
        held = self._named()
        if held.keys() != state.keys() or any(held[name].shape != value.shape for name, value in state.items()):
            raise LocaterError(
                f"{type(self).__name__}: this state is of other layers or heads than those it is attached to"
            )
        with torch.no_grad():
            for name, value in state.items():
                held[name].copy_(value)

    def _named(self) -> dict[str, nn.Parameter]:
        _ = self.attached
        return {f"{change.of.name}.{name}": p for _, change in self._made for name, p in change.named().items()}

    def after_step(self) -> None:
        if not any(change.called for _, change in self._made):
            raise LocaterError(
                f"{type(self).__name__}: a step has passed and attention of {type(self.attached).__name__} was not reached: "
                "run the model that was handed to attach(), under attn_implementation='sdpa' or 'eager'"
            )


def controlled_layers(model: nn.Module, chosen: Layers, who: str) -> list[ControlledLayer]:
    """Every chosen attention module once; raises where one is out of reach."""
    weights = ModuleWeights(model)
    held: dict[int, ControlledLayer] = {}
    for layer in layers_numbered(attention_layers(model), chosen):
        module = weights.submodule(layer.name)
        taps.refuse(module, layer.name)
        if not _asks(module):
            kind = type(module).__name__
            raise LocaterError(
                f"{layer.name or kind}: {kind} does not pass the attention interface of transformers, where {who} acts; {WORK}. "
                "A model that is part one and part other: layers=[...]"
            )
        held.setdefault(id(module), ControlledLayer(layer, module, device_of(module)))
    return list(held.values())


def _asks(module: nn.Module) -> bool:
    """Whether the code of a module takes its attention function from the table of transformers, in every case."""
    if getattr(module, "reorder_and_upcast_attn", False):  # GPT-2 with an attention of its own
        return False
    return any("ALL_ATTENTION_FUNCTIONS" in names for names in _code_names(type(module)))


def _code_names(kind: type[nn.Module]) -> Iterator[tuple[str, ...]]:
    for base in kind.__mro__:
        for method in map(inspect.unwrap, filter(callable, vars(base).values())):
            code = getattr(method, "__code__", None)
            if code is not None:
                yield code.co_names


def per_head(values: Tensor, count: int, what: str, layer: Heads) -> Tensor:
    """`values` (heads,), which must be as many as there are heads in the call."""
    if len(values) != count:
        raise LocaterError(
            f"{layer.name}: {count} {what} heads arrived and {len(values)} were expected; split heads are not controlled"
        )
    return values
