"""`locater demo`."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from locater.cli.options import JsonPath, ReportPath
from locater.cli.output_and_exit_status import deliver
from locater.cli.shell import check_writable, stdout_console

if TYPE_CHECKING:
    from locater.results.comparison import Comparison

HELP = "Scan the small model that comes with Locater, and compare it with a twin trained with LocAteR."
EXAMPLES = ("locater demo", "locater demo --report demo.html --twin twin.html")


def command(
    json: JsonPath = None,
    report: ReportPath = None,
    twin: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write an HTML page that compares the model with its twin.")
    ] = None,
) -> None:
    from importlib.resources import files

    from locater.commands.comparing import compare
    from locater.commands.scanning import scan

    check_writable(json, report, twin, "--twin {}: give the page of both a file of its own")
    folders = [Path(str(files("locater") / "demo")), Path(str(files("locater") / "demo" / "twin"))]
    result = scan(str(folders[0]), details=report is not None)
    if report is not None:
        result.report(report)
    plain = result.plain(eigenvalues=False)
    deliver(plain.to_json, result.title(), plain.show, json, report)
    if twin is None and json == "-":
        return
    comparison = compare(result, folders[1])
    if twin is not None:
        comparison.report(twin)
    if json != "-":
        _print_twin(comparison, folders, twin)


def _print_twin(comparison: Comparison, folders: list[Path], page: str | None) -> None:
    plain, controlled = (jsonlib.loads((folder / "training.json").read_text()) for folder in folders)
    console = stdout_console()
    console.print(
        f"\nA: this model, {plain['command']}: validation loss {plain['validation_loss']:.4f}\n"
        f"B: its twin, {controlled['command']}: validation loss {controlled['validation_loss']:.4f}",
        markup=False,
        highlight=False,
    )
    comparison.show(console)
    if page is not None:
        console.print(f"Both side by side: {page}", markup=False, highlight=False)
    console.print("These models come with the package. Now try one of yours: [bold]locater scan PATH[/bold]")
