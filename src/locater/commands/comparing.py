"""`compare()`: two models head by head, or a series of more than two."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from locater.commands.scanning import scan
from locater.defaults import LENGTH, Progress
from locater.errors import LocaterError
from locater.results.comparison import ComparedTensors, Comparison, compare_scans
from locater.results.scan import Scan
from locater.results.series import ComparisonSeries, compare_series
from locater.sources.open_source import Source, open_source
from locater.sources.weights import Weights


@overload
def compare(
    a: Source | Scan,
    b: Source | Scan,
    *,
    length: int = ...,
    raw: bool = ...,
    progress: Progress | None = ...,
    download: bool = ...,
) -> Comparison: ...
@overload
def compare(
    a: Source | Scan,
    b: Source | Scan,
    c: Source | Scan,
    /,
    *more: Source | Scan,
    length: int = ...,
    raw: bool = ...,
    progress: Progress | None = ...,
    download: bool = ...,
) -> ComparisonSeries: ...
def compare(
    a: Source | Scan,
    b: Source | Scan,
    *more: Source | Scan,
    length: int = LENGTH,
    raw: bool = False,
    progress: Progress | None = None,
    download: bool = False,
) -> Comparison | ComparisonSeries:
    """Compare two models, two checkpoints of one run, or two scans (also as the JSON files that `scan` wrote).

    More than two are a `ComparisonSeries`, in the order given: what changed, and between which of them.

    >>> from torch import nn
    >>> comparison = compare(nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2))
    >>> comparison.aligned, len(comparison.rows)
    (True, 2)
    >>> len(compare(*(nn.MultiheadAttention(16, 2) for _ in range(4))).pairs)
    3
    """
    if more:
        _check_distinct((a, b, *more))
        return compare_series([_scan_of(x, length, raw, progress, download) for x in (a, b, *more)])
    result = compare_scans(*(_scan_of(x, length, raw, progress, download) for x in (a, b)))
    return replace(result, tensors=_tensors(a, b)) if result.equal else result


def _check_distinct(sources: Sequence[Source | Scan]) -> None:
    """A series names each source once: a repetition is a mistake, and would look like a change back."""
    seen: set[Any] = set()
    for source in sources:
        key = os.path.realpath(source) if isinstance(source, str | os.PathLike) else id(source)
        if key in seen:
            name = source if isinstance(source, str | os.PathLike) else getattr(source, "source", "one model")
            raise LocaterError(f"{name} is given more than once: compare each source once, in the order of training")
        seen.add(key)


def _tensors(a: Source | Scan, b: Source | Scan) -> ComparedTensors | None:
    """Every tensor of two sources with equal heads, since what a scan does not read may differ. None for scans, and for
    remote checkpoints, of which a scan reads a small part.
    """
    sources = [x for x in (a, b) if _is_local(x)]
    if len(sources) < 2:
        return None
    first, second = (open_source(x)[0] for x in sources)  # type: ignore[arg-type]
    names, others = set(first.names()), set(second.names())
    both = sorted(names & others)
    try:
        different = [name for name in both if not _equal_bytes(first, second, name)]
    except LocaterError:  # a tensor that cannot be read, and that no head needs
        return None
    return ComparedTensors(len(both), different, sorted(names - others), sorted(others - names))


def _is_local(source: Source | Scan) -> bool:
    if isinstance(source, Scan):
        return False
    path = not isinstance(source, nn.Module)
    return not path or (os.path.exists(source) and Path(source).suffix != ".json")  # type: ignore[arg-type]


def _equal_bytes(first: Weights, second: Weights, name: str) -> bool:
    """Whether a tensor has the same shape, type and bytes in both."""
    if first.shape(name) != second.shape(name):
        return False
    a, b = (weights.read(name).detach().cpu().contiguous() for weights in (first, second))
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _scan_of(source: Source | Scan, length: int, raw: bool, progress: Progress | None, download: bool) -> Scan:
    if isinstance(source, Scan):
        return source
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".json" and Path(source).is_file():
        return Scan.load(source)
    return scan(source, length=length, raw=raw, progress=progress, download=download)
