"""Arms of training runs as tables of Markdown, and which of them failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

FAR = 1.0  # nats above the plain arm: a run that failed


def failed(arms: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], far: float = FAR) -> dict[str, str]:
    """Arms with a seed that ended more than `far` nats above the plain arm's, and how many of their seeds did.

    >>> plain = {"arm": "softmax", "ends": [{"loss": 3.0}, {"loss": 3.1}]}
    >>> failed([plain, {"arm": "other", "ends": [{"loss": 3.0}, {"loss": 6.0}]}], plain)
    {'other': '1 of 2'}
    """
    counts = {}
    for arm in arms:
        above = [end["loss"] - base["loss"] > far for end, base in zip(arm["ends"], plain["ends"], strict=False)]
        if any(above):
            counts[arm["arm"]] = f"{sum(above)} of {len(above)}"
    return counts


def failed_words(lost: Mapping[str, str], far: float = FAR) -> str:
    """One sentence, or nothing.

    >>> failed_words({"other": "1 of 2"}), failed_words({})
    ('Seeds that failed, more than 1 nat above the plain arm: other (1 of 2).', '')
    """
    named = ", ".join(f"{name} ({count})" for name, count in lost.items())
    return f"Seeds that failed, more than {far:g} nat above the plain arm: {named}." if named else ""


def arms_table(arms: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """A row per arm: its rate, and each column's numbers by seed. `columns` says what the keys of an end are called.

    >>> arms_table([{"arm": "softmax", "rate": 0.001, "ends": [{"loss": 3.21}, {"loss": 3.25}]}], {"loss": "report loss"})[-1]
    '| softmax | 0.001 | 3.210, 3.250 |'
    """
    lines = ["| arm | rate | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 2) + "|"]
    for arm in arms:
        cells = (
            ", ".join("-" if end.get(key) is None else f"{end[key]:.3f}" for end in arm["ends"]) for key in columns
        )
        lines.append(f"| {arm['arm']} | {arm['rate']:g} | " + " | ".join(cells) + " |")
    return lines


def means_table(arms: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, int]]) -> list[str]:
    """A row per arm: its rate, its losses by seed, and means over seeds. `columns` says what keys of an end are called,
    and their digits.

    >>> arm = {"arm": "softmax", "rate": 0.001, "ends": [{"loss": 3.2, "gap": 0.4}, {"loss": 3.3, "gap": 0.5}]}
    >>> means_table([arm], {"gap": ("gap", 2)})
    ['| arm | rate | report loss, by seed | gap |', '|---|---|---|---|', '| softmax | 0.001 | 3.2000, 3.3000 | 0.45 |']
    """
    names = [name for name, _ in columns.values()]
    lines = ["| arm | rate | report loss, by seed | " + " | ".join(names) + " |", "|---" * (len(columns) + 3) + "|"]
    for arm in arms:
        losses = ", ".join(f"{end['loss']:.4f}" for end in arm["ends"])
        cells = (_mean(arm["ends"], key, digits) for key, (_, digits) in columns.items())
        lines.append(f"| {arm['arm']} | {arm['rate']:g} | {losses} | " + " | ".join(cells) + " |")
    return lines


def _mean(ends: Sequence[Mapping[str, Any]], key: str, digits: int) -> str:
    values = [end[key] for end in ends if end.get(key) is not None]
    return f"{fmean(values):.{digits}f}" if values else "-"
