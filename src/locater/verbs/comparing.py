"""`compare()`: two models head by head, or a series of more than two."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from locater.checkpoints.sources import Source
from locater.errors import LocaterError
from locater.verbs.compare_result import Comparison, compare_scans
from locater.verbs.scan_result import LENGTH, Scan
from locater.verbs.scanning import Progress, scan
from locater.verbs.series import ComparisonSeries, series


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
        return series([_scan(x, length, raw, progress, download) for x in (a, b, *more)])
    return compare_scans(*(_scan(x, length, raw, progress, download) for x in (a, b)))


def _check_distinct(sources: Sequence[Source | Scan]) -> None:
    """A series names each source once: a repeated one is a slip, and would look like a change back."""
    seen: set[Any] = set()
    for source in sources:
        key = os.path.realpath(source) if isinstance(source, str | os.PathLike) else id(source)
        if key in seen:
            name = source if isinstance(source, str | os.PathLike) else getattr(source, "source", "one model")
            raise LocaterError(f"{name} is given more than once: compare each source once, in the order of training")
        seen.add(key)


def _scan(source: Source | Scan, length: int, raw: bool, progress: Progress | None, download: bool) -> Scan:
    if isinstance(source, Scan):
        return source
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".json" and Path(source).is_file():
        return Scan.load(source)
    return scan(source, length=length, raw=raw, progress=progress, download=download)
