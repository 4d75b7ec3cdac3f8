"""`locater compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from locater.cli.options import JsonPath, Length, Raw, ReportPath
from locater.cli.output import deliver
from locater.cli.shell import check_writable, show_progress
from locater.verbs.scan_result import LENGTH

HELP = "Compare two models, or two checkpoints of one run, head by head."
EXAMPLES = (
    "locater compare base finetuned --report compare.html",
    "locater compare step-100.json step-200.json --json -",
)


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A model, a checkpoint, or the JSON of a scan.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one; differences are B minus A.")],
    json: JsonPath = None,
    report: ReportPath = None,
    length: Length = LENGTH,
    raw: Raw = False,
) -> None:
    from locater.report.terminal import print_comparison
    from locater.verbs.comparing import compare

    check_writable(json, report)
    result = compare(a, b, length=length, raw=raw, progress=show_progress)
    if report is not None:
        result.report(report)
    title = f"A: {a} ({len(result.a.rows)} heads)\nB: {b} ({len(result.b.rows)} heads)"
    deliver(result, title, lambda console: print_comparison(result, console), json, report)
