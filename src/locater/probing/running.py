"""What attention layers are given: their inputs, as batches pass through a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from locater.probing.hidden import time_first

MEMORY = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


def attention_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """The stream (B, T, d) that queries read and, for cross-attention, the one that keys read; None where it cannot be told."""
    names = list(inspect.signature(module.forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if isinstance(module, nn.MultiheadAttention):
        x, memory = given.get("query"), given.get("key")
        memory = None if memory is x else memory
    else:
        x = given.get(names[0]) if names else None
        x = kwargs.get("hidden_states") if x is None else x
        memory = next((given[name] for name in MEMORY if isinstance(given.get(name), Tensor)), None)
    found = [_sequence(module, t) for t in (x, memory)]
    return found[0], found[1]


def _sequence(module: nn.Module, x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3:
        return None
    return (x.transpose(0, 1) if time_first(module) else x).detach()


def on_input(module: nn.Module, see: Callable[[Tensor, Tensor | None], None]) -> Callable[[], None]:
    """Call `see(x, memory)` at every call of an attention module; returns what takes it off."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, memory = attention_input(module, args, kwargs)
        if x is not None:
            see(x, memory)

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove
