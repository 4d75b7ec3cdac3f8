"""Numbers as documents and lines of runs keep them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def rounded(x: Any, digits: int) -> Any:
    """Data for JSON with so many digits of every number, which has no place for NaN and infinity.

    >>> rounded({"loss": (1.23456, float("nan")), 2: "seeds"}, 3)
    {'loss': [1.23, None], '2': 'seeds'}
    """
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(key): rounded(value, digits) for key, value in x.items()}
    return [rounded(value, digits) for value in x] if isinstance(x, list | tuple) else x
