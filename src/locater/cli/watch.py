"""`locater watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from locater.cli.options import JsonPath, OpenPage, ReportPath
from locater.cli.output_and_exit_status import deliver
from locater.cli.shell import check_writable
from locater.files import write_whole

HELP = "Watch a training run live in a browser, or write it as a page (--report) or as data (--json)."
EXAMPLES = (
    "locater watch runs/first --open",
    "locater watch runs/first --report run.html",
    "locater watch runs/first runs/second --report both.html",
)


def command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The log of a run (.jsonl), or the folder that contains it.")
    ],
    other: Annotated[
        str | None,
        typer.Argument(metavar="OTHER", help="A second run, drawn dashed over RUN."),
    ] = None,
    json: JsonPath = None,
    report: ReportPath = None,
    port: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=65535, help="Port of the live page on this machine; 0 for any free port."),
    ] = 0,
    open_browser: OpenPage = False,
) -> None:
    from locater.runs.run_log import TwoRuns, read_run
    from locater.runs.watch_page import names_apart, serve, watch_page

    check_writable(json, report)
    if json is None and report is None:
        serve(run, port, open_browser, other)
        return
    log = read_run(run, stored=True)
    second = None if other is None else read_run(other, stored=True)
    if report is not None:
        write_whole(Path(report), watch_page(log, other=second, names=names_apart(run, other or "")))
    title = f"{run}: {log.summary()}"
    if second is None:
        deliver(log.to_json, title, None, json, report)
    else:
        deliver(TwoRuns(log, second).to_json, (title, f"{other}: {second.summary()}"), None, json, report)
