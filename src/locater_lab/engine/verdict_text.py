"""Verdicts in words and as tables in the terminal, from the JSON document alone: what is stated, what was measured, how
many hold, and why some are open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from locater_lab.engine.reproduction import Paper

Entry = Mapping[str, Any]  # a claim of the JSON document

AUTHORS = {
    "paper": "The paper's claims",
    "summary": "Claims of public summaries",
    "assumption": "Assumptions of its theory",
    "ours": "Our own",
}


def stated_text(entry: Entry) -> str:
    """`at most 0.05`, `about 0.064 ± 0.008`; a bound that this project chose says so."""
    room = f" ± {entry['tolerance']:g}" if entry["relation"] == "about" else ""
    ours = " (our bound)" if entry.get("bound") == "ours" and entry["by"] != "ours" else ""
    return f"{entry['relation']} {entry['stated']:g}{room}{ours}"


def measured_text(entry: Entry) -> str:
    """`0.029 ± 0.015`, `0.029 (open)` where a spread is not known, or a dash.

    >>> measured_text({"measured": 0.5, "spread": None, "spread_of": "unknown: there is no sink"})
    '0.5 (open)'
    """
    if entry["measured"] is None:
        return "-"
    value, spread = entry["measured"], entry["spread"]
    if is_open(entry):
        return f"{value:.3g} (open)"
    return f"{value:.3g}" + (f" ± {spread:.2g}" if spread else "")


def author_text(entry: Entry) -> str:
    """Who says it, and where: `paper, Theorem 2`.

    >>> author_text({"by": "paper", "where": "Theorem 2"}), author_text({"by": "ours"})
    ('paper, Theorem 2', 'ours')
    """
    return ", ".join(filter(None, (entry["by"], entry.get("where", ""))))


def is_open(entry: Entry) -> bool:
    """Whether something was measured that cannot decide its claim, whatever it is."""
    return entry["measured"] is not None and str(entry.get("spread_of", "")).startswith("unknown")


def reasons(claims: Iterable[Entry]) -> list[str]:
    """Why claims are open or not measured, each reason once with the claims it is of."""
    by_reason: dict[str, list[str]] = {}
    for entry in claims:
        waits = entry["waits_for"] and f"waits for {entry['waits_for']}"
        reason = entry["spread_of"].removeprefix("unknown: ") if is_open(entry) else waits
        if reason:
            by_reason.setdefault(reason, []).append(entry["id"])
    return [f"{', '.join(ids)}: {reason}" for reason, ids in by_reason.items()]


def tally(claims: Iterable[Entry]) -> tuple[int, int, int]:
    """How many hold, fail and are undecided."""
    verdicts = [entry["verdict"] for entry in claims]
    return verdicts.count("holds"), verdicts.count("fails"), verdicts.count("undecided")


def count_by_author(claims: Sequence[Entry]) -> str:
    """How many hold, fail and are undecided, by who says them.

    >>> entries = [{"by": "paper", "verdict": "holds"}, {"by": "ours", "verdict": "fails"}]
    >>> count_by_author(entries)
    "The paper's claims: 1 hold, 0 fail, 0 undecided. Our own: 0 hold, 1 fail, 0 undecided"
    """
    parts = []
    for author, words in AUTHORS.items():
        some = [entry for entry in claims if entry["by"] == author]
        if some:
            parts.append("{}: {} hold, {} fail, {} undecided".format(words, *tally(some)))
    return ". ".join(parts)


def time_text(assumptions: Mapping[str, Any], study: str) -> str:
    """Processor time of a study; that of the clock where another device did nearly all."""
    spent, clock = assumptions["processor_seconds"][study], assumptions["seconds"][study]
    return f"{clock:.0f} s by the clock" if spent < clock / 10 else f"{spent:.0f} s"


# ---- in the terminal ----


STYLES = {"holds": "green", "fails": "bold red", "undecided": "dim"}


def print_verdicts(document: Mapping[str, Any], console: Console) -> None:
    """One line per claim."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("id", "stated", "measured", "verdict"):
        table.add_column(name, no_wrap=True)
    table.add_column("claim", overflow="fold")
    for entry in document["claims"]:
        verdict = entry["verdict"]
        claim = f"{escape(entry['claim'])} [dim]({escape(author_text(entry))})[/dim]"
        table.add_row(entry["id"], stated_text(entry), measured_text(entry), f"[{STYLES[verdict]}]{verdict}[/]", claim)
    console.print(table)
    for reason in reasons(document["claims"]):
        console.print(f"[dim]{escape(reason)}[/dim]", highlight=False)
    console.print(
        f"{count_by_author(document['claims'])} (± is the spread; --json has the numbers behind each)", highlight=False
    )


def print_claims(paper: Paper, console: Console) -> None:
    """What `--list` shows."""
    console.print(f"[bold]{paper.name}[/bold]  {escape(paper.source)}", highlight=False)
    for study in paper.studies:
        how = "" if study.measure is not None else f" [dim](undecided: needs {escape(study.needs)})[/dim]"
        console.print(f"  {escape(study.title)}{how}", highlight=False)
        for claim in study.claims:
            console.print(f"    [bold]{claim.id}[/bold]  {escape(claim.says)}", highlight=False)
