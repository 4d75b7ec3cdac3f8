"""`locater scan`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from locater.cli.options import Download, FailOn, JsonPath, Length, Raw, ReportPath
from locater.cli.output_and_exit_status import deliver, exit_if_crossed
from locater.cli.shell import check_writable, show_progress
from locater.findings import parse_conditions
from locater.results.scan import LENGTH, NUMERIC_COLUMNS, SCAN_FLAGS

HELP = "Read the query-key spectrum of every head from weights alone, and predict how the head attends."
EXAMPLES = (
    "locater scan path/to/model --report scan.html",
    "locater scan openai-community/gpt2 --json gpt2.json",
    "locater scan hf://EleutherAI/pythia-410m@step1000",
    "locater scan s3://bucket/run/step-1000",
    "locater scan https://host/path/model.safetensors",
    "locater scan checkpoint-500 --fail-on 'sharp,nonfinite,M<-1'",
)


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a weights file, a hub id, or an address: hf://org/model@revision, s3://, gs://, az://, https://.",
        ),
    ],
    json: JsonPath = None,
    eigenvalues: Annotated[
        bool, typer.Option("--eigenvalues", help="Include the eigenvalues of every head in the JSON.")
    ] = False,
    raw: Raw = False,
    length: Length = LENGTH,
    fail_on: FailOn = None,
    query: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Names of the query tensors of an unknown architecture; * stands for the layer number.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Names of the key tensors of an unknown architecture; * stands for the layer number.",
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Query heads in a layer, for a model without config.json."),
    ] = None,
    report: ReportPath = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only part I of N of the layers, for job arrays.")
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Predict with input statistics written by probe --save-statistics."),
    ] = None,
    download: Download = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Base model to read an adapter on, instead of the one that it names."),
    ] = None,
) -> None:
    from locater.commands.scanning import parse_shard, scan
    from locater.predict import Statistics
    from locater.sources.remote import Traffic

    conditions = parse_conditions(fail_on, NUMERIC_COLUMNS, SCAN_FLAGS) if fail_on is not None else []
    check_writable(json, report)
    traffic = Traffic()
    result = scan(
        model,
        length=length,
        raw=raw,
        eigenvalues=eigenvalues,
        details=report is not None,
        shard=parse_shard(shard),
        query=query,
        key=key,
        heads=heads,
        progress=partial(show_progress, traffic=traffic),
        download=download,
        base=base,
        traffic=traffic,
        statistics=None if statistics is None else Statistics.load(statistics),
    )
    if report is not None:
        result.report(report)
    written = result.plain(eigenvalues)
    deliver(written.to_json, result.title(), written.show, json, report)
    exit_if_crossed(conditions, [vars(row) for row in result.rows], result.assumptions["length"])
