"""`locater fleet`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from locater.cli.options import FailOn, JsonPath, Length, Raw, ReportPath
from locater.cli.output_and_exit_status import deliver
from locater.cli.shell import check_writable, show_progress
from locater.defaults import LENGTH
from locater.redacted_and_escaped_text import one_line

if TYPE_CHECKING:
    from locater.commands.fleet.result import Fleet
    from locater.findings import Condition

HELP = "Scan many checkpoints, such as all steps of a run, into one folder of Parquet files."
EXAMPLES = (
    "locater fleet 'run/step-*' --out heads",
    "locater fleet @checkpoints.csv --out heads --shard $SLURM_ARRAY_TASK_ID/16",
    "locater fleet heads --report heads.html",
    "locater fleet heads --status",
)


def command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCES",
            help="Folders, files, patterns ('run/step-*', 'hf://org/model@step*', 's3://bucket/run/*'), lists "
            "(@list.csv); or a folder of results, to show it.",
        ),
    ],
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder of results.")] = None,
    step_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="How names contain the step; its group matches the digits, as in 'ckpt_(\\d+)'."
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the run. Default: the part of each name before the step."),
    ] = None,
    length: Length = LENGTH,
    raw: Raw = False,
    eigenvalues: Annotated[
        bool, typer.Option("--eigenvalues", help="Include the eigenvalues of every head in the files.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Worker processes (with --ray: tasks); 0 to work in this process."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only part I of N of the checkpoints, for job arrays.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: its address, or auto.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retry checkpoints that failed before.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only print what is done, failed and to do.")] = False,
    fail_on: FailOn = None,
    json: JsonPath = None,
    report: ReportPath = None,
) -> None:
    from locater.commands.fleet.request import FleetRequest, answer
    from locater.findings import parse_conditions
    from locater.report.fleet import print_fleet, state_sentence
    from locater.results.scan import NUMERIC_COLUMNS, SCAN_FLAGS

    conditions = parse_conditions(fail_on, NUMERIC_COLUMNS, SCAN_FLAGS) if fail_on is not None else []
    check_writable(json, report)
    request = FleetRequest(tuple(sources), out, run, step_pattern, length, raw, eigenvalues, workers, shard, ray)
    fleet, asked, notes = answer(request, status, retry_failed, _progress)
    for note in notes:
        print(one_line(f"note: {note}"), file=sys.stderr)
    if status:
        print(fleet.status_words(asked))
        return
    if report is not None:
        fleet.report(report)
    document = fleet.to_dict()
    title = f"{fleet.folder}: {state_sentence(document)}"
    deliver(fleet.to_json, title, lambda console: print_fleet(document, console), json, report)
    _exit_by_status(fleet, asked, conditions, whole=shard is None)


def _progress(parts: Iterable[Any], total: int) -> Iterable[Any]:
    return show_progress(parts, total, "scanning checkpoints")


def _exit_by_status(fleet: Fleet, asked: Sequence[str], conditions: Sequence[Condition], whole: bool) -> None:
    """Status 2 if a requested checkpoint failed, or if --fail-on could not be tested because one is not scanned yet
    (except in jobs that scan only a part); status 1 if a head meets a condition of --fail-on.
    """
    crossed = fleet.crossings(conditions, asked)
    if crossed:
        print(one_line(f"locater: {crossed}"), file=sys.stderr)
    failed = {source: reason for source, reason in fleet.errors.items() if source in asked}
    if failed:
        reason = next(iter(failed.values()))
        print(
            one_line(
                f"locater: {len(failed)} of {len(asked)} checkpoints failed, first {reason} "
                "(--retry-failed tries again)"
            ),
            file=sys.stderr,
        )
        raise typer.Exit(2)
    left = [entry.source for entry in fleet.sources() if entry.status == "to do" and entry.source in asked]
    if conditions and left and whole:
        print(
            one_line(
                f"locater: {len(left)} of {len(asked)} checkpoints are not scanned, and --fail-on was not tried on "
                f"them, first {left[0]} (--retry-failed scans them)"
            ),
            file=sys.stderr,
        )
        raise typer.Exit(2)
    if crossed:
        raise typer.Exit(1)
