"""Listeners of an attention module: each call is announced to those that are switched on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from locater.attention.call import Call
from locater.errors import LocaterError

# the attribute with the listeners of a module; in its __dict__, so neither DDP nor state_dict knows of it
KEY = "_locater_sites"


missed: deque[Exception] = deque(maxlen=1)  # the error for which a call was last left out


@dataclass
class Switch:
    """On or off, for all sites of one observation. Compiled graphs are guarded on it: the graph for "off" has no
    operator of ours.
    """

    on: bool = True
    trained: nn.Module | None = None  # listen only while this module is in training mode
    lenient: bool = False  # a call that cannot be counted is left out, and the model runs on
    fused: bool = False  # attention runs in our kernel, which returns the statistics too, where that takes the call

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        return Switch(False)  # a copy of a model, such as a running average of it, is not observed


class Listener(Protocol):
    """Sees the calls of one module."""

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def switch(self) -> Switch: ...

    def see(self, call: Call) -> None: ...


def listening(module: nn.Module) -> tuple[Listener, ...]:
    """The listeners of a module that are switched on."""
    return tuple(site for site in module.__dict__.get(KEY, ()) if site is not None and is_on(site.switch))


def is_on(switch: Switch) -> bool:
    return switch.on and (switch.trained is None or switch.trained.training)


def described(sites: Sequence[Listener], how: Callable[..., Call], *args: Any) -> Call | None:
    """The call that `how` makes of intercepted arguments; None where that fails and all listeners are lenient."""
    try:
        return how(*args)
    except Exception as error:
        if not all(site.switch.lenient for site in sites):
            raise
        missed.append(error)
        return None


def is_measured(site: Listener, call: Call) -> bool:
    """Whether statistics of a call can be taken. Raises where not, unless the listener leaves such calls out."""
    reason = call.why_unmeasurable
    if reason is None:
        return True
    if not site.switch.lenient:
        raise LocaterError(reason)
    missed.append(LocaterError(reason))
    return False


def enter(site: Listener) -> None:
    site.module.__dict__[KEY] = (*site.module.__dict__.get(KEY, ()), site)


def leave(site: Listener) -> None:
    left = tuple(s for s in site.module.__dict__.get(KEY, ()) if s is not site and s is not None)
    if left:
        site.module.__dict__[KEY] = left
    else:
        site.module.__dict__.pop(KEY, None)
