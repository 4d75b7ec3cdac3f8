"""Layers of a model whose architecture has no record: each module that attends is found by its calls.

Every module of the model has a listener. A module becomes a layer at its first attention call: heads are counted from
the queries, layers are numbered in the order of their first calls. Attention is heard at the interface of transformers,
at the taps of attention that is known by its class, and, inside a module that runs, by `DirectCalls`. The query-key map
of such a layer is not known; whatever needs it is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from locater.attention.call import Call
from locater.attention.listeners import Switch, is_measured, is_on, missed
from locater.attention.stand_ins import Undo, instead
from locater.checkpoints.weights import ModuleWeights
from locater.errors import LocaterError, first_line
from locater.families.coverage import HEADS, attention_like, folded_paths
from locater.families.listening import refuse_unobservable
from locater.observing.choosing import Choice, chosen
from locater.observing.direct_calls import Describe, DirectCalls
from locater.observing.flex_calls import flex_calls
from locater.observing.hearing import compiled_parts
from locater.observing.site import Site
from locater.observing.tally import StatisticsOptions

CROSS = re.compile(r"cross|encoder_att|enc_dec|encdec|multihead_attn", re.IGNORECASE)
OTHER_TOKENS = ("encoder_hidden_states", "key_value_states", "cross_attention_states", "memory", "context")
# these choose another way of computing while a function mode is active, whose last digits differ
TORCH_MODULES = (nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


@dataclass
class _Listener:
    """Hears the calls of one module. Its site is made at the first."""

    name: str
    module: nn.Module
    layers: CalledLayers

    @property
    def switch(self) -> Switch:
        return self.layers.switch

    @_disable_dynamo
    def see(self, call: Call) -> None:
        if is_measured(self, call):
            self.layers.add(self, call)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()


@dataclass
class _Frame:
    """A module that is running, and the attention calls that it made itself so far."""

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    calls: list[Describe] = field(default_factory=list)


class CalledLayers:
    """The layers of one observation that are found by their calls; `sites` grows while the model runs."""

    def __init__(
        self, model: nn.Module, reason: str, options: StatisticsOptions, layers: Choice, heads: Choice, switch: Switch
    ) -> None:
        if isinstance(layers, int):
            raise LocaterError(
                f"layers={layers}: the layers of {type(model).__name__} are found while it runs, so they cannot be "
                "spaced evenly: give indices such as [0, 2], in the order of calls"
            )
        self.model, self.reason, self.options, self.switch = model, reason, options, switch
        self.chosen, self.heads = None if layers is None else set(layers), heads
        self.sites: list[Site] = []
        self.weights = ModuleWeights(model)
        self.attention = attention_like(self.weights)  # paths of modules that look like attention
        self.listeners: list[_Listener] = []
        self.refused: dict[str, str] = {}  # modules whose attention is not measured, and why
        self.ran: set[str] = set()
        self.heard: set[str] = set()
        self._by_key: dict[tuple[str, int, str], Site | None] = {}
        self._frames: list[_Frame] = []
        self.compiled = bool(compiled_parts(model))  # a graph is not interrupted: the interface alone is heard
        self.follows = True  # what modules compute themselves
        switch.lenient = True  # one call that cannot be described does not end the run; `notes` names it
        for name, module in model.named_modules():
            try:
                refuse_unobservable(module, None, name)
                self.listeners.append(_Listener(name, module, self))
            except LocaterError as error:
                self.refused[name] = str(error)
        self._of_module = {id(listener.module): listener for listener in self.listeners}

    # ---- while the model runs

    def listen(self) -> Iterator[Undo]:
        """Follow which module runs, and hear what it computes itself; yields what ends it."""
        if self.compiled:
            return
        # FlexAttention compiles itself at its first call, which a function mode would disturb
        self.follows = not any(_implementation(module) == "flex_attention" for module in self.model.modules())
        for name, module in self.model.named_modules():
            if isinstance(module, TORCH_MODULES):
                yield instead(module, "forward", partial(_paused, self, name))
            elif not type(module).__module__.startswith("torch.nn."):
                yield instead(module, "forward", partial(_running, self, name))
        yield from flex_calls(self.report)

    def report(self, describe: Describe) -> None:
        """An attention call of the innermost module that runs."""
        if self._frames:
            self._frames[-1].calls.append(describe)

    def add(self, listener: _Listener, call: Call) -> None:
        """Count a call that was announced for a module, in place of what was heard inside it meanwhile."""
        frame = next((frame for frame in reversed(self._frames) if frame.module is listener.module), None)
        if frame is not None:
            frame.calls.clear()
        self._count(listener, call, {} if frame is None else frame.arguments)

    def _count(self, listener: _Listener, call: Call, arguments: dict[str, Any]) -> None:
        self.heard.add(listener.name)
        kind = _kind(listener, call, arguments)
        key = (listener.name, call.query.shape[1], kind)
        if key not in self._by_key:
            number = len(self._by_key)
            self._by_key[key] = site = self._site(listener, call, number, kind)
            if site is not None:
                self.sites.append(site)
        site = self._by_key[key]
        if site is not None:
            site.see(call)

    def _site(self, listener: _Listener, call: Call, number: int, kind: str) -> Site | None:
        if self.chosen is not None and number not in self.chosen:
            return None
        count, keys = call.query.shape[1], call.key.shape[1]
        picked = [head for head, _ in chosen(list(enumerate(range(count))), self.heads, "heads")]
        size = call.output.shape[-1] if call.output is not None and call.output.ndim == 4 else None
        return Site(
            name=listener.name,
            number=number,
            kind=kind,
            module=listener.module,
            group=count // keys,
            count=count,
            heads=picked,
            switch=self.switch,
            options=self.options,
            layer=None,
            output_size=size,
            device=call.query.device,
        )

    def leave(self, frame: _Frame) -> None:
        """A module has run: count the calls that it made itself."""
        listener, heads = self._of_module.get(id(frame.module)), heads_of(frame.module)
        error = missed.pop() if missed else None
        for describe in frame.calls if listener is not None else ():
            try:
                assert listener is not None
                self._count(listener, describe(heads), frame.arguments)
                error = None
            except Exception as reason:
                error = reason
        if error is not None:
            self.refused[frame.name] = first_line(error)

    # ---- afterwards

    @property
    def silent(self) -> list[str]:
        """Modules that look like attention and did not run; in a compiled model that is not known."""
        if self.compiled:
            return []
        return [name for name in self._unheard() if name not in self.ran and not self._was_in_running(name)]

    @property
    def unheard(self) -> list[str]:
        """Modules that look like attention and ran, but whose attention was not heard."""
        others = {*self.silent, *self.refused}
        return [name for name in self._unheard() if name not in others]

    @property
    def notes(self) -> list[str]:
        """What the rows do not say, each in a line."""
        why = self.reason.partition(". ")[0]
        notes = [f"the query-key maps of these layers are not known, so what needs them is left out: {why}"]
        if self.silent:
            notes.append(f"attention modules that never ran: {folded_paths(self.silent)}")
        if self.unheard:
            notes.append(
                f"modules that look like attention and were not heard: {folded_paths(self.unheard)}; what they compute "
                "passes neither the attention interface, nor fused attention, nor a softmax of q.k"
                + (", or they did not run: the model is compiled" if self.compiled else "")
            )
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason.removeprefix(f"{name}: "), []).append(name)
        return notes + [f"not measured: {folded_paths(names)}: {reason}" for reason, names in by_reason.items()]

    def why_nothing(self) -> str:
        """Why no layer was found, and what to do."""
        notes = self.notes[1:]
        if not notes and not self.attention:
            return "None of its modules looks like attention"
        return "; ".join(
            [*notes, "load it with attn_implementation='sdpa' or 'eager', or describe it: docs/observe.md"]
        )

    def _unheard(self) -> list[str]:
        return [
            name
            for name in self.attention
            if not any(_within(other, name) or _within(name, other) for other in self.heard)
        ]

    def _was_in_running(self, name: str) -> bool:
        """Whether a module of PyTorch, which is not followed, is part of one that ran."""
        module = self.weights.modules().get(name)
        followed = module is not None and not type(module).__module__.startswith("torch.nn.")
        return not followed and name.rpartition(".")[0] in self.ran


def _running(
    layers: CalledLayers, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces the forward of a module: notes that it runs, and counts its calls at the end."""
    if not is_on(layers.switch):
        return forward(*args, **kwargs)
    frame = _Frame(name, module, {**{str(at): x for at, x in enumerate(args)}, **kwargs})
    with ExitStack() as stack:
        if not layers._frames:
            missed.clear()  # of other runs
            if layers.follows:
                stack.enter_context(DirectCalls(layers.report))
        layers.ran.add(name)
        layers._frames.append(frame)
        stack.callback(layers._frames.pop)
        out = forward(*args, **kwargs)
        with ExitStack() as counting:
            if isinstance(_get_current_function_mode(), DirectCalls):
                counting.enter_context(_pop_mode_temporarily())
            layers.leave(frame)
    return out


def _paused(
    layers: CalledLayers, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces the forward of a module of PyTorch, which is heard by its tap: it computes as without a mode."""
    if is_on(layers.switch):
        layers.ran.add(name)
    with ExitStack() as stack:
        if isinstance(_get_current_function_mode(), DirectCalls):
            stack.enter_context(_pop_mode_temporarily())
        return forward(*args, **kwargs)


def _implementation(module: nn.Module) -> str | None:
    """The name of the attention function of a module of transformers."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _kind(listener: _Listener, call: Call, arguments: dict[str, Any]) -> str:
    """ "cross" where queries and keys are different tokens, as far as name, arguments and lengths tell; or "self"."""
    last = listener.name.rpartition(".")[2]
    if getattr(listener.module, "is_cross_attention", False) is True or CROSS.search(last):
        return "cross"
    if any(arguments.get(name) is not None for name in OTHER_TOKENS):
        return "cross"
    cached = any(arguments.get(name) is not None for name in ("past_key_values", "past_key_value", "layer_past"))
    return "self" if call.query.shape[2] == call.key.shape[2] or cached else "cross"


def heads_of(module: nn.Module) -> int | None:
    """The number of query heads that a module says it has; None where it says none."""
    return next((count for name in HEADS if isinstance(count := getattr(module, name, None), int)), None)


def _within(path: str, outer: str) -> bool:
    """Whether a module is another one or a part of it."""
    return not outer or f"{path}.".startswith(f"{outer}.")
