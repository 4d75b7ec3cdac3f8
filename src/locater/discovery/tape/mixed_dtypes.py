"""Calls with tensors in float32 and in float64: a model in float64 may make tensors of its own in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


def has_both(arguments: Any) -> bool:
    """Whether tensors in float32 and in float64 are among the arguments of a call."""
    return {torch.float32, torch.float64} <= {x.dtype for x in tree_flatten(arguments)[0] if isinstance(x, Tensor)}


def in_double(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with tensors in float32 cast to float64 first."""

    def cast(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(cast, (args, kwargs))
        return func(*args, **kwargs)

    return call
