"""Where the result of a command goes: tables on the terminal, JSON, pages, and the exit status of --fail-on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from locater.cli.shell import stdout_console
from locater.files import write_whole
from locater.redacted_and_escaped_text import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from locater.findings import Condition


def deliver(
    to_json: Callable[[], str],
    title: str | Sequence[str],
    show: Callable[[Console], None] | None,
    json: str | None,
    report: str | None,
    statistics: str | None = None,
) -> None:
    """Print only the JSON for `--json -`. Otherwise write it, print a title (one line, or several) and the tables, and
    name the files that were written.
    """
    if json == "-":
        print(to_json())
        return
    if json is not None:  # before printing: standard output may be full
        write_whole(Path(json), to_json() + "\n")
    console = stdout_console()
    for line in [title] if isinstance(title, str) else title:
        console.print(line, markup=False, highlight=False)
    if show is not None:
        show(console)
    for label, path in (("Data", json), ("Page", report), ("Statistics", statistics)):
        if path is not None:
            console.print(f"{label} written to {path}", markup=False, highlight=False)


def exit_if_crossed(
    conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]], length: int, said: Sequence[str] = ()
) -> None:
    """Exit with status 1 if a head meets a condition of --fail-on. Say for each condition how many heads meet it and
    which is the worst: a CI log should not hide `nonfinite` behind `sharp`. `said` are conditions that hold of a model
    as a whole, with what there is to say of it.
    """
    from locater.findings import crossings

    if line := "; ".join(filter(None, (*said, crossings(conditions, rows, length)))):
        print(one_line(f"locater: --fail-on: {line}"), file=sys.stderr)
        raise typer.Exit(1)
