"""Which layers and heads a user means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from locater.errors import LocaterError


class ChoiceError(LocaterError):
    """Layers or heads that the model does not have."""


Choice = int | Sequence[int] | None  # indices, or a count of evenly spaced ones; None: all


def choose_heads(count: int, heads: Choice) -> list[int]:
    """The numbers of the query heads that were chosen, of a layer that has this many."""
    if heads is None:
        return list(range(count))
    return [head for head, _ in choose([(head, None) for head in range(count)], heads, "heads")]


def choose(items: list[tuple[int, Any]], choice: Choice, name: str) -> list[tuple[int, Any]]:
    """All of them, a count of evenly spaced ones, or those with the given indices."""
    if choice is None:
        return items
    choice = _whole_numbers(choice, name)
    if isinstance(choice, int):
        if choice < 1:
            raise LocaterError(f"{name}={choice}: at least 1, or None for all")
        count = min(choice, len(items))
        return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
    wrong = [i for i in choice if not 0 <= i < len(items)]
    if wrong or not choice:
        raise ChoiceError(f"{name}={choice}: there are {len(items)}, numbered from 0")
    return [items[i] for i in sorted(set(choice))]


def _whole_numbers(choice: Any, name: str) -> int | list[int]:
    """A count or indices, also of numpy and torch; anything else is refused."""
    several = isinstance(choice, Iterable) and getattr(choice, "ndim", 1) > 0
    numbers = list(choice) if several else [choice]
    try:
        if any(isinstance(number, bool) for number in numbers):
            raise TypeError
        indices = [index(number) for number in numbers]
    except TypeError:
        way_out = "give indices such as [0, 2], or a count of evenly spaced ones"
        raise LocaterError(f"{name}={choice!r:.60}: {way_out}") from None
    return indices if several else indices[0]
