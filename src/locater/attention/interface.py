"""Listening at the attention interface of transformers, where every backend passes: eager, SDPA, FlashAttention,
FlexAttention.

While anything is observed, each attention function in the library's table is replaced by one that reports the call and
then runs the function it stands for. The name a model asks for stays the same, so its configuration is not edited, its
masks are built by the builder of that name, and code that compares names takes the same way as before. The replacement
adds nothing to modules that nobody listens to.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from locater.attention.call import from_interface
from locater.attention.changes import CHANGES, AttentionRequest, changed
from locater.attention.listeners import KEY, described, listening

# table, name, what was there, ours
_replaced: list[tuple[dict[str, Any], str, Callable[..., Any] | None, Callable[..., Any]]] = []
_users = 0
_copied: set[int] = set()  # ids of changes that came with a copy of a model: they end with it
_named: dict[type[nn.Module], Callable[..., Any] | None] = {}
# models may be observed in several threads; a copy may be collected in the middle of what holds it
_lock = threading.RLock()


def install() -> None:
    """Put the listening functions into the tables; they stay until the last user removes them."""
    global _users
    with _lock:
        _users += 1  # first: a copy that is collected meanwhile must not undo what is done here
        try:
            _replace()
        except BaseException:
            _users -= 1
            raise


def keep(change: Any) -> None:
    """The same for as long as `change` is there, which acts in a copy of a model and has no control to remove it."""
    with _lock:
        _copied.add(id(change))
        weakref.finalize(change, _forget, id(change)).atexit = False
        _replace()


def _forget(number: int) -> None:
    with _lock:
        _copied.discard(number)
        _restore()


def _replace() -> None:
    held = [ours for _, _, _, ours in _replaced]
    for at, table in enumerate(_tables()):
        for name in {*table, *(("eager",) if at == 0 else ())}:
            was = table.get(name)
            if was not in held:  # of the second user on: only what has come meanwhile
                ours = table[name] = _listener(name, was)
                _replaced.append((table, name, was, ours))


def remove(changes: Iterable[Any] = ()) -> None:
    """What a user has installed; `changes` of a copy need it no longer."""
    global _users
    with _lock:
        _users = max(0, _users - 1)
        for change in changes:
            _copied.discard(id(change))
        _restore()


def _restore() -> None:
    """The tables as they were, once nobody needs them changed."""
    if _users or _copied:
        return
    entries = _replaced[::-1]
    _replaced.clear()
    for table, name, was, ours in entries:
        if table.get(name) is not ours:
            continue  # somebody has put another function there meanwhile
        if was is None:
            del table[name]
        else:
            table[name] = was


def _tables() -> list[dict[str, Any]]:
    """The table of all models and what was written over it, if transformers is in use."""
    if "transformers" not in sys.modules:
        return []
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    return [AttentionInterface._global_mapping, ALL_ATTENTION_FUNCTIONS._local_mapping]


def _listener(name: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kw: Any
    ) -> Any:
        base = eager_function(type(module)) if original is None else original
        if CHANGES in module.__dict__:  # by a control; who listens hears what is left of the call
            asked = changed(AttentionRequest(module, name, base, query, key, attention_mask, kw))
            base, query, key, kw = asked.attend, asked.query, asked.key, asked.kw
        out = base(module, query, key, value, attention_mask, *args, **kw)
        if KEY in module.__dict__:
            sites = listening(module)
            if sites:
                call = described(sites, from_interface, module, name, query, key, attention_mask, kw, out[0])
                if call is not None:
                    for site in sites:
                        site.see(call)
        return out

    return attend


def eager_function(kind: type[nn.Module]) -> Callable[..., Any]:
    """The plain attention function that a class of modules falls back on: the one its methods name, or else the one
    beside it.
    """
    if kind not in _named and not torch.compiler.is_compiling():
        _named[kind] = _function_named_by(kind)
    found = _named.get(kind)
    if found is not None:
        return found
    for base in kind.__mro__:
        found = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise LookupError(f"{kind.__name__}: no eager attention function beside it")


def _function_named_by(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """A file may hold several, one for pictures and one for text: a class names its own where it asks the table for
    another.
    """
    for base in kind.__mro__:
        for method in map(inspect.unwrap, filter(callable, vars(base).values())):
            code = getattr(method, "__code__", None)
            for name in () if code is None else code.co_names:
                if name.endswith("eager_attention_forward") and name in method.__globals__:
                    return cast(Callable[..., Any], method.__globals__[name])
    return None


def reaches(module: nn.Module) -> bool:
    """Whether a module calls its attention through the table, judged by what stands beside its class."""
    return any(hasattr(sys.modules.get(kind.__module__), "eager_attention_forward") for kind in type(module).__mro__)
