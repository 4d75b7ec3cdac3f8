"""Convolutions with kernels of one place, written as the linear maps that they are, so that a tape has these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

AXES = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def as_map(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """(input, weight, bias) of a convolution that is one map of all places; None for other calls.

    >>> x, w = torch.zeros(2, 4, 7), torch.zeros(6, 4, 1)
    >>> as_map(torch.conv1d, (x, w), {}) is not None, as_map(torch.conv1d, (x, torch.zeros(6, 4, 3)), {})
    (True, None)
    """
    axes = AXES.get(func)
    if axes is None or len(args) > len(NAMES):
        return None
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    x, weight = given.get("input"), given.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.ndim != axes + 2:
        return None
    single = all(size == 1 for size in weight.shape[2:]) and given.get("groups", 1) == 1
    strides, padding = given.get("stride", 1), given.get("padding", 0)
    plain = all(n == 1 for n in _each(strides)) and (padding == "valid" or all(n == 0 for n in _each(padding)))
    return (x, weight, given.get("bias")) if single and plain else None


def mapped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The result of the convolution.

    >>> x, w = torch.randn(2, 4, 7), torch.randn(6, 4, 1)
    >>> torch.allclose(mapped(x, w, None), torch.conv1d(x, w), atol=1e-6)
    True
    """
    return torch.nn.functional.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def _each(setting: Any) -> tuple[Any, ...]:
    return tuple(setting) if isinstance(setting, list | tuple) else (setting,)
