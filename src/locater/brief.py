"""`brief`: the `__repr__` of data with tensors in it, a few lines whatever their size."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

LONGEST = 6  # items of a list that are shown
WIDEST = 100  # characters of a value that is not data of this package


def brief(data: Any) -> str:
    """The fields of a dataclass: tensors by type and shape, long lists by their length, numbers with four digits,
    without those that are None. Used as `__repr__ = brief`.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Row:
    ...     head: int
    ...     entropy: float | None
    ...     values: tuple[float, ...]
    ...     __repr__ = brief
    >>> Row(3, 0.123456, (0.5,) * 64), Row(3, None, (0.5, 0.25))
    (Row(head=3, entropy=0.1235, values=<64 of float>), Row(head=3, values=(0.5, 0.25)))
    """
    own = ((item.name, getattr(data, item.name, None)) for item in fields(data) if item.repr)
    shown = ", ".join(f"{name}={_value(value)}" for name, value in own if value is not None)
    return f"{type(data).__name__}({shown})"


def _value(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"<{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'number'}>"
    if isinstance(value, float | complex):
        return f"{value:.4g}"
    if isinstance(value, tuple | list | dict | set | frozenset):
        return _items(value)
    text = f"<{getattr(value, '__qualname__', '')}>" if callable(value) and hasattr(value, "__code__") else repr(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def _items(value: Any) -> str:
    if len(value) > LONGEST:
        return f"<{len(value):,} of {type(next(iter(value))).__name__}>"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in value.items()) + "}"
    left, right = ("(", ",)" if len(value) == 1 else ")") if isinstance(value, tuple) else ("[", "]")
    text = left + ", ".join(map(_value, value)) + right
    return text if len(text) <= 4 * WIDEST else f"<{len(value)} of {type(next(iter(value))).__name__}>"
