"""Groups of tokens (system, prompt, image, ...) and what heads give them: in the terminal, on a page, in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from locater.markup import table
from locater.report.terminal import empty_table

LEGEND = "attention: mean share over all heads and rows · even: what even weights over the keys in sight would give"
OF_SCORES = " · then the sum of the scores of a group's tokens"
TOLD = 5  # heads that are listed for a group
Lines = tuple[list[str], list[list[str]]]


def group_lines(scores: Mapping[str, Mapping[str, str]], groups: Mapping[str, Any]) -> Lines:
    """Headings and a line per group: how many tokens, what heads give them, and `scores` by method and group."""
    labels: list[str] = groups.get("labels", [])
    lines = []
    for name in dict.fromkeys(labels):
        shares = (groups[part].get(name) for part in ("attention", "even"))
        shown = ["-" if x is None else f"{x:.2f}" for x in shares]
        lines.append([name, str(labels.count(name)), *shown, *(by_group[name] for by_group in scores.values())])
    return ["group", "tokens", "attention", "even", *scores], lines


def print_groups(scores: Mapping[str, Mapping[str, str]], groups: Mapping[str, Any], console: Console) -> None:
    """The table, where there are several groups."""
    headings, lines = group_lines(scores, groups)
    if lines:
        grid = empty_table("groups of tokens", headings)
        for line in lines:
            grid.add_row(*line)
        console.print(grid)
        console.print(f"[dim]{LEGEND}{OF_SCORES if scores else ''}[/dim]", highlight=False)


def groups_markup(scores: Mapping[str, Mapping[str, str]], groups: Mapping[str, Any]) -> str:
    """The same as HTML; nothing where there is one group alone."""
    headings, lines = group_lines(scores, groups)
    if not lines:
        return ""
    legend = html.escape(LEGEND + (OF_SCORES if scores else ""))
    return f'<div class="wide">{table(headings, lines, ["group"])}</div><p class="note">{legend}</p>'


def observed_groups(rows: Sequence[Any]) -> str:
    """What was observed of groups, for a notebook: their shares, and the heads that give each most beyond even weights.
    `rows` have `layer`, `head`, `shares` and `even`.
    """
    if not rows:
        return ""
    lines = []
    for name in rows[0].shares:
        known = [row for row in rows if name in row.shares]
        mean, even = (sum(getattr(row, part)[name] for row in known) / len(known) for part in ("shares", "even"))
        most = sorted(known, key=lambda row: row.even[name] - row.shares[name])[:TOLD]
        heads = ", ".join(f"{row.layer}.{row.head} ({row.shares[name]:.2f})" for row in most)
        lines.append([name, f"{mean:.2f}", f"{even:.2f}", heads])
    return table(["group", "attention", "even", "heads that give it most"], lines, ["group", "heads that give it most"])
