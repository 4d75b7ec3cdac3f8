"""Replaced methods of a module and of its parts, which record the tensors that pass through them during one call.

No hooks: a compiled model ignores hooks that come after its first call, but it is guarded on a replaced method. The
replacement is a `functools.partial` that copies and pickles as the original method, unless a control put it there: then
a copy of the model has its own. Recorded tensors are detached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.listeners import Listener, active_listeners, attaching, describe_call
from locater.errors import LocaterError

Undo = Callable[[], None]
Describe = Callable[[nn.Module, "RecordedCall"], Call]
REPLACED = "_locater_replaced"  # on a stand-in: the attribute before it, and whether it has ended
CONTROL = "_locater_control"  # on a stand-in of a control: the repr of the control


def replace_method(module: nn.Module, name: str, function: Callable[..., Any], control: str | None = None) -> Undo:
    """Replace a method of one module by `function(module, method, *args, **kwargs)`; returns what restores it.

    A copy of the module has the original method; but where a `control` is named, its own stand-in and function.
    """
    ended = [False]
    with attaching:
        module.__dict__[name] = _make_replacement(module, name, function, control, module.__dict__.get(name), ended)
    return partial(_restore, module, name, ended)


def _make_replacement(
    module: nn.Module, name: str, function: Callable[..., Any], control: str | None, before: Any, ended: list[bool]
) -> Any:
    method = getattr(module, name) if before is None else before
    replacement = partial(function, module, method)
    copied = partial(_reduce_to_original, module, name, before)
    if control is not None:
        copied = partial(_reduce_to_replacement, (module, name, function, control, before, ended))
        vars(replacement)[CONTROL] = control
    # trainers and generate() read the signature of forward to decide how to call it
    vars(replacement).update(__wrapped__=method, __reduce_ex__=copied, **{REPLACED: (before, ended)})
    return replacement


def _restore(module: nn.Module, name: str, ended: list[bool]) -> None:
    ended[0] = True
    # stand-ins put on later may end later; a method that others put on top stays, with our stand-in idle below it
    with attaching:
        while (
            isinstance(top := module.__dict__.get(name), partial)
            and REPLACED in vars(top)
            and vars(top)[REPLACED][1][0]
        ):
            if vars(top)[REPLACED][0] is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = vars(top)[REPLACED][0]


def _reduce_to_original(
    module: nn.Module, name: str, before: Any, protocol: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """How a stand-in is copied and saved: as the original, so that no copy and no saved model knows of Locater."""
    return (getattr, (module, name)) if before is None else (partial, (before,))


def _reduce_to_replacement(arguments: tuple[Any, ...], protocol: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same for a stand-in that changes what the model computes: a copy without it would be another model."""
    return _make_replacement, arguments


def force_retrace(module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A stand-in that changes nothing, by which a compiled model is traced again."""
    return method(*args, **kwargs)


class RecordedCall:
    """One call of a module: its arguments, its result, and the tensors that passed through its parts, by name."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.tensors: dict[str, Tensor] = {}
        self.args: tuple[Any, ...] = ()
        self.kwargs: Mapping[str, Any] = {}
        self.returned: Any = None
        self._threads: dict[int, RecordedCall] = {}  # the calls that run now, of each thread its own

    @property
    def here(self) -> RecordedCall:
        """That of this thread. A graph has one."""
        if torch.compiler.is_dynamo_compiling():
            return self
        return self._threads.setdefault(threading.get_ident(), RecordedCall(self.owner))

    def end(self) -> None:
        """The call of this thread is over."""
        self._threads.pop(threading.get_ident(), None)

    def argument(self, at: int, name: str) -> Any:
        """An argument by keyword or by position; None where it was left out."""
        return argument_of(self.args, self.kwargs, at, name)

    def heads(self, name: str, count: int) -> Tensor | None:
        """The tensor `name` (B, T, H * V) split into heads (B, T, H, V); None where that part was not called."""
        x = self.tensors.get(name)
        return None if x is None else x.unflatten(-1, (count, -1))

    def keep(self, name: str, passed: Tensor) -> None:
        """Record the first tensor of this name: a part may be called again, as DeBERTa's maps are for its position
        table.
        """
        if name not in self.tensors and active_listeners(self.owner):
            self.tensors[name] = passed.detach()


def record_parts(
    module: nn.Module, describe: Describe, outputs: Sequence[str] = (), inputs: Sequence[str] = ()
) -> Iterator[Undo]:
    """Record outputs and inputs of the named parts, and describe each call of the module when it ends."""
    recorded = RecordedCall(module)
    yield replace_method(module, "forward", partial(_record_call, recorded, describe))
    for name in outputs:
        yield replace_method(getattr(module, name), "forward", partial(_keep_output, recorded, name))
    for name in inputs:
        yield replace_method(getattr(module, name), "forward", partial(_keep_input, recorded, name))


def _record_call(
    recorded: RecordedCall,
    describe: Describe,
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    sites = active_listeners(module)
    if not sites:
        return forward(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return _run_recorded(recorded, describe, sites, module, forward, *args, **kwargs)
    try:
        return _run_recorded(recorded.here, describe, sites, module, forward, *args, **kwargs)
    finally:
        recorded.end()


def _run_recorded(
    recorded: RecordedCall,
    describe: Describe,
    sites: Sequence[Listener],
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    recorded.tensors.clear()  # a call that failed may have left something
    out = forward(*args, **kwargs)
    recorded.args, recorded.kwargs, recorded.returned = args, kwargs, out
    with torch.no_grad():
        call = describe_call(sites, describe, module, recorded)
        if call is not None:
            notify(sites, call)
    recorded.args, recorded.kwargs, recorded.returned = (), {}, None
    recorded.tensors.clear()
    return out


def _keep_output(
    recorded: RecordedCall, name: str, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    out = forward(*args, **kwargs)
    recorded.here.keep(name, out)
    return out


def _keep_input(
    recorded: RecordedCall,
    name: str,
    part: nn.Module,
    forward: Callable[..., Any],
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    recorded.here.keep(name, x)
    return forward(x, *args, **kwargs)


def notify(sites: Sequence[Listener], call: Call) -> None:
    for site in sites:
        site.receive(call)


def argument_of(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[at] if len(args) > at else None


def cached_keys(module: Any, past: Any, key: Tensor, length: int | None) -> Tensor:
    """Keys as they meet the queries: those in the cache, the new ones included; `length` is how many there must be."""
    if past is None:
        return key
    layers = getattr(past, "layers", None)
    keys = getattr(layers[module.layer_idx], "keys", None) if layers is not None else None
    if not isinstance(keys, Tensor) or length not in (None, keys.shape[-2]):
        raise LocaterError(
            f"{layer_name(module)}: the keys of a {type(past).__name__} cannot be read as they are used: "
            "run with a DynamicCache or a StaticCache"
        )
    return keys.detach().to(key)


def layer_name(module: nn.Module) -> str:
    """The name of a layer for messages: from its listener, or its class."""
    sites = active_listeners(module)
    return sites[0].name if sites and sites[0].name else type(module).__name__
