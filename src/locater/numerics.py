"""Threads of PyTorch, precision, rank correlation, intervals of means, and numbers that may be missing."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from numbers import Real
from statistics import fmean, median, stdev

import torch
from jaxtyping import Float
from torch import Tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Run this block with one PyTorch thread: for small operations, a team of threads costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_thread = threading.local()


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    _thread.alone = True


@contextmanager
def lone_workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Workers with one PyTorch thread each, in which `spread_over_workers` starts no further workers."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=_use_one_thread) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # workers have changed the number that later threads start with


def spread_over_workers(function: Callable[..., Tensor], *matrices: Float[Tensor, "*n h h"]) -> Tensor:
    """Apply a batched decomposition, with the matrices distributed over workers of one thread each.

    Several threads inside a decomposition of a 64 x 64 matrix cost more than they gain, and on a busy machine they cost
    two hundred times more. CUDA has no fast non-symmetric solver.

    >>> spread_over_workers(torch.linalg.eigvalsh, torch.eye(2).expand(3, 2, 2)).shape
    torch.Size([3, 2])
    """
    if getattr(_thread, "alone", False):
        return function(*matrices)
    leading = matrices[0].shape[:-2]
    flat = [m.reshape(-1, *m.shape[-2:]) for m in matrices]
    workers = min(os.cpu_count() or 1, max(1, len(flat[0]) // 4))
    with one_thread(), lone_workers(workers) as pool:
        parts = list(pool.map(function, *(m.tensor_split(workers) for m in flat)))
    return torch.cat(parts).unflatten(0, leading) if leading else parts[0][0]


def upcast(w: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it already is."""
    return w if w.dtype in (torch.float32, torch.float64) else w.float()


def as_float64(x: Tensor | float) -> Tensor:
    """A tensor in float64 on its own device; a number on the default device."""
    return x.double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Spearman's rank correlation. Ties share their mean rank. None if one side is constant.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 15.0])), 6)
    0.5
    """
    x, y = (_mean_ranks(t) for t in (a, b))
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size else None


def _mean_ranks(x: Tensor) -> Tensor:
    _, inverse, counts = x.double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]


def is_number(value: object) -> bool:
    """Whether a setting is a finite number: no word, and neither True nor NaN.

    >>> is_number(2), is_number("2"), is_number(True), is_number(math.nan)
    (True, False, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def finite_or_none(x: float | None) -> float | None:
    """The number, or None if it is missing, infinite or NaN, which JSON does not have.

    >>> finite_or_none(2.5), finite_or_none(math.inf), finite_or_none(None)
    (2.5, None, None)
    """
    return x if x is not None and math.isfinite(x) else None


def known_median(values: Iterable[float | None]) -> float | None:
    """Median of the values that are not None; None if all are.

    >>> known_median([3.0, None, 1.0])
    2.0
    """
    known = [value for value in values if value is not None]
    return median(known) if known else None


LEVEL = 0.05  # of intervals: they cover what they are of in 95 % of samples


def probability_within(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's t with a whole number of degrees of freedom, by its finite sum.

    >>> [round(probability_within(t, n), 4) for t, n in ((12.706, 1), (4.303, 2), (2.365, 7))]
    [0.95, 0.95, 0.95]
    """
    angle = math.atan(t / math.sqrt(freedom))
    term = math.cos(angle) if freedom % 2 else 1.0
    total = 0.0
    for power in range(1 + freedom % 2, freedom, 2):  # of even freedom 1, 3, ..., of odd 2, 4, ...
        total += term
        term *= math.cos(angle) ** 2 * power / (power + 1)
    if freedom % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def quantile(freedom: int, level: float = LEVEL) -> float:
    """The t with P(|T| > t) = level.

    >>> [round(quantile(n), 3) for n in (1, 2, 7)]
    [12.706, 4.303, 2.365]
    """
    low, high = 0.0, 1.0
    while probability_within(high, freedom) < 1 - level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if probability_within(middle, freedom) < 1 - level else (low, middle)
    return high


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Mean and half-width; one value has no interval, and its half-width is infinite.

    >>> tuple(round(x, 3) for x in interval([1.0, 2.0, 3.0]))
    (2.0, 2.484)
    """
    if len(values) < 2:
        return fmean(values), math.inf
    return fmean(values), quantile(len(values) - 1, level) * stdev(values) / math.sqrt(len(values))
