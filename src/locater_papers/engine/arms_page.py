"""What pages of papers share: the answer in short, sections, and arms of training runs as tables.

Arms are kept with the first claim that they decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from locater_papers.engine.arms import uniform_first
from locater_papers.engine.claims import Measured

Entries = Mapping[str, Mapping[str, Any]]  # of claims that were measured: the numbers behind them
Part = tuple[list[str], dict[str, str]]  # lines, and figures by name
Sections = Sequence[tuple[Callable[[Entries], Part], tuple[str, ...]]]  # each with the claims that it cannot do without
# claims that a sentence needs, and the sentence
Said = Sequence[tuple[tuple[str, ...], Callable[[Mapping[str, float]], str]]]

FAR = 1.0  # nats above the plain arm: a run that failed


def in_short(document: Mapping[str, Any], said: Said, more: Mapping[str, float] | None = None) -> list[str]:
    """The answer in plain words: sentences all of whose claims were measured. `more` are numbers that no claim
    measures.

    A sentence says which of its claims its numbers leave open.

    >>> entry = {"id": "a1", "measured": 0.5, "verdict": "undecided"}
    >>> in_short({"claims": [entry]}, ((("a1",), lambda v: f"It is {v['a1']}."), (("a2",), lambda v: "More.")))
    ['## In short', '', '- It is 0.5. (Undecided: a1.)', '']
    """
    value = {entry["id"]: entry["measured"] for entry in document["claims"] if entry["measured"] is not None} | dict(
        more or {}
    )
    unsure = {entry["id"] for entry in document["claims"] if entry["verdict"] == "undecided"}
    lines = []
    for needs, tell in said:
        if value.keys() >= set(needs):
            open_ = [key for key in needs if key in unsure]
            lines.append(f"- {tell(value)}" + (f" (Undecided: {', '.join(open_)}.)" if open_ else ""))
    return ["## In short", "", *lines, ""] if lines else []


def numbers_of(document: Mapping[str, Any]) -> Entries:
    """The numbers behind every claim that was measured."""
    return {entry["id"]: entry["numbers"] for entry in document["claims"] if entry["measured"] is not None}


def in_sections(document: Mapping[str, Any], sections: Sections) -> Part:
    """Lines of Markdown, with (figure:NAME) where a figure's link goes, and the figures by name; what was not measured
    is left out.
    """
    found = numbers_of(document)
    lines, figures = list[str](), dict[str, str]()
    for section, needs in sections:
        if found.keys() >= set(needs):
            more, drawn = section(found)
            lines += ["", *more] if more else []
            figures |= drawn
    return lines, figures


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


def failed(arms: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], far: float = FAR) -> dict[str, str]:
    """Arms with a seed that ended more than `far` nats above the plain arm's, and how many of their seeds did.

    >>> plain = {"arm": "softmax", "ends": [{"loss": 3.0}, {"loss": 3.1}]}
    >>> failed([plain, {"arm": "other", "ends": [{"loss": 3.0}, {"loss": 6.0}]}], plain)
    {'other': '1 of 2'}
    """
    found = {}
    for arm in arms:
        above = [end["loss"] - base["loss"] > far for end, base in zip(arm["ends"], plain["ends"], strict=False)]
        if any(above):
            found[arm["arm"]] = f"{sum(above)} of {len(above)}"
    return found


def failed_said(lost: Mapping[str, str], far: float = FAR) -> str:
    """One sentence, or nothing.

    >>> failed_said({"other": "1 of 2"}), failed_said({})
    ('Seeds that failed, more than 1 nat above the plain arm: other (1 of 2).', '')
    """
    named = ", ".join(f"{name} ({count})" for name, count in lost.items())
    return f"Seeds that failed, more than {far:g} nat above the plain arm: {named}." if named else ""


def sinks_said(found: Entries, changes: str, length: int, plain: str = "softmax") -> str:
    """What was seen of sinks: the changes, or that there were none. A sink has more than uniform attention would give a
    first token.
    """
    arms = (carried_in(found) or {"arms": ()})["arms"]
    shares = [end["first_mass"] for arm in arms if arm["arm"] == plain for end in arm["ends"]]
    uniform = uniform_first(length)
    if shares and min(shares) <= uniform:
        return (
            f"No sink formed: under {plain} the first token has {fmean(shares):.3f} of a row, and uniform attention would give it "
            f"{uniform:.3f}. Claims on sinks stay open ({changes})."
        )
    return f"Of the first token's part of a row: {changes}."


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
