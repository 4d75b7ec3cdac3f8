"""`locater ablate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from locater.cli.options import JsonPath, ReportPath
from locater.cli.output_and_exit_status import deliver
from locater.cli.shell import check_writable, show_progress, standard_input
from locater.errors import LocaterError

HELP = "Remove each head of a model, and measure what the whole model loses."
EXAMPLES = ("locater ablate path/to/model --text book.txt --remove 17.3,18.6 --report ablation.html",)


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder written by save_pretrained, or a hub id.")],
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Text that the model reads; - for standard input. Default: the documentation that comes with Python.",
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            "--remove",
            metavar="L.H,...",
            help="Heads to remove, one after the other; 17.3+18.6 removes both at once, 17 all of layer 17, "
            "and all every head at once. Default: every head, one after the other.",
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="What stands in place of a head: zero, mean, uniform (even weights), window, or bits (rounded keys).",
        ),
    ] = "zero",
    window: Annotated[int, typer.Option(metavar="N", min=1, help="Keys that a head sees with --mode window.")] = 128,
    sinks: Annotated[int, typer.Option(metavar="N", min=0, help="First keys that it sees besides.")] = 4,
    bits: Annotated[int, typer.Option(metavar="N", min=1, max=16, help="Bits of keys with --mode bits.")] = 4,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens in a sequence.")] = 256,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="About how many tokens to read.")] = 2048,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Folder of the tokenizer, if it is not in the folder of the model."),
    ] = None,
    json: JsonPath = None,
    report: ReportPath = None,
) -> None:
    from locater.amx import avoid_broken_amx
    from locater.commands.ablating import ablate

    check_writable(json, report)
    chosen = None if remove is None else _heads(remove)
    given = None if text is None else standard_input() if text == "-" else Path(text)
    if text == "":
        raise LocaterError("--text: the name of the file is empty; - reads standard input")
    avoid_broken_amx()
    result = ablate(
        model,
        given,
        chosen,
        mode,
        window=window,
        sinks=sinks,
        bits=bits,
        tokenizer=tokenizer,
        length=length,
        tokens=tokens,
        label="standard input" if text == "-" else text,
        progress=partial(show_progress, label="removing heads"),
    )
    if report is not None:
        result.report(report)
    deliver(result.to_json, result.source, result.show, json, report)


def _heads(text: str) -> list[str | int | list[tuple[int, int]]]:
    """`3.1,4.0+4.2,5,all`: a head, two at once, a layer, every head."""
    chosen: list[str | int | list[tuple[int, int]]] = []
    for item in text.split(","):
        if item.strip() == "all":
            chosen.append("all")
            continue
        parts = [part.strip().partition(".") for part in item.split("+")]
        if len(parts) == 1 and parts[0][0].isdecimal() and not parts[0][1]:
            chosen.append(int(parts[0][0]))
            continue
        if not all(layer.isdecimal() and dot and head.isdecimal() for layer, dot, head in parts):
            raise LocaterError(
                f"--remove {text!r}: write layer.head, such as 17.3,18.6; 17.3+18.6 for both at once, "
                "17 for a layer, all for every head"
            )
        chosen.append([(int(layer), int(head)) for layer, _, head in parts])
    return chosen
