"""Following which module of a model runs: its forward is replaced while an observation finds layers by their calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from locater.calls import interface
from locater.calls.direct_calls import DirectCalls
from locater.calls.frames import Frame, Place
from locater.calls.listeners import begins_pass, is_on, run_pass

if TYPE_CHECKING:
    from locater.observing.by_calls import CalledLayers


def running(
    layers: CalledLayers, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces the forward of a module: notes that it runs, and counts its calls at the end."""
    if begins_pass(layers.switch):
        return run_pass(layers.switch, module, partial(running, layers, name, module, forward), *args, **kwargs)
    if not is_on(layers.switch):
        return forward(*args, **kwargs)
    frame = Frame(name, module, {**{str(at): x for at, x in enumerate(args)}, **kwargs})
    with ExitStack() as stack:
        if not layers.frames:
            layers.switch.missed.clear()  # of other runs
            if layers.follows:
                stack.enter_context(DirectCalls(layers.report, layers.fail))
        layers.ran.add(name)
        layers.frames.append(frame)
        stack.callback(layers.frames.pop)
        out = forward(*args, **kwargs)
        with ExitStack() as counting:
            if isinstance(_get_current_function_mode(), DirectCalls):
                counting.enter_context(_pop_mode_temporarily())
            layers.leave(frame)
    return out


def paused(
    layers: CalledLayers, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces the forward of a module of PyTorch, which is heard by its tap: it computes as without a mode."""
    if begins_pass(layers.switch):
        return run_pass(layers.switch, module, partial(paused, layers, name, module, forward), *args, **kwargs)
    if is_on(layers.switch):
        layers.ran.add(name)
    with ExitStack() as stack:
        if isinstance(_get_current_function_mode(), DirectCalls):
            stack.enter_context(_pop_mode_temporarily())
        return forward(*args, **kwargs)


def place_in_code() -> Place | None:
    """Where in the code of the innermost module a call is made; None where the attention interface makes it, which
    announces the call itself.
    """
    frame, place = sys._getframe(1), []
    while frame is not None and frame.f_code is not running.__code__:
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name == "attend" and module == interface.__name__:
            return None
        if module.partition(".")[0] not in ("locater", "torch"):
            place.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(place)
