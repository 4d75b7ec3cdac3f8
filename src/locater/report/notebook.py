"""Results in a notebook: sentences, a heat map of heads by layers, and a short table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from locater.findings import Verdict, judge
from locater.markup import display, heat_map, table
from locater.report.change_words import NAMED_CHANGES, changes_sentences
from locater.report.drawn import Drawn, grid_of, of_comparison, of_observation, of_probe, of_scan
from locater.report.pages import short_name
from locater.report.probe_words import data_sentence
from locater.report.scan_columns import Read, in_words
from locater.report.tables import (
    PROBE,
    SCAN,
    chosen,
    counted,
    moved,
    noted,
    number,
    origin,
    predicted_from,
    roles_sentence,
    summary,
)

if TYPE_CHECKING:
    from locater.observing.observation import Observation
    from locater.results.comparison import Comparison
    from locater.results.probe import Probe
    from locater.results.scan import Scan

LISTED = 10  # heads in the table
OBSERVED = ("H", "first", "max logit", "distance", "top")  # headings of a probe that an observation has too


def scan_in_notebook(scan: Scan) -> str:
    title = f"{short_name(scan.source)}: {len(scan.rows)} heads in {len(scan.layers)} attention layers"
    verdict = summary(scan.rows, scan.verdicts, predicted_from(scan.assumptions))
    sentences = (verdict, noted(scan.rows, scan.verdicts), origin(scan.assumptions))
    return heads_display(title, sentences, of_scan(scan), SCAN, scan.rows, scan.verdicts)


def probe_in_notebook(probe: Probe) -> str:
    sentences = (
        summary(probe.rows, probe.verdicts),
        roles_sentence(probe.roles),
        noted(probe.rows, probe.verdicts),
        data_sentence(probe),
    )
    return heads_display(short_name(probe.source), sentences, of_probe(probe), PROBE, probe.rows, probe.verdicts)


def observation_in_notebook(observation: Observation) -> str:
    """What was observed so far; a sentence where that is nothing."""
    name = type(observation.model).__name__
    if not any(observation.called):
        return display(f"Observation of {name}", ["Nothing was observed yet: run the model inside the block."])
    rows = observation.rows
    verdicts = judge([vars(row) for row in rows], length=0)  # lengths may differ: no head is called local
    passes, notes = (
        f"{counted(observation.passes, 'forward pass')}.",
        [f"{x[0].upper()}{x[1:]}." for x in observation.notes],
    )
    sentences = (passes, summary(rows, verdicts), noted(rows, verdicts), *notes)
    columns = {heading: PROBE[heading] for heading in OBSERVED}
    drawn = of_observation(observation)
    return heads_display(f"Observation of {name}", sentences, drawn, columns, rows, verdicts)


def comparison_in_notebook(comparison: Comparison) -> str:
    a, b = comparison.a, comparison.b
    title = f"{short_name(a.source)} (A) against {short_name(b.source)} (B)"
    if not comparison.aligned:
        medians = [[name, *map(number, pair)] for name, pair in comparison.medians().items()]
        sentence = "Their shapes differ, so heads are not subtracted. Medians over heads:"
        return display(title, [sentence], table(["column", "A", "B"], medians, left=["column"]))
    words = in_words()
    lines = [
        [f"{x.layer}.{x.head}", words[x.column], *map(number, (x.before, x.after, x.after - x.before))]
        for x in comparison.head_changes()[:NAMED_CHANGES]
    ]
    listed = table(["head", "changed most", "A", "B", "B - A"], lines, left=["changed most"])
    sentences = (moved(a.verdicts, b.verdicts), *changes_sentences(comparison))
    return display(title, sentences, drawn_map(of_comparison(comparison)), listed)


def heads_display(
    title: str,
    sentences: Sequence[str],
    drawn: Drawn,
    columns: Mapping[str, Read],
    rows: Sequence[Any],
    verdicts: Sequence[Verdict],
) -> str:
    """A result with a row per head: sentences, the map of one number, and the heads with faults first."""
    shown = chosen(rows, verdicts, LISTED)
    lines = [
        [str(row.layer), str(row.head), *(number(read(row)) for read in columns.values()), _flags(verdict)]
        for row, verdict in shown
    ]
    listed = table(["layer", "head", *columns, "flags"], lines, left=["flags"])
    more = f"{len(shown):,} of {counted(len(rows), 'head')} are listed." if len(shown) < len(rows) else ""
    return display(title, [*sentences, more], drawn_map(drawn), listed)


def drawn_map(drawn: Drawn) -> str:
    """The heat map of one number of all heads."""
    return heat_map(
        grid_of(drawn), drawn.label, names=drawn.layers, least=drawn.least, diverging=drawn.diverging or None
    )


def _flags(verdict: Verdict) -> str:
    notes = " ".join(verdict.notes)
    return " ".join(filter(None, (" ".join(verdict.faults), f"({notes})" if notes else "")))
