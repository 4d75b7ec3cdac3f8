"""Numbers that may be missing (None), infinite or NaN. Imports no PyTorch, so that logs and pages can use it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median


def finite_or_none(x: float | None) -> float | None:
    """The number, or None where it is missing, infinite or NaN, which JSON does not have.

    >>> finite_or_none(2.5), finite_or_none(math.inf), finite_or_none(None)
    (2.5, None, None)
    """
    return x if x is not None and math.isfinite(x) else None


def known_median(values: Iterable[float | None]) -> float | None:
    """Median of the values that are not None; None where all are.

    >>> known_median([3.0, None, 1.0])
    2.0
    """
    known = [value for value in values if value is not None]
    return median(known) if known else None
