"""Layers of a model whose architecture has no record: each module that attends is found by its calls.

Every module of the model has a listener. A module becomes a layer at its first attention call: heads are counted from
the queries, layers are numbered in the order of their first calls. Several calls from one place of its code in one run
are told apart by what made their queries and keys (`repeated_calls`). Calls come from the attention interface of
transformers, from the taps of attention that is known by its class, and, inside a module that runs, from a
`FunctionListener`. The query-key map of such a layer is not known; whatever needs it is None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from locater.calls import attention_interface
from locater.calls.attention_like import attention_like, folded_paths, is_within
from locater.calls.call_and_masks import Call
from locater.calls.flex_attention import listen_to_flex
from locater.calls.function_listener import CallingModule, DirectCall, FunctionListener, SavedTensors
from locater.calls.listeners import ListeningSwitch, begins_pass, is_listening, is_measured, run_pass
from locater.calls.patching import Undo, replace_method
from locater.calls.recognise import NO_SOFTMAX
from locater.calls.self_or_cross_attention import (
    CodePlace,
    RunningModule,
    arguments_by_name,
    attention_kind,
    declared_heads,
    has_local_keys,
    hide_padding_rows,
)
from locater.errors import LocaterError, first_line
from locater.families.taps import is_tapped, refuse_unobservable
from locater.layers.tensor_parallel import SplitHeads
from locater.observing.accumulate import StatisticsOptions
from locater.observing.layer_choice import Choice, ChoiceError, choose_heads
from locater.observing.listening_site import Site, clear, parts_that_may_be_compiled
from locater.observing.repeated_calls import RepeatedLayer, split_into_layers
from locater.sources.weights import ModuleWeights
from locater.torch_private import (
    attention_implementation,
    current_function_mode,
    disable_dynamo,
    without_current_function_mode,
)

# Following which module of a model runs: its forward is replaced while an observation finds layers by their calls.


def run_module(
    layers: CalledLayers, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces the forward of a module: notes that it runs, and counts its calls at the end."""
    if begins_pass(layers.switch):
        return run_pass(layers.switch, module, partial(run_module, layers, name, module, forward), *args, **kwargs)
    if not is_listening(layers.switch):
        return forward(*args, **kwargs)
    running = RunningModule(name, module, arguments_by_name(module, args, kwargs))
    with ExitStack() as stack:
        if not layers.running:
            layers.switch.missed.clear()  # of other runs
            if layers.follows:
                stack.enter_context(FunctionListener(layers.report, layers.fail))
        layers.ran.add(name)
        layers.running.append(running)
        stack.callback(layers.running.pop)
        out = forward(*args, **kwargs)
        with ExitStack() as counting:
            if isinstance(current_function_mode(), FunctionListener):
                counting.enter_context(without_current_function_mode())
            layers.count_calls_of(running)
    return out


def run_without_mode(
    layers: CalledLayers, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces the forward of a module of PyTorch, which has a tap: it computes as without a mode."""
    if begins_pass(layers.switch):
        return run_pass(
            layers.switch, module, partial(run_without_mode, layers, name, module, forward), *args, **kwargs
        )
    if is_listening(layers.switch):
        layers.ran.add(name)
    with ExitStack() as stack:
        if isinstance(current_function_mode(), FunctionListener):
            stack.enter_context(without_current_function_mode())
        return forward(*args, **kwargs)


def code_place() -> CodePlace | None:
    """Where in the code of the innermost module a call is made; None where the attention interface makes it, which
    hands on the call itself.
    """
    running, place = sys._getframe(1), []
    while running is not None and running.f_code is not run_module.__code__:
        module = str(running.f_globals.get("__name__", ""))
        if running.f_code.co_name == "attend" and module == attention_interface.__name__:
            return None
        if module.partition(".")[0] not in ("locater", "torch"):
            place.append((running.f_code, running.f_lineno))
        running = running.f_back  # type: ignore[assignment]
    return tuple(place)


# these choose another way of computing while a function mode is active, whose last digits differ
TORCH_MODULES = (nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


@dataclass
class _Listener:
    """Listens to the calls of one module. Its site is made at the first."""

    counts_split_heads: ClassVar[bool] = True
    counts_requests: ClassVar[bool] = True
    name: str
    module: nn.Module
    layers: CalledLayers

    @property
    def switch(self) -> ListeningSwitch:
        return self.layers.switch

    @disable_dynamo
    def receive(self, call: Call) -> None:
        if is_measured(self, call):
            self.layers.add(self, call)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()


class CalledLayers:
    """The layers of one observation that are found by their calls; `sites` grows while the model runs."""

    def __init__(
        self,
        model: nn.Module,
        reason: str,
        options: StatisticsOptions,
        layers: Choice,
        heads: Choice,
        switch: ListeningSwitch,
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
        self.split = SplitHeads(model)
        self.listeners: list[_Listener] = []
        self.refused: dict[str, str] = {}  # modules whose attention is not measured, and why
        self.ran: set[str] = set()
        self.measured: set[str] = set()
        self._by_key: dict[tuple[Any, ...], Site | None] = {}
        self._several: set[tuple[Any, ...]] = set()  # places whose calls in one run are of several heads or layers
        self._in_this_pass: dict[
            tuple[Any, ...], int
        ] = {}  # calls of each key, where it is not known which run they are of
        self.repeated: set[str] = set()  # modules with more than one of these
        self._axes: dict[str, dict[Any, Any]] = {}  # of the calls of each module, as far as they are known
        self.running: list[RunningModule] = []
        self.compiled = bool(
            parts_that_may_be_compiled(model)
        )  # a graph is not interrupted: only the interface is listened to
        self.follows = True  # what modules compute themselves
        switch.lenient = True  # one call that cannot be described does not end the run; `notes` names it
        tapped: list[str] = []  # a tap hands on what the parts of its module attend to
        for name, module in model.named_modules():
            if any(is_within(name, other) for other in tapped):
                continue
            if is_tapped(module, None):
                tapped.append(name)
            try:
                refuse_unobservable(module, None, name)
                self.listeners.append(_Listener(name, module, self))
            except LocaterError as error:
                self.refused[name] = str(error)
        self._of_module = {id(listener.module): listener for listener in self.listeners}

    # ---- while the model runs

    def listen(self) -> Iterator[Undo]:
        """Follow which module runs, and listen to what it computes itself; yields what ends it."""
        if self.compiled:
            if any(attention_implementation(module) == "eager" for module in self.model.modules()):
                # graphs are not guarded on a function that the table has no entry for, and those of inner frames are
                # run again where ours breaks at an attention call
                torch.compiler.reset()
            return
        # FlexAttention compiles itself at its first call, which a function mode would disturb
        self.follows = not any(attention_implementation(module) == "flex_attention" for module in self.model.modules())
        for name, module in self.model.named_modules():
            if isinstance(module, TORCH_MODULES):
                yield replace_method(module, "forward", partial(run_without_mode, self, name))
            elif not type(module).__module__.startswith("torch.nn."):
                yield replace_method(module, "forward", partial(run_module, self, name))
        yield from listen_to_flex(self.report)

    def begin_pass(self) -> None:
        """A new pass of the model begins."""
        self._in_this_pass.clear()

    def report(self, direct: DirectCall) -> None:
        """An attention call of the innermost module that runs."""
        if self.running:
            self.running[-1].calls.append((direct, code_place()))

    def fail(self, error: Exception) -> None:
        """Something went wrong while the innermost module was listened to."""
        if self.running:
            self.running[-1].errors.append(error)

    def add(self, listener: _Listener, call: Call) -> None:
        """Count a call that a tap or the interface hands on, in place of what was found inside the module meanwhile.

        A tap hands on at the end what the whole module did; the interface, what was called inside of it.
        """
        running = next((running for running in reversed(self.running) if running.module is listener.module), None)
        if running is not None:
            running.errors.clear()
            if not is_tapped(listener.module, None):
                running.calls[:] = [(direct, place) for direct, place in running.calls if place is not None]
                running.at_interface.append(_deferred_call(call))  # counted when the module has run
                return
            running.calls.clear()
        try:
            if running is None and not is_tapped(listener.module, None):
                self._note_repetition(listener.name, call)
            self._count(listener, *self._kind_and_order(listener, DirectCall(lambda _: call), call, running))
        except ChoiceError:
            raise
        except Exception as error:  # one call that cannot be counted is noted, and the model runs on
            self.refuse(listener.name, error)

    def _note_repetition(self, name: str, call: Call) -> None:
        """Several calls of a module in one pass may be heads one at a time, where nothing says when it runs."""
        key = (name, call.query.shape[1])
        self._in_this_pass[key] = self._in_this_pass.get(key, 0) + 1
        if self._in_this_pass[key] > 1:
            self.repeated.add(name)

    def refuse(self, name: str, error: Exception) -> None:
        """Remember why a call of a module is not measured: the first reason of each module."""
        self.refused.setdefault(name, first_line(error))

    def _kind_and_order(
        self, listener: _Listener, direct: DirectCall, call: Call, running: RunningModule | None
    ) -> tuple[Call, str, bool]:
        """A call, whether it is self- or cross-attention, and whether its keys are tokens in order."""
        kind = attention_kind(listener.name, listener.module, direct, call, running)
        if kind == "cross" and running is not None and has_local_keys(call, running):
            return hide_padding_rows(call, running), "self", False
        return call, kind, True

    def _count(
        self,
        listener: _Listener,
        call: Call,
        kind: str,
        placed: bool,
        place: CodePlace | None = None,
        layer: Any = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Add a call to its layer. A module that attends in several places of its code has a layer for each: a map of
        contents and one of positions (LiLT), pictures to text and text to pictures (Grounding DINO). `part`: which of
        the layer's heads, where it attends by some of them at a time.
        """
        if call.query.is_nested:
            raise LocaterError(f"{listener.name}: its queries are a nested tensor: pad them")
        at, parts = part
        key = (listener.name, call.query.shape[1] * parts, kind if placed else "local", place, layer)
        if key not in self._by_key:
            site = self._site(listener, call, len(self._by_key), kind, placed, parts)
            self._by_key[key] = site
            if site is not None:
                self.sites.append(site)
        site = self._by_key[key]
        before = list(self.switch.missed)
        if site is not None:
            site.receive(call, None if parts == 1 else at * call.query.shape[1])
        if list(self.switch.missed) == before:
            self.measured.add(listener.name)

    def _site(self, listener: _Listener, call: Call, number: int, kind: str, placed: bool, parts: int) -> Site | None:
        if self.chosen is not None and number not in self.chosen:
            return None
        split = self.split.of(listener.name)
        if parts > 1 and split.parts > 1:
            raise LocaterError(
                f"{listener.name}: its heads are split over ranks, and it attends by some of them at a time"
            )
        count, keys = call.query.shape[1] * split.parts * parts, call.key.shape[1] * split.parts * parts
        picked = choose_heads(count, self.heads)
        size = call.output.shape[-1] if call.output is not None and call.output.ndim == 4 else None
        site = Site(
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
            placed=placed,
            split=split,
        )
        clear([site])
        return site

    def count_calls_of(self, running: RunningModule) -> None:
        """A module has run: count the calls that it made itself."""
        missed = self.switch.missed
        at_interface = list(missed)  # what went wrong at the interface or at a tap of this module
        missed.clear()
        errors, listener = running.errors, self._of_module.get(id(running.module))
        if listener is not None and (running.calls or running.at_interface):
            errors += self._count_all(listener, running)
            errors += missed
            missed.clear()
        if not running.calls:  # else the module's own calls count in place of the one at the interface
            errors = [*errors, *at_interface]
        for error in errors:
            self.refuse(running.name, error)

    def _count_all(self, listener: _Listener, running: RunningModule) -> list[Exception]:
        """Count the calls that a module made in one run; returns why some of them could not be."""
        errors: list[Exception] = []
        declared = self._heads_around(running)
        caller = CallingModule(declared, running.tokens, self._axes.setdefault(running.name, {}))
        alike: dict[tuple[Any, ...], list[tuple[DirectCall, Call]]] = {}
        for direct, place in [*((direct, None) for direct in running.at_interface), *running.calls]:
            try:
                call, kind, placed = self._kind_and_order(listener, direct, direct.describe(caller), running)
                alike.setdefault((kind, placed, place, call.query.shape[1]), []).append((direct, call))
            except Exception as reason:  # likewise
                errors.append(reason)
        for (kind, placed, place, heads), calls in alike.items():
            try:
                for layer in self._layers(running, calls, (kind, placed, place, heads)):
                    if heads == 1 and place is not None and declared not in (None, 1, len(layer.parts)):
                        raise LocaterError(
                            f"it attends by one of its {declared} heads at a time, and which one is not known"
                        )
                    for at, numbers in enumerate(layer.parts):
                        for number in numbers:
                            self._count(
                                listener, calls[number][1], kind, placed, place, layer.key, (at, len(layer.parts))
                            )
            except ChoiceError:
                raise
            except Exception as reason:  # likewise
                errors.append(reason)
        return errors

    def _layers(
        self, running: RunningModule, calls: list[tuple[DirectCall, Call]], place: tuple[Any, ...]
    ) -> list[RepeatedLayer]:
        """The layers of calls from one place of a module's code."""
        key = (running.name, *place)
        if len(calls) == 1 and key not in self._several:
            return [RepeatedLayer([[0]])]
        layers = split_into_layers(calls, running.tokens, self.model)
        if len(calls) > 1 and layers[0].key is not None:
            self._several.add(key)
        return layers

    def _heads_around(self, running: RunningModule) -> int | None:
        """The number of heads that a module says, or the one around it: attention may be a part of its own. Where heads
        are split over ranks it may be the number here or that of all, and says nothing.
        """
        for around in (running, *self.running[-2:-1]):
            heads = declared_heads(around.module)
            if heads is not None:
                return heads if self.split.of(around.name).parts == 1 else None
        return None

    # ---- afterwards

    @property
    def silent(self) -> list[str]:
        """Modules that look like attention and did not run; in a compiled model that is not known."""
        if self.compiled:
            return []
        return [name for name in self._unmeasured_modules() if name not in self.ran and not self._was_in_running(name)]

    @property
    def unmeasured(self) -> list[str]:
        """Modules that look like attention and ran, but in which no attention was found."""
        others = {*self.silent, *self.refused}
        return [name for name in self._unmeasured_modules() if name not in others]

    @property
    def unknown_maps(self) -> str:
        """The first of the notes."""
        why = self.reason.partition(". ")[0]
        return f"the query-key maps of these layers are not known, so what needs them is left out: {why}"

    @property
    def notes(self) -> list[str]:
        """What the rows do not say, each in a line."""
        notes = [self.unknown_maps]
        if self.silent:
            notes.append(f"attention modules that never ran: {folded_paths(self.silent, most=None)}")
        if self.unmeasured:
            notes.append(
                f"no attention was found in modules that look like it: {folded_paths(self.unmeasured, most=None)}: "
                + NO_SOFTMAX
                + (", or they did not run: the model is compiled" if self.compiled else "")
            )
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason.removeprefix(f"{name}: "), []).append(name)
        for reason, names in by_reason.items():
            part = "a part of the calls is not measured" if self.measured.issuperset(names) else "not measured"
            notes.append(f"{part}: {folded_paths(names, most=None)}: {reason}")
        if self.repeated:
            notes.append(
                f"attended more than once in a pass: {folded_paths(sorted(self.repeated), most=None)}: of a compiled "
                "model it is not known whether that is a layer that is used again or heads one at a time, whose "
                "numbers would be those of all together: observe it before it is compiled"
            )
        local = [site.name for site in self.sites if not site.placed]
        if local:
            notes.append(
                f"keys are in blocks around each query, not in order: {folded_paths(local)}; distance, self_mass and "
                "sink are left out, and rows of padding may count"
            )
        return notes

    def why_nothing(self) -> str:
        """Why no layer was found, and what to do."""
        notes = self.notes[1:]
        if not notes and not self.attention:
            return "None of its modules looks like attention"
        return "; ".join(
            [*notes, "load it with attn_implementation='sdpa' or 'eager', or describe it: docs/observe.md"]
        )

    def _unmeasured_modules(self) -> list[str]:
        return [
            name
            for name in self.attention
            if not any(is_within(other, name) or is_within(name, other) for other in self.measured)
        ]

    def _was_in_running(self, name: str) -> bool:
        """Whether a module of PyTorch, which is not followed, is part of one that ran."""
        module = self.weights.modules().get(name)
        followed = module is not None and not type(module).__module__.startswith("torch.nn.")
        return not followed and name.rpartition(".")[0] in self.ran


def _deferred_call(call: Call) -> DirectCall:
    """A call of the attention interface that is counted later."""
    mode = current_function_mode()
    query, key = mode.steps(call) if isinstance(mode, FunctionListener) else (None, None)
    saved = SavedTensors(
        *(x for x in (call.query, call.key, call.output, call.terms.mask, call.terms.bias) if x is not None)
    )

    def describe(caller: CallingModule) -> Call:
        _ = saved.tensors  # raises where they were overwritten
        return call

    return DirectCall(describe, query, key)
