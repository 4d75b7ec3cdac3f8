"""Listening at the attention interface of transformers, which every backend passes: eager, SDPA, FlashAttention,
FlexAttention.

While anything is observed, each attention function in the library's table is replaced by one that reports the call and
then runs the original. Its name stays the same: configurations are not edited, masks are built by the builder of that
name, and code that compares names takes the same branch as before. Modules without listeners are not affected.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from locater.calls.call_and_masks import PAGED, Call, call_of_interface
from locater.calls.interceptors import INTERCEPTORS, AttentionRequest, intercept_request
from locater.calls.listeners import KEY, Listener, active_listeners, describe_call, is_measured
from locater.calls.paged_cache import paged_cache_of, reading
from locater.kernels.fused import attend_with_numbers, is_fused
from locater.torch_private import attention_tables

# The output of a model's attention and its statistics from one kernel, in place of the model's own attention.


def attend_in_one_kernel(
    site: Listener, module: nn.Module, name: str, tensors: tuple[Tensor, Tensor, Tensor], mask: Any, kw: dict[str, Any]
) -> tuple[Tensor, Call] | None:
    """Output (B, T, H, V) and the call with its statistics; None where the model's own attention has to run."""
    query, key, value = tensors
    if torch.compiler.is_dynamo_compiling():  # what the kernel takes is asked of the device
        return None
    if kw.get("mechanism") is not None or kw.get("output_attentions") or (kw.get("dropout") and module.training):
        return None
    if not query.ndim == key.ndim == value.ndim == 4:
        return None
    call = describe_call((site,), call_of_interface, module, name, query, key, mask, kw, query)
    if call is None or call.cut is not None or call.key.shape != key.shape or call.query.shape != query.shape:
        return None
    if not is_fused(query, key, value, call.terms):
        return None
    out, numbers = attend_with_numbers(query, key, value, call.terms)
    output = out.transpose(1, 2)
    return output, replace(call, output=output.detach(), statistics=numbers)


# table, name, the original, our replacement
_replaced: list[tuple[dict[str, Any], str, Callable[..., Any] | None, Callable[..., Any]]] = []
_users = 0
_copied: set[int] = set()  # ids of changes that came with a copy of a model, until the copy is collected
_eager_functions: dict[type[nn.Module], Callable[..., Any] | None] = {}
# models may be observed in several threads; a copy may be collected while its own thread has the lock
_lock = threading.RLock()


def install() -> None:
    """Put the listening functions into the tables; they stay until the last user removes them."""
    global _users
    with _lock:
        _users += 1  # first: a copy that is collected meanwhile must not undo what is done here
        try:
            _install_replacements()
        except BaseException:
            _users -= 1
            raise


def keep_installed(change: Any) -> None:
    """`install` for as long as `change` exists: it acts in a copy of a model, where no control removes it."""
    with _lock:
        _copied.add(id(change))
        weakref.finalize(change, _forget, id(change)).atexit = False
        _install_replacements()


def _forget(number: int) -> None:
    with _lock:
        _copied.discard(number)
        _put_originals_back()


def _install_replacements() -> None:
    installed = [ours for _, _, _, ours in _replaced]
    for at, table in enumerate(_tables()):
        for name in {*table, *(("eager",) if at == 0 else ())}:
            was = table.get(name)
            if was not in installed:  # a second user finds most functions replaced already
                ours = table[name] = listening_function(name, was)
                _replaced.append((table, name, was, ours))


def remove(changes: Iterable[Any] = ()) -> None:
    """End one `install`; `changes` of a copy need it no longer."""
    global _users
    if cast(Any, _lock) is None:  # the interpreter ends, and has taken this module apart
        return
    with _lock:
        _users = max(0, _users - 1)
        for change in changes:
            _copied.discard(id(change))
        _put_originals_back()


def _put_originals_back() -> None:
    """Put the originals back, once nobody needs the replacements."""
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
    """The global table of attention functions and the local overrides, if transformers is in use."""
    if "transformers" not in sys.modules:
        return []
    return attention_tables()


def listening_function(name: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kw: Any
    ) -> Any:
        base = eager_function(type(module)) if original is None else original
        if INTERCEPTORS in module.__dict__:  # by a control, before listeners see the call
            request = intercept_request(AttentionRequest(module, name, base, query, key, attention_mask, kw))
            base, query, key, kw = request.attend, request.query, request.key, request.kw
        sites = active_listeners(module) if KEY in module.__dict__ else ()
        cache = paged_cache_of(kw) if sites else None
        own_kernel = INTERCEPTORS in module.__dict__ or cache is not None
        if len(sites) == 1 and getattr(sites[0], "takes_statistics", False) and not own_kernel:
            both = attend_in_one_kernel(sites[0], module, name, (query, key, value), attention_mask, kw)
            if both is not None:
                sites[0].receive(both[1])
                return both[0], None
        if cache is None:
            out = base(module, query, key, value, attention_mask, *args, **kw)
        else:  # the function reads the keys of all requests itself
            with reading(cache) as read:
                out = base(module, query, key, value, attention_mask, *args, **kw)
            kw = {**kw, PAGED: read}
        if sites:
            call = describe_call(sites, call_of_interface, module, name, query, key, attention_mask, kw, out[0])
            if call is not None:
                for site in sites:
                    if call.parts is None or is_measured(site, call):
                        site.receive(call)
        return out

    return attend


def eager_function(kind: type[nn.Module]) -> Callable[..., Any]:
    """The eager attention function of a class of modules: the one that its methods name, or the one in its file."""
    if kind not in _eager_functions and not torch.compiler.is_dynamo_compiling():
        _eager_functions[kind] = _function_named_by(kind)
    function = _eager_functions.get(kind)
    if function is not None:
        return function
    for base in kind.__mro__:
        function = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise LookupError(f"{kind.__name__}: no eager attention function in its file")


def _function_named_by(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The eager function named in the code of a class. A file may have several, one for images and one for text.

    Outside transformers it may have any name: then it is the one that takes module, query, key and value.
    """
    functions = [function for base in kind.__mro__ if base is not nn.Module for function in _named_functions(base)]
    by_name = [function for name, function in functions if name.endswith("eager_attention_forward")]
    return next(
        iter([*by_name, *(function for _, function in functions if _takes_attention_arguments(function))]), None
    )


def _named_functions(base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of its file that the methods of a class name."""
    for method in map(inspect.unwrap, filter(callable, vars(base).values())):
        code = getattr(method, "__code__", None)
        for name in () if code is None else code.co_names:
            if callable(function := method.__globals__.get(name)):
                yield name, cast(Callable[..., Any], function)


def _takes_attention_arguments(function: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_varnames[:4] == ("module", "query", "key", "value")


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether a module calls its attention through the table: then its file has an eager attention function."""
    return any(hasattr(sys.modules.get(kind.__module__), "eager_attention_forward") for kind in type(module).__mro__)


def always_uses_interface(module: nn.Module) -> bool:
    """Whether the code of a module takes its attention function from the table of transformers, in every case."""
    if getattr(module, "reorder_and_upcast_attn", False):  # GPT-2 with an attention of its own
        return False
    return any("ALL_ATTENTION_FUNCTIONS" in names for names in _code_names(type(module)))


def _code_names(kind: type[nn.Module]) -> Iterator[tuple[str, ...]]:
    for base in kind.__mro__:
        for method in map(inspect.unwrap, filter(callable, vars(base).values())):
            code = getattr(method, "__code__", None)
            if code is not None:
                yield code.co_names
