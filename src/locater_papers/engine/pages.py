"""A reproduction as a table in the terminal, and as a Markdown page with figures, both from the JSON document alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from locater.files import write_whole
from locater.report.prose import prose_page
from locater_papers.engine.papers import Paper

BAR = "\\|"  # a bar inside a cell of a table
STYLES = {"holds": "green", "fails": "bold red", "undecided": "dim"}


def stated(entry: Mapping[str, Any]) -> str:
    """`at most 0.05`, `about 0.064 ± 0.008`."""
    room = f" ± {entry['tolerance']:g}" if entry["relation"] == "about" else ""
    return f"{entry['relation']} {entry['stated']:g}{room}"


def measured(entry: Mapping[str, Any]) -> str:
    """`0.029 ± 0.015`, `0.029 (open)` where a spread is not known, or a dash.

    >>> measured({"measured": 0.5, "spread": 2.0, "spread_of": "unknown: there is no sink"})
    '0.5 (open)'
    """
    if entry["measured"] is None:
        return "-"
    value, spread = entry["measured"], entry["spread"]
    if is_open(entry):
        return f"{value:.3g} (open)"
    return f"{value:.3g}" + (f" ± {spread:.2g}" if spread else "")


def is_open(entry: Mapping[str, Any]) -> bool:
    """Whether something was measured that cannot decide its claim, whatever it is."""
    return entry["measured"] is not None and str(entry.get("spread_of", "")).startswith("unknown")


def reasons(claims: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why claims are open or not measured, each reason once with the claims it is of."""
    found: dict[str, list[str]] = {}
    for entry in claims:
        why = (
            entry["spread_of"].removeprefix("unknown: ")
            if is_open(entry)
            else entry["waits_for"] and f"waits for {entry['waits_for']}"
        )
        if why:
            found.setdefault(why, []).append(entry["id"])
    return [f"{', '.join(ids)}: {why}" for why, ids in found.items()]


def _time(held: Mapping[str, Any], study: str) -> str:
    """Processor time; that of the clock where another device did nearly all."""
    spent, clock = held["processor_seconds"][study], held["seconds"][study]
    return f"{clock:.0f} s by the clock" if spent < clock / 10 else f"{spent:.0f} s"


def tally(claims: Iterable[Mapping[str, Any]]) -> tuple[int, int, int]:
    """How many hold, fail and are undecided."""
    said = [entry["verdict"] for entry in claims]
    return said.count("holds"), said.count("fails"), said.count("undecided")


def count(claims: Sequence[Mapping[str, Any]]) -> str:
    """`9 hold, 3 fail, 6 undecided`, claims of the paper first where there are others."""
    held, notes = ([entry for entry in claims if entry["by"] == by] for by in ("paper", "notes"))
    said = ["{} hold, {} fail, {} undecided".format(*tally(part)) for part in (held, notes) if part]
    return f"The paper's: {said[0]}. This project's notes: {said[1]}" if len(said) == 2 else said[0]


def print_verdicts(document: Mapping[str, Any], console: Console) -> None:
    """One line per claim."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("id", "stated", "measured"):
        table.add_column(name, no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("claim", overflow="fold")
    for entry in document["claims"]:
        said = entry["verdict"]
        table.add_row(entry["id"], stated(entry), measured(entry), f"[{STYLES[said]}]{said}[/]", escape(entry["claim"]))
    console.print(table)
    for why in reasons(document["claims"]):
        console.print(f"[dim]{escape(why)}[/dim]", highlight=False)
    console.print(f"{count(document['claims'])} (± is the spread; --json has the numbers behind each)", highlight=False)


def print_claims(paper: Paper, console: Console) -> None:
    """What `--list` shows."""
    console.print(f"[bold]{paper.name}[/bold]  {escape(paper.source)}", highlight=False)
    for study in paper.studies:
        how = "" if study.measure is not None else f" [dim](undecided: needs {escape(study.needs)})[/dim]"
        console.print(f"  {escape(study.title)}{how}", highlight=False)
        for claim in study.claims:
            console.print(f"    [bold]{claim.id}[/bold]  {escape(claim.says)}", highlight=False)


def write_report(document: Mapping[str, Any], paper: Paper, path: Path, images: Path) -> list[Path]:
    """Write the page, as HTML with its figures inside (.html) or as Markdown with figures in files; returns the files
    written.
    """
    more, figures = paper.page(dict(document)) if paper.page is not None else ([], {})
    if path.suffix == ".html":
        write_whole(path, prose_page("\n".join([*page(document, paper), *more, ""]), figures))
        return [path]
    written = []
    for name, drawing in figures.items():
        target = images / f"{paper.name}-{name}.svg"
        write_whole(target, drawing)
        written.append(target)
        link = Path(os.path.relpath(target.resolve(), path.resolve().parent)).as_posix()
        more = [line.replace(f"(figure:{name})", f"({link})") for line in more]
    write_whole(path, "\n".join([*page(document, paper), *more, ""]))
    return [path, *written]


def page(document: Mapping[str, Any], paper: Paper) -> list[str]:
    """Heading, verdicts, and how it was run."""
    claims, held = document["claims"], document["assumptions"]
    lines = [
        f"# {paper.title}", "", *_made_by(paper, held), "", *(paper.lead(dict(document)) if paper.lead is not None else []),
        "## Verdicts", "",
        f"{count(claims)}. A claim holds or fails where the whole of measured ± spread is on one side of what is stated. "
        "Of several seeds, measured is the middle of their range; tables below have means.", "",
        "| | claim | quantity | stated | measured | verdict |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for entry in claims:
        by = "" if entry["by"] == "paper" else " (this project's notes)"
        said = f"**{entry['verdict']}**" if entry["verdict"] == "fails" else entry["verdict"]
        cells = (entry["id"], f"{entry['claim']}{by}", entry["quantity"], stated(entry), measured(entry), said)
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    took = ", ".join(f"{name} {_time(held, name)}" for name in held["processor_seconds"])
    lines += [
        "",
        f"torch {held['torch']}, Python {held['python']}, threads: {held['threads']}. Processor time: {took}.",
    ]
    why = [entry for entry in claims if is_open(entry)]
    if why:
        lines += ["", "Open, whatever was measured:", "", *(f"- {text}." for text in reasons(why))]
    waiting = [entry for entry in claims if entry["waits_for"]]
    if waiting:
        lines += ["", "Not decided yet:", ""]
        lines += [f"- {entry['id']}: waits for {entry['waits_for']}; then `{entry['command']}`" for entry in waiting]
    return lines


def _made_by(paper: Paper, held: Mapping[str, Any]) -> list[str]:
    how = " --quick" * held["quick"] + " --runs ..." * ("runs" in held)
    first = f"{paper.source}. Made by `locater reproduce {paper.name}{how} --json ... --report ...`"
    if "joined" in held:
        return [
            f"{first}, {held['joined']} runs joined by `--from`;",
            "the JSON beside this page has the command of each claim and every number.",
        ]
    return [f"{first};", "every number is in the JSON beside this page."]
