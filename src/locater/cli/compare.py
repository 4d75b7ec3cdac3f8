"""`locater compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from locater.cli.options import Download, JsonPath, Length, Raw, ReportPath
from locater.cli.output_and_exit_status import deliver, exit_if_crossed
from locater.cli.shell import check_writable, show_progress
from locater.defaults import LENGTH
from locater.redaction import without_secrets

HELP = "Compare two models, or two or more checkpoints of one run, head by head."
EXAMPLES = (
    "locater compare base finetuned --report compare.html",
    "locater compare step-100.json step-200.json --json -",
    "locater compare base finetuned --fail-on 'fault, change_F>10'",
    "locater compare run/step-* --report run.html",
)


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A model, a checkpoint, or the JSON of a scan.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The one to compare it with; differences are B minus A.")],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[C ...]", help="More models of the same shape, to see what changed between which of them."
        ),
    ] = None,
    json: JsonPath = None,
    report: ReportPath = None,
    length: Length = LENGTH,
    raw: Raw = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITIONS",
            help="Exit with status 1 if a head has a flag in B that it does not have in A (sharp,nonfinite), has a new "
            "fault of any kind (fault), or if a column changed by more than a bound ('change_F>10', B minus A). With "
            "more than two models, each is compared with the one before, and the last with the first.",
        ),
    ] = None,
    download: Download = False,
) -> None:
    from locater.commands.comparing import compare
    from locater.findings import parse_conditions
    from locater.results.comparison import CHANGE_COLUMNS, FAULT, Comparison
    from locater.results.scan import SCAN_FLAGS

    conditions = []
    if fail_on is not None:
        conditions = parse_conditions(fail_on, CHANGE_COLUMNS, (FAULT, *SCAN_FLAGS), example="change_M<-1")
    check_writable(json, report)
    result = compare(a, b, *(more or ()), length=length, raw=raw, progress=show_progress, download=download)
    rows = result.condition_rows() if conditions else []
    if report is not None:
        result.report(report)
    if isinstance(result, Comparison):
        scans, labels = [result.a, result.b], ["A", "B"]
    else:
        scans, labels = result.scans, result.labels
    sources = zip(labels, (a, b, *(more or ())), scans, strict=True)
    title = [f"{label}: {without_secrets(name)} ({len(scan.rows)} heads)" for label, name, scan in sources]
    deliver(result.to_json, title, result.show, json, report)
    exit_if_crossed(conditions, rows, scans[0].assumptions["length"])
