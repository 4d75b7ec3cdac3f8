"""`locater demo`."""

from __future__ import annotations

import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from locater.cli.options import JsonPath, OpenPage, ReportPath
from locater.cli.shell import check_writable, stdout_console
from locater.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

HELP = "What Locater does, in three acts on small models: a broken checkpoint, a hot run, one head. Half a minute, offline."
EXAMPLES = ("locater demo", "locater demo --open")


def command(
    json: JsonPath = None,
    report: ReportPath = None,
    open_page: OpenPage = False,
) -> None:
    from locater.amx import avoid_broken_amx
    from locater_lab.demonstration import Demonstration, demonstrate

    check_writable(json, report)
    avoid_broken_amx()
    folder = Path(tempfile.mkdtemp(prefix="locater-demo-"))
    console, quiet, acts = stdout_console(), json == "-", []
    for number, act in enumerate(demonstrate(folder), 1):
        acts.append(act)
        if not quiet:
            console.print(f"[bold]{number}. {act.title}[/bold]", highlight=False)
            console.print(act.what, markup=False, highlight=False)
            _print_lines(act.lines, console)
    shown = Demonstration(acts)
    page = Path(report) if report is not None else folder / "demo.html"
    write_whole(page, shown.page())
    if open_page:
        webbrowser.open(page.resolve().as_uri())
    if json is not None and not quiet:
        write_whole(Path(json), shown.to_json() + "\n")
    if quiet:
        print(shown.to_json())
        return
    console.print("[bold]Now your own[/bold]", highlight=False)
    _print_lines(shown.commands, console)
    console.print(f"The same as a page: {page}", markup=False, highlight=False, soft_wrap=True)


def _print_lines(lines: Sequence[tuple[str, str]], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, words in lines:
        grid.add_row(Text(name), Text(words))
    console.print(grid)
    console.print()
