"""Arms of training runs on a page: kept with the first claim that they decide, shown as a table of seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from locater.papers.claim import Measured

Entries = Mapping[str, Mapping[str, Any]]


def carried(found: Mapping[str, Measured | None], numbers: Mapping[str, Any]) -> dict[str, Measured | None]:
    """The same measurements; the first that is known holds the numbers of all.

    >>> kept = carried({"a": None, "b": Measured(1.0, 0.0, ""), "c": Measured(2.0, 0.0, "")}, {"arms": []})
    >>> kept["b"].numbers, kept["c"].numbers
    ({'arms': []}, {})
    """
    first = next((key for key, value in found.items() if value is not None), None)
    return {
        key: replace(value, numbers={**value.numbers, **numbers}) if value is not None and key == first else value
        for key, value in found.items()
    }


def carried_in(found: Entries, name: str = "arms") -> Mapping[str, Any] | None:
    """Numbers of the claim that holds them."""
    return next((numbers for numbers in found.values() if name in numbers), None)


def arms_table(arms: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """A row per arm: its rate, and each column's numbers by seed. `columns` says what the keys of an end are called.

    >>> arms_table([{"arm": "softmax", "rate": 0.001, "ends": [{"loss": 3.21}, {"loss": 3.25}]}], {"loss": "report loss"})[-1]
    '| softmax | 0.001 | 3.210, 3.250 |'
    """
    lines = ["| arm | rate | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 2) + "|"]
    for arm in arms:
        cells = (", ".join("-" if end.get(key) is None else f"{end[key]:.3f}" for end in arm["ends"]) for key in columns)
        lines.append(f"| {arm['arm']} | {arm['rate']:g} | " + " | ".join(cells) + " |")
    return lines
