"""Where the result of a command goes: tables on the terminal, JSON, pages, and the exit status of --fail-on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import Console

from locater.cli.shell import stdout_console
from locater.escapes import one_line
from locater.files import write_whole
from locater.findings import Condition


class Document(Protocol):
    def to_json(self) -> str: ...


def deliver(
    document: Document,
    title: str | Sequence[str],
    show: Callable[[Console], None],
    json: str | None,
    report: str | None,
    statistics: str | None = None,
) -> None:
    """Print the JSON alone for `--json -`; else write it, print a title (one line, or several) and the tables, and name
    the written files.
    """
    if json == "-":
        print(document.to_json())
        return
    if json is not None:  # first: standard output may be full
        write_whole(Path(json), document.to_json() + "\n")
    console = stdout_console()
    for line in [title] if isinstance(title, str) else title:
        console.print(line, markup=False, highlight=False)
    show(console)
    for label, path in (("Data", json), ("Page", report), ("Statistics", statistics)):
        if path is not None:
            console.print(f"{label} written to {path}", markup=False, highlight=False)


def exit_if_crossed(conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]]) -> None:
    """End with status 1 if a head meets a condition of --fail-on. Name the first that does; where heads meet several
    conditions, also how many meet each: a CI log should not hide `nonfinite` behind `sharp`.
    """
    crossed = [(condition.text, row) for condition in conditions for row in rows if condition.test(row)]
    if not crossed:
        return
    text, row = crossed[0]
    count = len({(r["layer"], r["head"]) for _, r in crossed})
    heads = "1 head crosses" if count == 1 else f"{count} heads cross"
    where = f" from {row['where']}" if "where" in row else ""  # of several scans
    place = f"layer {row['layer']} head {row['head']}"
    each = Counter(text for text, _ in {(text, (r["layer"], r["head"])) for text, r in crossed})
    counts = ", ".join(f"{name} {each[name]}" for name in dict.fromkeys(name for name, _ in crossed))
    more = f" ({counts})" if len(each) > 1 else ""
    print(one_line(f"locater: {heads} --fail-on, first {text} at {place}{where}{more}"), file=sys.stderr)
    raise typer.Exit(1)
