"""Every tensor of two sources side by side: equal, equal but for its type, or changed; by how much, of what rank."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locater.numerics import one_thread
from locater.sources.weights import Weights

SKETCH = 128  # rows and columns that a difference is folded into before its rank is taken
HIGHEST = SKETCH // 2  # rank that is told from a full one
COPIES = 4  # rows of the sketch that a row is added to, so that no two rows of a few coincide
AT_ONCE = 2**22  # numbers of a tensor that are in memory as floats at a time
# singular values of rounding noise lie below this many times what noise of the same size and no structure has
ABOVE_NOISE = 2.0
NOISE_LEFT = 1.5  # times the squared norm of all rounding, at most, is what small singular values may hold


class TensorDifference(NamedTuple):
    """One tensor that both sources have, by its name. `kind` is "equal" (bytes), "dtype" (numbers equal once either is
    rounded to the type of the other), "shape" or "changed".
    """

    name: str
    kind: str
    relative: float | None = None  # norm of the difference over that of the first; None where either is not finite
    rank: int | None = None  # of the difference of a matrix; None where it is full or above HIGHEST, or no matrix
    nonfinite: int = 0  # numbers that are finite in the first alone

    @property
    def module(self) -> str:
        """The kind of module: its name without the numbers of layers."""
        return kind_of_module(self.name)


def kind_of_module(name: str) -> str:
    """The name of a tensor with its layer left open.

    >>> kind_of_module("model.layers.3.self_attn.q_proj.weight")
    'model.layers.*.self_attn.q_proj.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)


def tensor_differences(
    first: Weights, second: Weights, progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None
) -> Iterator[TensorDifference]:
    """The tensors that both have, one at a time, in the order of their names."""
    both = sorted({*first.names()} & {*second.names()})
    for name in progress(both, len(both)) if progress else both:
        if first.shape(name) != second.shape(name):
            yield TensorDifference(name, "shape")
        else:
            yield difference(name, *(weights.read(name).detach().cpu() for weights in (first, second)))


@torch.no_grad()
def difference(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    """Two tensors of one shape.

    >>> difference("w", torch.ones(4, 4), torch.ones(4, 4) + torch.eye(4)[:1])
    TensorDifference(name='w', kind='changed', relative=0.5, rank=1, nonfinite=0)
    """
    if a.dtype == b.dtype:
        if _equal_bytes(a, b):
            return TensorDifference(name, "equal")
    elif a.is_floating_point() == b.is_floating_point() and any(
        all(_equal_bytes(x.to(y.dtype), y) for x, y in _blocks(*pair)) for pair in ((a, b), (b, a))
    ):
        return TensorDifference(name, "dtype")
    with one_thread():
        return _changed(name, a, b)


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of both at a time; a vector is a column."""
    rows = (x.flatten(1) if x.ndim > 1 else x.reshape(-1, 1) for x in (a, b))
    step = max(1, AT_ONCE // max(1, math.prod(a.shape[1:])))
    yield from zip(*(x.split(step) for x in rows), strict=True)


def _equal_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def _changed(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    """The norm and rank of a difference, from blocks of rows."""
    matrix = a.ndim > 1 and min(len(a), math.prod(a.shape[1:])) > 1
    draw = torch.Generator().manual_seed(0)
    change, sizes, lost, sketch = 0.0, [0.0, 0.0], 0, torch.zeros(())
    for x, y in _blocks(a, b):
        x, y = _as_floats(x), _as_floats(y)
        lost += int((x.isfinite() & ~y.isfinite()).sum())
        change += _squared_norm(y - x)
        sizes = [size + _squared_norm(part) for size, part in zip(sizes, (x, y), strict=True)]
        if matrix and math.isfinite(change):
            sketch = sketch + _folded((y - x).float(), draw)
    if not (math.isfinite(change) and math.isfinite(sizes[0])):
        return TensorDifference(name, "changed", nonfinite=lost)
    relative, rank = math.sqrt(change / sizes[0]) if sizes[0] else None, None
    if matrix:
        rounding = max(_rounding(x.dtype) * math.sqrt(size) for x, size in zip((a, b), sizes, strict=True))
        rank = _rank(_folded(sketch.mT, draw), rounding, (len(a), math.prod(a.shape[1:])))
    return TensorDifference(name, "changed", relative, rank, lost)


def _squared_norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _rounding(dtype: torch.dtype) -> float:
    """Root mean square of the rounding of numbers, at most, over their own."""
    return torch.finfo(dtype).eps / 12**0.5 if dtype.is_floating_point else 0.0


def _as_floats(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _folded(matrix: Tensor, draw: torch.Generator) -> Tensor:
    """Rows added up into SKETCH rows, each into several with random signs, so that the singular values of a matrix of
    low rank stay what they were, nearly.
    """
    folded = torch.zeros(SKETCH, matrix.shape[1])
    for _ in range(COPIES):
        signs = torch.randint(0, 2, (len(matrix), 1), generator=draw) * 2 - 1
        places = torch.randint(0, SKETCH, (len(matrix),), generator=draw)
        folded.index_add_(0, places, matrix * signs)
    return folded / COPIES**0.5


def _rank(sketch: Tensor, rounding: float, shape: tuple[int, int]) -> int | None:
    """How many singular values stand out of noise, `rounding` in norm; None where these are all of them, or too many
    to be counted in a sketch, or where what is left is more than noise.
    """
    values = torch.linalg.svdvals(sketch.double())
    noise = 2 * rounding / SKETCH**0.5  # largest singular value of a sketch of noise without structure
    exact = float(values[0]) * max(shape) * torch.finfo(torch.float32).eps
    above = values > max(ABOVE_NOISE * noise, exact)
    rank, left = int(above.sum()), float(values[~above].square().sum())
    explained = left <= NOISE_LEFT * rounding**2 + SKETCH * exact**2
    return rank if explained and rank <= HIGHEST and rank < min(shape) else None
