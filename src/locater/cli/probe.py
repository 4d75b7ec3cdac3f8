"""`locater probe`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from locater.cli.options import FailOn, JsonPath, ReportPath
from locater.cli.output_and_exit_status import deliver, exit_if_crossed
from locater.cli.shell import check_writable, show_progress, standard_input
from locater.defaults import LENGTH, TOKENS
from locater.errors import LocaterError

HELP = "Run a model on text or images, measure every head, and compare with predictions."
EXAMPLES = (
    "locater probe path/to/model --text my.txt --report probe.html",
    "locater probe path/to/vit --images pictures/",
    "locater probe checkpoint-500 --tokenizer path/to/base --fail-on locked,exploding",
)


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder written by save_pretrained, or a hub id.")],
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Text that the model reads (.xz and .gz too); - for standard input. Default: the documentation that "
            "comes with Python.",
        ),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Pictures for vision models: a folder, an image file, .npy or .npz."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Folder of the tokenizer, if it is not in the folder of the model."),
    ] = None,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens in a sequence.")] = LENGTH,
    tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=2, help="About how many tokens to measure; half as many more are read for the statistics."
        ),
    ] = TOKENS,
    rows: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Measure only this many rows of attention in each batch, which is faster."
        ),
    ] = None,
    json: JsonPath = None,
    report: ReportPath = None,
    save_statistics: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write the input statistics, for scan --statistics.")
    ] = None,
    fail_on: FailOn = None,
) -> None:
    from locater.amx import avoid_broken_amx
    from locater.commands.probing import probe
    from locater.findings import parse_conditions
    from locater.results.probe import PROBE_COLUMNS, PROBE_FLAGS

    conditions = []
    if fail_on is not None:
        conditions = parse_conditions(fail_on, PROBE_COLUMNS, PROBE_FLAGS)
    check_writable(json, report, save_statistics, "--save-statistics {}: give the statistics a file of their own")
    data, label = _text(text, images)
    avoid_broken_amx()
    result = probe(
        model,
        data,
        images=images,
        tokenizer=tokenizer,
        length=length,
        tokens=tokens,
        rows=rows,
        label=label,
        progress=partial(show_progress, label="running the model"),
    )
    if save_statistics is not None and result.statistics is not None:
        result.statistics.save(save_statistics)
    if report is not None:
        result.report(report)
    deliver(result.to_json, result.source, result.show, json, report, save_statistics)
    exit_if_crossed(conditions, [vars(row) for row in result.rows], result.assumptions["length"])


def _text(text: str | None, images: str | None) -> tuple[str | Path | None, str | None]:
    """The text to run a model on (None: the default one, or images), and what the result calls it."""
    if text is not None and images is not None:
        raise LocaterError("--text and --images exclude each other: give one")
    if images is not None:
        return None, images
    if text == "-":
        return standard_input(), "standard input"
    if text == "":
        raise LocaterError("--text: the name of the file is empty; - reads standard input")
    if text is not None:
        return Path(text), text
    from locater.commands.probe_data import DEFAULT_TEXT

    return None, f"{DEFAULT_TEXT} (the default; --text FILE for yours)"
