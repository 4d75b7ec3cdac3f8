"""A module that runs, and what its attention calls are: self- or cross-attention, in order or in blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from locater.calls.attention_like import CROSS, HEADS
from locater.calls.call_and_masks import Call
from locater.calls.function_listener import DirectCall
from locater.calls.head_axes import TensorStep, source_maps
from locater.calls.torch_calls import HIDDEN

CodePlace = tuple[tuple[CodeType, int], ...]  # functions and lines, from the call up to the module's forward
OTHER_TOKENS = ("encoder_hidden_states", "key_value_states", "cross_attention_states", "memory", "context")


@dataclass
class RunningModule:
    """A module that is running, and the attention calls that it made itself so far."""

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    calls: list[tuple[DirectCall, CodePlace | None]] = field(default_factory=list)  # and where; None: by the interface
    at_interface: list[DirectCall] = field(default_factory=list)  # what the interface said of the latter
    errors: list[Exception] = field(default_factory=list)  # for which calls of it were missed

    @property
    def tokens(self) -> int | None:
        """How many tokens it was given first."""
        return next((prod(x.shape[:-1]) for x in self.given_tokens), None)

    @property
    def given_tokens(self) -> list[Tensor]:
        """Tensors among its arguments that may be tokens."""
        return [x for x in self.arguments.values() if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1]


def arguments_by_name(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward by their names; those behind its names by their numbers."""
    names = _names_in_order(type(module).forward)
    return {**{names[at] if at < len(names) else str(at): x for at, x in enumerate(args)}, **kwargs}


@cache
def _names_in_order(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments of a method that may be given by place, without the module itself."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):  # a function that is not written in Python
        return ()
    return tuple(x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD))


def attention_kind(name: str, module: nn.Module, direct: DirectCall, call: Call, running: RunningModule | None) -> str:
    """ "cross" where queries and keys are different tokens, as far as name, arguments, lengths and what their maps read
    tell; or "self".
    """
    arguments = {} if running is None else running.arguments
    if _says_cross(name, module, arguments):
        return "cross"
    if call.query.shape[2] == call.key.shape[2]:
        return "cross" if running is not None and _reads_two_inputs(direct, running) else "self"
    return "self" if _is_cached(module, call, arguments) else "cross"


def _says_cross(name: str, module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a module is called cross-attention, or is given other tokens by name."""
    if getattr(module, "is_cross_attention", False) is True or CROSS.search(name.rpartition(".")[2]):
        return True
    first = next((x for x in arguments.values() if isinstance(x, Tensor)), None)
    return any((x := arguments.get(other)) is not None and not _same_tokens(x, first) for other in OTHER_TOKENS)


def _same_tokens(one: Any, other: Any) -> bool:
    if one is other:
        return True
    both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    return both and not one.is_nested and bool(torch.equal(one, other))


def _reads_two_inputs(direct: DirectCall, running: RunningModule) -> bool:
    """Whether queries are a map of one of the module's inputs and keys of another one, with other numbers."""
    given = {StorageWeakRef(x.untyped_storage()): x for x in running.given_tokens if not x.is_nested}
    if len(given) < 2 or direct.query is None or direct.key is None:
        return False
    queries, keys = (_storages_read(step) for step in (direct.query, direct.key))
    if not queries or not keys or queries & keys or not (queries | keys) <= given.keys():
        return False
    return not any(_same_tokens(given[one], given[other]) for one in queries for other in keys)


def _storages_read(step: TensorStep) -> set[StorageWeakRef]:
    return {memory.storage for base in source_maps(step) for memory in base.read}


def _is_cached(module: nn.Module, call: Call, arguments: dict[str, Any]) -> bool:
    """Whether the keys of a call are those of a cache, which may be more than the queries."""
    caches = (arguments.get(name) for name in ("past_key_values", "past_key_value", "layer_past"))
    cache = next((cache for cache in caches if cache is not None), None)
    if cache is None:
        return False
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    number = getattr(module, "layer_idx", None)
    if isinstance(layers, list) and isinstance(number, int) and number < len(layers):
        keys = getattr(layers[number], "keys", None)
        return not isinstance(keys, Tensor) or keys.ndim < 2 or keys.shape[-2] == call.key.shape[2]
    return True


def has_local_keys(call: Call, running: RunningModule) -> bool:
    """Whether queries and keys of a call are the same tokens, though their numbers differ: keys in blocks around each
    query. Then the module was given no tokens that are the keys alone.
    """
    if _says_cross(running.name, running.module, running.arguments):
        return False
    (B, _, T, _), S = call.query.shape, call.key.shape[2]
    given_tokens = [prod(x.shape[:-1]) for x in running.given_tokens if x.ndim > 2]
    return bool(given_tokens) and B * S not in given_tokens and S > T


def hide_padding_rows(call: Call, running: RunningModule) -> Call:
    """The call with rows of padding that see no key, where the module was given a mask (B, T) that is added."""
    mask, bias = running.arguments.get("attention_mask"), call.terms.bias
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return call
    if bias is None or mask.shape != (bias.shape[0], bias.shape[2]):
        return call
    return call.with_terms(bias=bias.masked_fill((mask < HIDDEN)[:, None, :, None], -torch.inf))


def declared_heads(module: nn.Module) -> int | None:
    """The number of query heads that a module says it has; None where it says none."""
    return next((count for name in HEADS if isinstance(count := getattr(module, name, None), int)), None)
