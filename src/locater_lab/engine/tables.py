"""Tables of Markdown, those of arms of training runs among them, and which arms failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

FAR = 1.0  # nats above the plain arm: a run that failed
ARM = {"arm": "arm", "rate": ("rate", "g")}  # the first columns of arms


def markdown_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Sequence[str] | str]) -> str:
    """A table: `columns` gives each key its heading, and a format where it is a number.

    >>> print(markdown_table([{"model": "demo", "loss": 1.234}], {"model": "model", "loss": ("loss", ".2f")}))
    | model | loss |
    |---|---|
    | demo | 1.23 |
    """
    named = {key: (column, "") if isinstance(column, str) else tuple(column) for key, column in columns.items()}
    lines = ["| " + " | ".join(heading for heading, _ in named.values()) + " |", "|---" * len(named) + "|"]
    for row in rows:
        cells = ("-" if row.get(key) is None else cell(format(row[key], form)) for key, (_, form) in named.items())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text without bars of its own."""
    return text.replace("|", "\\|")


def arms_table(arms: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A row per arm: its rate, and each column's numbers by seed. `columns` says what the keys of an end are called.

    >>> arm = {"arm": "softmax", "rate": 0.001, "ends": [{"loss": 3.21}, {"loss": None}]}
    >>> arms_table([arm], {"loss": "report loss"}).splitlines()[-1]
    '| softmax | 0.001 | 3.210, - |'
    """
    rows = ({**arm, **{key: _by_seed(arm["ends"], key, 3) for key in columns}} for arm in arms)
    return markdown_table(rows, {**ARM, **columns})


def means_table(
    arms: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, int]], names: Mapping[str, str] | None = None
) -> str:
    """A row per arm: its rate, its losses by seed, and means over seeds. `columns` says what keys of an end are called,
    and their digits; `names` what arms are called.

    >>> arm = {"arm": "softmax", "rate": 0.001, "ends": [{"loss": 3.2, "gap": 0.4}, {"loss": 3.3, "gap": 0.5}]}
    >>> means_table([arm], {"gap": ("gap", 2)}).splitlines()[-1]
    '| softmax | 0.001 | 3.2000, 3.3000 | 0.45 |'
    """
    rows = (
        {**arm, "losses": _by_seed(arm["ends"], "loss", 4), **{key: _mean(arm["ends"], key) for key in columns}}
        for arm in renamed(arms, names or {})
    )
    means = {key: (heading, f".{digits}f") for key, (heading, digits) in columns.items()}
    return markdown_table(rows, {**ARM, "losses": "report loss, by seed", **means})


def renamed(arms: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Arms of training runs under the names that a page has for them.

    >>> renamed([{"arm": "gated"}, {"arm": "softmax"}], {"gated": "gate per head"})
    [{'arm': 'gate per head'}, {'arm': 'softmax'}]
    """
    return [{**arm, "arm": names.get(arm["arm"], arm["arm"])} for arm in arms]


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


def _by_seed(ends: Sequence[Mapping[str, Any]], key: str, digits: int) -> str:
    return ", ".join("-" if end.get(key) is None else f"{end[key]:.{digits}f}" for end in ends)


def _mean(ends: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [end[key] for end in ends if end.get(key) is not None]
    return fmean(values) if values else None
