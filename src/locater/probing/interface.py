"""Listening at the attention interface of transformers, where every backend passes: eager, SDPA, FlashAttention, FlexAttention.

While anything is observed, each attention function in the library's table is replaced by one that reports the call and then
runs the function it stands for. The name a model asks for stays the same, so its configuration is not edited, its masks are
built by the builder of that name, and code that compares names takes the same way as before. The replacement adds nothing to
modules that nobody listens to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from locater.probing.call import from_interface
from locater.probing.site import KEY, listening

_originals: dict[str, Callable[..., Any] | None] = {}
_users = 0


def install() -> None:
    """Put the listening functions into the table; they stay until the last user removes them."""
    global _users
    table = _table()
    if table is None:
        return
    if _users == 0:
        for name in {*table, "eager"}:
            _originals[name] = table.get(name)
            table[name] = _listener(name, table.get(name))
    _users += 1


def remove() -> None:
    global _users
    table = _table()
    if table is None or _users == 0:
        return
    _users -= 1
    if _users:
        return
    for name, original in _originals.items():
        if original is None:
            table.pop(name, None)
        else:
            table[name] = original
    _originals.clear()


def _table() -> dict[str, Callable[..., Any]] | None:
    """The table, if transformers is in use."""
    if "transformers" not in sys.modules:
        return None
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface._global_mapping


def _listener(name: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kw: Any) -> Any:
        base = eager_function(module) if original is None else original
        out = base(module, query, key, value, attention_mask, *args, **kw)
        if KEY in module.__dict__:
            sites = listening(module)
            if sites:
                call = from_interface(module, name, query, key, attention_mask, kw, out[0])
                for site in sites:
                    site.see(call)
        return out

    return attend


def eager_function(module: nn.Module) -> Callable[..., Any]:
    """The plain attention function beside the class of `module`, or beside the class it was derived from."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise LookupError(f"{type(module).__name__}: no eager attention function beside it")


def reaches(module: nn.Module) -> bool:
    """Whether a module calls its attention through the table, judged by what stands beside its class."""
    return any(hasattr(sys.modules.get(kind.__module__), "eager_attention_forward") for kind in type(module).__mro__)
