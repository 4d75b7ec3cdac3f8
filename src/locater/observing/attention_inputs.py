"""The streams that attention layers read, taken by hooks while batches pass through a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locater.observing.residual_stream import time_first

MEMORY = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


@dataclass(frozen=True)
class AttentionInput:
    """The stream (B, T, d) that queries read and, for cross-attention, the one (B, S, e) that keys read."""

    x: Tensor
    memory: Tensor | None = None
    real: Tensor | None = None  # (B, T), where x itself says which tokens there are: a nested tensor


def attention_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] | None = None
) -> AttentionInput | None:
    """The input of a call of an attention module, None where it is not known. `names` are those of its arguments, where
    they were looked up before.
    """
    names = list(inspect.signature(module.forward).parameters) if names is None else names
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if isinstance(module, nn.MultiheadAttention):
        x, memory = arguments.get("query"), arguments.get("key")
        memory = None if memory is x else memory
    else:
        x = arguments.get(names[0]) if names else None
        x = kwargs.get("hidden_states") if x is None else x
        memory = next((arguments[name] for name in MEMORY if isinstance(arguments.get(name), Tensor)), None)
    if isinstance(x, Tensor) and x.is_nested:
        lengths = torch.tensor([len(part) for part in x.unbind()], device=x.device)
        x = torch.nested.to_padded_tensor(x, 0.0).detach()
        return AttentionInput(x, None, torch.arange(x.shape[1], device=x.device) < lengths[:, None])
    sequence = _sequence(module, x)
    return None if sequence is None else AttentionInput(sequence, _sequence(module, memory))


def _sequence(module: nn.Module, x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or x.is_nested:
        return None
    if x.ndim == 2 and isinstance(module, nn.MultiheadAttention):
        return x.detach()[None]
    return (x.transpose(0, 1) if time_first(module) else x).detach() if x.ndim == 3 else None


def listen_to_input(module: nn.Module, see: Callable[[AttentionInput], None]) -> Callable[[], None]:
    """Call `see` with the input of every call of an attention module; returns a function that ends it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = attention_input(module, args, kwargs)
        if read is not None:
            see(read)

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove
