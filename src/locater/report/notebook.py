"""Heads in a notebook: sentences, a heat map of heads by layers, and a short table. An observation, shown so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locater.findings import Verdict, judge
from locater.markup import display, heat_map, table
from locater.report.columns import PROBE_HEADINGS, Read, Row
from locater.report.plots import HeadMap, map_of_measured
from locater.report.token_groups import observed_groups
from locater.report.verdict_sentences import amount, heads_to_show, notes_sentence, number, summary

LISTED = 10  # heads in the table
OBSERVED = ("H", "first", "max logit", "distance", "top")  # headings of a probe that an observation has too


def observation_in_notebook(
    name: str, rows: Sequence[Row], passes: int, notes: Sequence[str], groups: Sequence[Any] = ()
) -> str:
    """What was observed so far of the model with this name; a sentence if there is nothing yet."""
    if not rows:
        return display(f"Observation of {name}", ["Nothing observed yet: run the model inside the block."])
    verdicts = judge(rows, length=0)  # lengths may differ: no head is called local
    said = [f"{note[0].upper()}{note[1:]}." for note in notes]
    sentences = (
        f"{amount(passes, 'forward pass')}.",
        summary(rows, verdicts),
        notes_sentence(rows, verdicts),
        *said,
    )
    columns = {heading: PROBE_HEADINGS[heading] for heading in OBSERVED}
    shown = heads_display(f"Observation of {name}", sentences, map_of_measured(name, rows), columns, rows, verdicts)
    return shown + observed_groups(groups)


def heads_display(
    title: str,
    sentences: Sequence[str],
    drawn: HeadMap,
    columns: Mapping[str, Read],
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
) -> str:
    """A result with a row per head: sentences, the map of one number, and the heads with faults first."""
    shown = heads_to_show(rows, verdicts, LISTED)
    lines = [
        [str(row["layer"]), str(row["head"]), *(number(read(row)) for read in columns.values()), _flags(verdict)]
        for row, verdict in shown
    ]
    listed = table(["layer", "head", *columns, "flags"], lines, left=["flags"])
    more = f"{len(shown):,} of {amount(len(rows), 'head')} are listed." if len(shown) < len(rows) else ""
    return display(title, [*sentences, more], map_html(drawn), listed)


def map_html(drawn: HeadMap) -> str:
    """The heat map of one number of all heads."""
    return heat_map(drawn.grid, drawn.label, names=drawn.layers, least=drawn.least, diverging=drawn.diverging or None)


def _flags(verdict: Verdict) -> str:
    notes = " ".join(verdict.notes)
    return " ".join(filter(None, (" ".join(verdict.faults), f"({notes})" if notes else "")))
