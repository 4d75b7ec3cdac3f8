"""PyTorch threads, precision and rank correlation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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


def upcast(w: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it already is."""
    return w if w.dtype in (torch.float32, torch.float64) else w.float()


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Spearman's rank correlation. Ties share their mean rank. None where one side is constant.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 15.0])), 6)
    0.5
    """
    x, y = (_ranked(t) for t in (a, b))
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size else None


def _ranked(x: Tensor) -> Tensor:
    _, inverse, counts = x.double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]
