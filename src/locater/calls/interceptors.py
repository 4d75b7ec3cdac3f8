"""Changes to attention at the interface: an ordered list on a module, applied to queries, keys and function before each
call.

Listeners see the call after all changes. A copy of a model, or a saved one, has no changes, except those of controls
that change what the model computes (`ForwardChange`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.call_and_masks import Call, call_of_interface, scale_of
from locater.errors import LocaterError
from locater.torch_private import assume_constant_result

INTERCEPTORS = "_locater_changes"  # in the module's __dict__, as sites are


@dataclass(frozen=True)
class AttentionRequest:
    """A call that a module is about to make of its attention function, which transformers calls `name`. `mask` and `kw`
    are the arguments as transformers passes them; `call()` reads them.
    """

    module: nn.Module
    name: str
    attend: Callable[..., Any]
    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, K, S, D)
    mask: Any
    kw: dict[str, Any]

    @property
    def scale(self) -> float:
        """What multiplies q.k in this call. It is not the scale of the layer if queries are scaled before."""
        return scale_of(self.module, self.query, self.kw)

    def call(self) -> Call:
        """The request as a call, with gradients."""
        call = call_of_interface(self.module, self.name, self.query, self.key, self.mask, self.kw, self.query)
        if call.why_unmeasurable is not None:
            raise LocaterError(call.why_unmeasurable)
        terms, bias, sinks = call.terms, self.kw.get("position_bias"), self.kw.get("s_aux")
        if terms.bias is not None and bias is not None:
            bias = bias[..., : terms.bias.shape[-1]]
            terms = replace(terms, bias=terms.bias + (bias - bias.detach()))  # a mask may have been added to it
        if sinks is not None:
            terms = replace(terms, sinks=sinks)
        # queries of a graph may have been made NaN, since it cannot refuse a call
        query = self.query + 0 * call.query if torch.compiler.is_dynamo_compiling() and terms.softcap else self.query
        return Call(query, self.key[:, :, : call.key.shape[2]], terms, cut=call.cut)


class Interceptor:
    """One change. Changes with a lower `order` come first; those of equal order come as they were put on."""

    order = 0
    number = -1  # counts all changes ever put on

    @property
    def called(self) -> bool:
        """Whether attention has been reached since it was put on."""
        return self.number in _reached

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        raise NotImplementedError

    def fold(self, layer: Any, fold: Callable[[Any], Any]) -> Any:
        """The effective maps of an `AttentionLayer` under this change; `fold` gives those under the changes before
        it.
        """
        return fold(layer)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()


def interceptors(module: nn.Module) -> tuple[Interceptor, ...]:
    return tuple(change for change in module.__dict__.get(INTERCEPTORS, ()) if change is not None)


def intercept_request(request: AttentionRequest) -> AttentionRequest:
    """The request after every change of its module."""
    for change in interceptors(request.module):
        request = change(request)
        _note_call(change.number)
    return request


@assume_constant_result
def _note_call(number: int) -> bool:
    """Noted when it runs, or when it is compiled: an attribute set in a checkpointed region would break the graph."""
    _reached.add(number)
    return True


_reached: set[int] = set()
_numbers = itertools.count()


def renumber(change: Interceptor) -> Interceptor:
    """The change with a new number, not called yet."""
    change.number = next(_numbers)
    return change


def add_interceptor(module: nn.Module, change: Interceptor) -> None:
    renumber(change)
    module.__dict__[INTERCEPTORS] = tuple(sorted((*interceptors(module), change), key=lambda c: c.order))


def remove_interceptor(module: nn.Module, change: Interceptor) -> None:
    _reached.discard(change.number)
    left = tuple(c for c in interceptors(module) if c is not change)
    if left:
        module.__dict__[INTERCEPTORS] = left
    else:
        module.__dict__.pop(INTERCEPTORS, None)
