"""Random parameters of any size in little memory: the rows of a large one are overlapping parts of one line of numbers.

Row i begins `STRIDE` numbers after row i - 1, so that no two rows are alike. A matrix of 128,000 x 2,048 numbers takes
17 MB, in place of 2 GB. Each parameter has a line of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGE = 1 << 18  # numbers: tensors with more are thin
STRIDE = 17
AT_ONCE = 1 << 21  # numbers of a thin matrix that are written out and multiplied at once


def thin_strides(shape: Iterable[int]) -> list[int] | None:
    """The strides of a thin tensor of this shape; None where it is stored in full: small ones, and those of short
    rows.
    """
    shape = tuple(shape)
    if len(shape) < 2 or math.prod(shape) <= LARGE or shape[-1] <= 2 * STRIDE:
        return None
    strides = [1, STRIDE]
    for size in reversed(shape[1:-1]):
        strides.append(strides[-1] * size)
    return strides[::-1]


def is_thin(x: Any) -> bool:
    """Whether rows of a matrix overlap in memory."""
    return isinstance(x, Tensor) and x.ndim == 2 and x.stride(1) == 1 and 0 < x.stride(0) < x.shape[1]


def tables_of_sines(model: nn.Module) -> set[int]:
    """Identities of parameters that are fixed tables of sines: positions that no training changes. Others in their
    place would turn channels otherwise than by angles.
    """
    modules = [module for module in model.modules() if "sinus" in type(module).__name__.lower()]
    return {id(p) for module in modules for p in module.parameters(recurse=False)}


@torch.no_grad()
def redraw(model: nn.Module, seed: int) -> None:
    """Every parameter from a normal distribution: matrices by fan-in, embeddings of unit size, biases and gains wide.
    At initialisation biases are 0 and gains 1, and a mistake can hide behind that. Large parameters become thin, and
    those before them stay as they are for whoever kept them.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    fixed = tables_of_sines(model)
    for name, p in model.named_parameters():
        if not p.is_floating_point() or not p.numel() or id(p) in fixed:
            continue
        spread, mean = _spread(name, p, id(p) in tables)
        strides = thin_strides(p.shape)
        if strides is None:
            p.copy_(mean + spread * torch.randn(p.shape, generator=generator, dtype=torch.float64))
            continue
        reach = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, strides, strict=True))
        line = mean + spread * torch.randn(reach, generator=generator, dtype=torch.float64)
        p.data = line.to(p.dtype).as_strided(p.shape, strides)


def _spread(name: str, p: Tensor, table: bool) -> tuple[float, float]:
    """(standard deviation, mean) of what a parameter is drawn from."""
    if p.ndim >= 2:
        return (1.0 if table or min(p.shape) == 1 else min(p.shape[0], p[0].numel()) ** -0.5), 0.0
    return 0.5, 0.0 if name.endswith("bias") else 1.0


class ThinProducts(TorchFunctionMode):
    """Multiplies thin matrices a few rows at a time, written out into memory that is used again and again: PyTorch
    would write them out in full.
    """

    def __init__(self) -> None:
        super().__init__()
        self._space: dict[torch.dtype, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and len(args) > 1 and is_thin(args[1]) and args[1].dtype == args[0].dtype:
            return torch.cat(list(self._parts(*args, **kwargs)), -1)
        return func(*args, **kwargs)

    def _parts(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Tensor]:
        step = max(1, AT_ONCE // weight.shape[1])
        space = self._space.get(weight.dtype)
        if space is None or space.numel() < step * weight.shape[1]:
            space = self._space[weight.dtype] = torch.empty(max(AT_ONCE, weight.shape[1]), dtype=weight.dtype)
        for start in range(0, len(weight), step):
            part = weight[start : start + step]
            written = space[: part.numel()].view(part.shape).copy_(part)
            yield torch.nn.functional.linear(x, written, None if bias is None else bias[start : start + step])
