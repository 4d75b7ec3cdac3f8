"""`locater doctor`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from locater.cli.options import Download, JsonPath, ReportPath
from locater.cli.output_and_exit_status import deliver
from locater.cli.shell import check_writable, show_progress
from locater.errors import LocaterError
from locater.redacted_and_escaped_text import one_line

HELP = "Is this checkpoint what it should be? Reads every tensor once and says what is wrong, or what changed."
EXAMPLES = (
    "locater doctor path/to/model",
    "locater doctor converted --base original",
    "locater doctor merged --base base --adapter lora",
    "locater doctor org/model --base hf://org/base --report doctor.html",
)
WIDER = "changed"


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a weights file, a hub id, or an address: hf://org/model@revision, s3://, gs://, az://, https://.",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Base model that MODEL was made from, in any format: says what was done to it."
        ),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="An adapter of peft that should be merged into it.")
    ] = None,
    json: JsonPath = None,
    report: ReportPath = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITIONS",
            help="Exit with status 1 if a head or tensor was changed (changed) or a cause is found (low-rank,dtype); "
            "without it only where a fault is found.",
        ),
    ] = None,
    download: Download = False,
) -> None:
    from locater.commands.doctor.diagnosing import doctor
    from locater.findings.causes import CAUSES

    asked = [] if fail_on is None else [part.strip() for part in fail_on.split(",") if part.strip()]
    for name in asked:
        if name != WIDER and name not in CAUSES:
            raise LocaterError(f"--fail-on {name!r}: neither {WIDER} nor a cause ({', '.join(CAUSES)})")
    check_writable(json, report)
    result = doctor(model, base, adapter, progress=partial(show_progress, label="reading tensors"), download=download)
    if report is not None:
        result.report(report)
    deliver(result.to_json, [], result.show, json, report)
    crossed = [name for name in asked if name in result.causes or (name == WIDER and result.changed)]
    if result.broken or crossed:
        if not result.broken:
            print(one_line(f"locater: --fail-on: {', '.join(crossed)}"), file=sys.stderr)
        raise typer.Exit(1)
