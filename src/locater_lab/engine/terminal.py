"""A reproduction as tables in the terminal, from the JSON document alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from locater_lab.engine.papers import Paper
from locater_lab.engine.verdict_words import count, measured, reasons, stated, whose

STYLES = {"holds": "green", "fails": "bold red", "undecided": "dim"}


def print_verdicts(document: Mapping[str, Any], console: Console) -> None:
    """One line per claim."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("id", "stated", "measured", "verdict"):
        table.add_column(name, no_wrap=True)
    table.add_column("claim", overflow="fold")
    for entry in document["claims"]:
        verdict = entry["verdict"]
        claim = f"{escape(entry['claim'])} [dim]({escape(whose(entry))})[/dim]"
        table.add_row(entry["id"], stated(entry), measured(entry), f"[{STYLES[verdict]}]{verdict}[/]", claim)
    console.print(table)
    for reason in reasons(document["claims"]):
        console.print(f"[dim]{escape(reason)}[/dim]", highlight=False)
    console.print(f"{count(document['claims'])} (± is the spread; --json has the numbers behind each)", highlight=False)


def print_claims(paper: Paper, console: Console) -> None:
    """What `--list` shows."""
    console.print(f"[bold]{paper.name}[/bold]  {escape(paper.source)}", highlight=False)
    for study in paper.studies:
        how = "" if study.measure is not None else f" [dim](undecided: needs {escape(study.needs)})[/dim]"
        console.print(f"  {escape(study.title)}{how}", highlight=False)
        for claim in study.claims:
            console.print(f"    [bold]{claim.id}[/bold]  {escape(claim.says)}", highlight=False)
