"""What taps are made of: methods replaced on one module and on its parts, to keep what passes through them during one call.

No hooks: a compiled model does not notice hooks that come after its first call, but it does notice a replaced method. What
is put in place is a `functools.partial` of the module, so that a deep copy taken meanwhile speaks of the copy. Queries, keys
and outputs are kept as they were made, without their history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.probing.call import Call
from locater.probing.site import Site, listening

Undo = Callable[[], None]
Described = Callable[[nn.Module, "Passage"], Call]


def instead(module: nn.Module, name: str, heard: Callable[..., Any]) -> Undo:
    """Replace a method of one module by `heard(module, method, *args, **kwargs)`; returns what restores it."""
    had, before = name in module.__dict__, module.__dict__.get(name)
    module.__dict__[name] = partial(heard, module, getattr(module, name))

    def undo() -> None:
        if had:
            module.__dict__[name] = before
        else:
            module.__dict__.pop(name, None)

    return undo


class Passage:
    """One call of a module: its arguments, what it returned, and what passed through its parts."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.kept: dict[str, Tensor] = {}
        self.args: tuple[Any, ...] = ()
        self.kwargs: Mapping[str, Any] = {}
        self.returned: Any = None

    def argument(self, at: int, name: str) -> Any:
        """By keyword or by place; None where it was left out."""
        return argument(self.args, self.kwargs, at, name)

    def heads(self, name: str, count: int) -> Tensor | None:
        """What passed as `name` (B, T, H * V), split into heads (B, T, H, V); None where that part was not called."""
        held = self.kept.get(name)
        return None if held is None else held.unflatten(-1, (count, -1))

    def keep(self, name: str, passed: Tensor) -> None:
        """The first that passes: a part may be called again for other things, as DeBERTa's maps are for its table of places."""
        if name not in self.kept and listening(self.owner):
            self.kept[name] = passed.detach()


def along(module: nn.Module, described: Described, outputs: Sequence[str] = (), inputs: Sequence[str] = ()) -> Iterator[Undo]:
    """Keep what the named parts return or are given, and describe each call of the module when it ends."""
    passage = Passage(module)
    yield instead(module, "forward", partial(_whole, passage, described))
    for name in outputs:
        yield instead(getattr(module, name), "forward", partial(_keep_output, passage, name))
    for name in inputs:
        yield instead(getattr(module, name), "forward", partial(_keep_input, passage, name))


def _whole(passage: Passage, described: Described, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    sites = listening(module)
    if not sites:
        return forward(*args, **kwargs)
    passage.kept.clear()  # a call that failed may have left something
    out = forward(*args, **kwargs)
    passage.args, passage.kwargs, passage.returned = args, kwargs, out
    with torch.no_grad():
        tell(sites, described(module, passage))
    passage.args, passage.kwargs, passage.returned = (), {}, None
    passage.kept.clear()
    return out


def _keep_output(passage: Passage, name: str, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    passage.keep(name, out)
    return out


def _keep_input(passage: Passage, name: str, part: nn.Module, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    passage.keep(name, x)
    return forward(x, *args, **kwargs)


def tell(sites: Sequence[Site], call: Call) -> None:
    for site in sites:
        site.see(call)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[at] if len(args) > at else None


def cached(module: Any, past: Any, key: Tensor, length: int | None) -> Tensor:
    """Keys as they meet the queries: those in the cache, which holds the new ones by now; `length` is how many there must be."""
    if past is None:
        return key
    layers = getattr(past, "layers", None)
    held = getattr(layers[module.layer_idx], "keys", None) if layers is not None else None
    if not isinstance(held, Tensor) or length not in (None, held.shape[-2]):
        raise LocaterError(
            f"{name_of(module)}: the keys of a {type(past).__name__} cannot be read as they are used: "
            "run with a DynamicCache or a StaticCache"
        )
    return held.detach().to(key)


def name_of(module: nn.Module) -> str:
    """The layer's name where somebody listens, for messages."""
    sites = listening(module)
    return sites[0].name if sites and sites[0].name else type(module).__name__
