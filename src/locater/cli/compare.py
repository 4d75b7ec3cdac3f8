"""`locater compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from locater.cli.options import Download, JsonPath, Length, Raw, ReportPath
from locater.cli.output_and_exit_status import deliver, exit_if_crossed
from locater.cli.shell import check_writable, show_progress
from locater.defaults import LENGTH
from locater.errors import LocaterError
from locater.redacted_and_escaped_text import without_secrets

HELP = "Compare two models, or two or more checkpoints of one run, head by head."
EXAMPLES = (
    "locater compare base finetuned --report compare.html",
    "locater compare step-100.json step-200.json --json -",
    "locater compare base finetuned --fail-on 'fault, difference>0.5'",
    "locater compare base merged --fail-on identical",
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
            "fault of any kind or one that grew tenfold (fault), if its maps differ (difference>0.5), if a column "
            "changed by more than a bound ('change_F>10', B minus A), or if the two are identical or changed at all. "
            "With more than two models, each is compared with the one before, and the last with the first.",
        ),
    ] = None,
    download: Download = False,
) -> None:
    from locater.commands.comparing import compare
    from locater.findings import parse_conditions
    from locater.results.comparison import CHANGE_COLUMNS, FAULT, WHOLE, Comparison
    from locater.results.scan import SCAN_FLAGS, VALUE_FLAGS

    conditions, whole = [], []
    if fail_on is not None:
        flags = (*WHOLE, FAULT, *SCAN_FLAGS, *VALUE_FLAGS)
        conditions = parse_conditions(fail_on, CHANGE_COLUMNS, flags, example="change_M<-1")
        whole = [x.text for x in conditions if x.text in WHOLE]
        if whole and more:
            raise LocaterError(f"--fail-on {whole[0]}: of two models alone, and these are {2 + len(more)}")
    check_writable(json, report)
    result = compare(a, b, *(more or ()), length=length, raw=raw, progress=show_progress, download=download)
    of_heads = [x for x in conditions if x.text not in WHOLE]
    rows = result.condition_rows() if of_heads else []
    if report is not None:
        result.report(report)
    if isinstance(result, Comparison):
        scans, labels = [result.a, result.b], ["A", "B"]
    else:
        scans, labels = result.scans, result.labels
    sources = zip(labels, (a, b, *(more or ())), scans, strict=True)
    title = [f"{label}: {without_secrets(name)} ({len(scan.rows)} heads)" for label, name, scan in sources]
    deliver(result.to_json, title, result.show, json, report)
    met: dict[str, str] = result.whole_conditions() if isinstance(result, Comparison) else {}
    said = dict.fromkeys(met[x.text] for x in conditions if x.text in met)
    exit_if_crossed(of_heads, rows, scans[0].assumptions["length"], [*said])
