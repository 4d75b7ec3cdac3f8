"""Following which module of a model runs: its forward is replaced while an observation finds layers by their calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from locater.attention import interface
from locater.attention.listeners import is_on, missed
from locater.observing.direct_calls import DirectCalls
from locater.observing.frames import Frame

if TYPE_CHECKING:
    from locater.observing.by_calls import CalledLayers


def running(
    layers: CalledLayers, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces the forward of a module: notes that it runs, and counts its calls at the end."""
    if not is_on(layers.switch):
        return forward(*args, **kwargs)
    frame = Frame(name, module, {**{str(at): x for at, x in enumerate(args)}, **kwargs})
    with ExitStack() as stack:
        if not layers.frames:
            missed.clear()  # of other runs
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
    if is_on(layers.switch):
        layers.ran.add(name)
    with ExitStack() as stack:
        if isinstance(_get_current_function_mode(), DirectCalls):
            stack.enter_context(_pop_mode_temporarily())
        return forward(*args, **kwargs)


def inside_interface() -> bool:
    """Whether the code that runs was called by the attention interface, which announces the call itself."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not running.__code__:
        if frame.f_code.co_name == "attend" and frame.f_globals.get("__name__") == interface.__name__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
