"""Listeners of an attention module: each call is handed to those that are switched on."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from locater.calls.call_and_masks import Call
from locater.errors import LocaterError

# the attribute with the listeners of a module; in its __dict__, so neither DDP nor state_dict knows of it
KEY = "_locater_sites"
attaching = threading.RLock()  # several threads may observe one model: what is put on a module is put on in turn


_numbers = itertools.count(1)
_switches: WeakValueDictionary[int, ListeningSwitch] = (
    WeakValueDictionary()
)  # by number, for operators, which take no objects


@dataclass(eq=False)
class ListeningSwitch:
    """On or off, for all sites of one observation. Compiled graphs are guarded on it: the graph for "off" has no
    operator of ours.
    """

    on: bool = True
    trained: nn.Module | None = None  # listen only while this module is in training mode
    lenient: bool = False  # a call that cannot be counted is left out, and the model runs on
    fused: bool = False  # attention runs in our kernel, which returns the statistics too, where that takes the call
    loss_only: bool = False  # count only passes with gradients: those that a loss comes from
    counts_pass: bool | None = None  # with `loss_only`: whether the pass that is running counts; None between passes
    keeps_call: bool = False  # keep what the first pass that counts was called with
    call: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None  # the module, its arguments
    outputs: int | None = None  # the last axis of what the observed model returned first: its vocabulary, or classes
    tokens: Any = None  # the mesh over which the tokens of the pass that is running are split (context parallelism)
    left_out: int = 0  # passes that did not count, as far as they ran outside of a compiled graph
    missed: deque[Exception] = field(default_factory=lambda: deque(maxlen=1))  # why a call was last left out
    also: Callable[[Any, Call], None] | None = None  # is handed each call that counts, with its site
    number: int = field(default_factory=lambda: next(_numbers))
    thread: int | None = field(default_factory=threading.get_ident)  # whose calls count; None: of the next pass

    def __post_init__(self) -> None:
        _switches[self.number] = self

    @property
    def mailbox(self) -> int:
        """Where an operator reports a call that it leaves out; 0 where it has to raise."""
        return self.number if self.lenient else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ListeningSwitch:
        return ListeningSwitch(False)  # a copy of a model, such as a running average of it, is not observed


class Listener(Protocol):
    """Sees the calls of one module."""

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def switch(self) -> ListeningSwitch: ...

    def receive(self, call: Call) -> None: ...


def active_listeners(module: nn.Module) -> tuple[Listener, ...]:
    """The listeners of a module that are switched on."""
    return tuple(site for site in module.__dict__.get(KEY, ()) if site is not None and is_listening(site.switch))


def counts_this_thread(switch: ListeningSwitch) -> bool:
    """Whether calls of this thread count. A graph does not ask: there the operators do."""
    return torch.compiler.is_dynamo_compiling() or switch.thread is None or switch.thread == threading.get_ident()


def is_listening(switch: ListeningSwitch) -> bool:
    if not counts_this_thread(switch):
        return False
    if not switch.on or (switch.trained is not None and not switch.trained.training):
        return False
    if not switch.loss_only:
        return True
    return torch.is_grad_enabled() if switch.counts_pass is None else switch.counts_pass


def begins_pass(switch: ListeningSwitch) -> bool:
    """Whether a part of the model that is called now is the outermost one, so that `run_pass` decides."""
    return (
        switch.on
        and (switch.loss_only or switch.keeps_call)
        and switch.counts_pass is None
        and counts_this_thread(switch)
    )


def run_pass(switch: ListeningSwitch, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` of a model, or of the part of it that `module` is. The outermost such call is a pass: with
    `loss_only` it counts where gradients are enabled when it begins. Inside they may be off all the same: reentrant
    checkpointing computes its blocks without.
    """
    if not begins_pass(switch):
        return forward(*args, **kwargs)
    switch.counts_pass = not switch.loss_only or torch.is_grad_enabled()
    # a graph could not break inside of `try`, and a counter would recompile it
    if torch.compiler.is_dynamo_compiling():
        out = forward(*args, **kwargs)
        switch.counts_pass = None
        return out
    if switch.keeps_call and switch.call is None and is_listening(switch):
        switch.call = (module, args, kwargs)
    switch.left_out += not switch.counts_pass and (switch.trained is None or switch.trained.training)
    try:
        return forward(*args, **kwargs)
    finally:
        switch.counts_pass = None


def report_uncounted(mailbox: int, error: Exception) -> None:
    """Keep the error for which an operator left out a call, for the observation whose `mailbox` this is."""
    switch = _switches.get(mailbox)
    if switch is not None:
        switch.missed.append(error)


def describe_call(sites: Sequence[Listener], how: Callable[..., Call], *args: Any) -> Call | None:
    """The call that `how` makes of intercepted arguments; None where that fails and all listeners are lenient."""
    try:
        return how(*args)
    except Exception as error:  # arguments are the model's: anything can be wrong with them, and all of it is reported
        if not all(site.switch.lenient for site in sites):
            raise
        for site in sites:
            site.switch.missed.append(error)
        return None


def is_measured(site: Listener, call: Call) -> bool:
    """Whether statistics of a call can be taken. Raises where not, unless the listener leaves such calls out."""
    reason = call.why_unmeasurable
    if call.parts is not None and not getattr(site, "counts_requests", False):
        reason = (
            "a call of several requests is measured by the rows of observe() alone: leave patterns and controls out"
        )
    if reason is None:
        return True
    if not site.switch.lenient:
        raise LocaterError(reason)
    site.switch.missed.append(LocaterError(reason))
    return False


def add_listener(site: Listener) -> None:
    with attaching:
        site.module.__dict__[KEY] = (*site.module.__dict__.get(KEY, ()), site)


def remove_listener(site: Listener) -> None:
    with attaching:
        left = tuple(s for s in site.module.__dict__.get(KEY, ()) if s is not site and s is not None)
        if left:
            site.module.__dict__[KEY] = left
        else:
            site.module.__dict__.pop(KEY, None)
