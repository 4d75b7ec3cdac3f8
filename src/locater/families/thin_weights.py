"""Random parameters of any size in little memory: the rows of a large one are overlapping parts of one line of numbers.

Row i of such a tensor begins a few numbers after row i - 1, so that no two rows are alike. A matrix of 128,000 x
2,048 numbers takes 40 MB or less, in place of 2 GB. Tensors share lines, and begin at different places of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGE = 1 << 18  # numbers: tensors with more are thin
STRIDES = (17, 19, 23, 29, 31, 37, 41, 43)  # primes: tensors with different ones never run in step
AT_ONCE = 1 << 21  # numbers of a thin matrix that are written out and multiplied at once


def thin(shape: Iterable[int], number: int) -> Tensor | None:
    """A tensor of this shape on the meta device with the strides that the `number`th large one has; None where it is
    stored in full: tensors that are small, or of short rows.
    """
    shape = tuple(shape)
    if len(shape) < 2 or math.prod(shape) <= LARGE or shape[-1] <= STRIDES[-1]:
        return None
    strides = [1, STRIDES[number % len(STRIDES)]]
    for size in reversed(shape[1:-1]):
        strides.append(strides[-1] * size)
    return torch.empty_strided(shape, strides[::-1], dtype=torch.float64, device="meta")


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
    lines: dict[tuple[float, torch.dtype], list[tuple[nn.Parameter, Tensor]]] = {}
    numbers = itertools.count()
    fixed = tables_of_sines(model)
    for name, p in model.named_parameters():
        if not p.is_floating_point() or not p.numel() or id(p) in fixed:
            continue
        spread, mean = _spread(name, p, id(p) in tables)
        form = thin(p.shape, next(numbers))
        if form is None:
            p.copy_(mean + spread * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        else:
            lines.setdefault((spread, p.dtype), []).append((p, form))
    for (spread, dtype), forms in lines.items():
        length = max(_extent(form) for _, form in forms) + len(forms)
        line = (spread * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype)
        for place, (p, form) in enumerate(forms):  # each begins at a place of its own
            p.data = line.as_strided(form.shape, form.stride(), place)


def _spread(name: str, p: Tensor, table: bool) -> tuple[float, float]:
    """(standard deviation, mean) of what a parameter is drawn from."""
    if p.ndim >= 2:
        return (1.0 if table or min(p.shape) == 1 else min(p.shape[0], p[0].numel()) ** -0.5), 0.0
    return 0.5, 0.0 if name.endswith("bias") else 1.0


def _extent(form: Tensor) -> int:
    """How many numbers of a line a tensor reaches over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))


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
        space = self._space.setdefault(weight.dtype, torch.empty(AT_ONCE, dtype=weight.dtype))
        step = max(1, AT_ONCE // weight.shape[1])
        for part, start in zip(weight.split(step), range(0, len(weight), step), strict=True):
            full = (
                space[: part.numel()].view(part.shape) if part.numel() <= AT_ONCE else torch.empty(part.shape).to(part)
            )
            yield torch.nn.functional.linear(
                x, full.copy_(part), None if bias is None else bias[start : start + len(part)]
            )
