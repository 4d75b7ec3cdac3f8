"""`locater doctor`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from locater.cli.options import Download, JsonPath, ReportPath
from locater.cli.output_and_exit_status import deliver
from locater.cli.shell import check_writable, show_progress
from locater.errors import LocaterError
from locater.files import write_whole
from locater.redacted_and_escaped_text import one_line

HELP = (
    "Is this checkpoint what it should be? Reads every tensor once and says what is wrong, or what changed. Of a "
    "training run, from the log that Monitor wrote: healthy, or which heads, since when."
)
EXAMPLES = (
    "locater doctor path/to/model",
    "locater doctor converted --base original",
    "locater doctor merged --base base --adapter lora",
    "locater doctor merged --base base --text my.txt",
    "locater doctor runs/first/locater.jsonl",
    "locater doctor org/model --base hf://org/base --report doctor.html",
)
WIDER = "changed"


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a weights file, a run's log, a hub id, or an address: hf://org/model@revision, s3://, "
            "gs://, az://, https://.",
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
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Text that the model reads, and BASE: loss, and heads that attend otherwise or lost their role. Needs "
            "transformers and memory for one model in float32.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Folder of the tokenizer for --text, if neither BASE nor MODEL has one."),
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
    from locater.runs.run_log import holds_run

    asked = [] if fail_on is None else [part.strip() for part in fail_on.split(",") if part.strip()]
    for name in asked:
        if name != WIDER and name not in CAUSES:
            raise LocaterError(f"--fail-on {name!r}: neither {WIDER} nor a cause ({', '.join(CAUSES)})")
    check_writable(json, report)
    if base is None and adapter is None and text is None and holds_run(model):
        judge_run(model, json, report, asked)
        return
    options: dict[str, Any] = {"download": download, "progress": partial(show_progress, label="reading tensors")}
    if text is not None:
        from locater.amx import avoid_broken_amx

        avoid_broken_amx()
        options |= {"text": Path(text), "tokenizer": tokenizer}
    elif tokenizer is not None:
        raise LocaterError("--tokenizer is for --text: give --text too")
    result = doctor(model, base, adapter, **options)
    if report is not None:
        result.report(report)
    deliver(result.to_json, [], result.show, json, report)
    crossed = [name for name in asked if name in result.causes or (name == WIDER and result.changed)]
    if result.broken or crossed:
        if not result.broken:
            print(one_line(f"locater: --fail-on: {', '.join(crossed)}"), file=sys.stderr)
        raise typer.Exit(1)


def judge_run(path: str, json: str | None, report: str | None, asked: list[str]) -> None:
    """The verdict of a training run, from its log: exit status 1 where it failed or learned nothing."""
    from locater.runs.run_log import read_run
    from locater.runs.verdict import FAILED, verdict_of_run
    from locater.runs.watch_page import watch_page

    if asked:
        raise LocaterError(f"--fail-on {asked[0]}: {path} is a run; doctor exits with status 1 where a run failed")
    run = read_run(path, stored=True)
    verdict = verdict_of_run(run)
    if report is not None:
        write_whole(Path(report), watch_page(run))
    deliver(verdict.to_json, [one_line(line) for line in verdict.lines()], None, json, report)
    if verdict.state in FAILED:
        raise typer.Exit(1)
