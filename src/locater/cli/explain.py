"""`locater explain`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from locater.cli.options import JsonPath, ReportPath
from locater.cli.output_and_exit_status import deliver
from locater.cli.shell import check_writable, show_progress, standard_input
from locater.errors import LocaterError

HELP = "Explain one output of a model: how much each input token contributes, and through which heads."
EXAMPLES = (
    'locater explain path/to/model --prompt "Once upon a" --report page.html',
    'locater explain path/to/model --prompt "Paris is in" --target " France" --method relevance,rollout',
    "locater explain path/to/vit --image cat.png --report page.html",
)


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder written by save_pretrained, or a hub id.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is the message of a user: write it by the chat template.")
    ] = False,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text that the model reads, instead of --prompt; - for standard input."),
    ] = None,
    decoder_text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the decoder of an encoder-decoder model has written so far."),
    ] = None,
    image: Annotated[str | None, typer.Option(metavar="PATH", help="A picture, for vision models.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Token or class to explain, by its text or its number (digits alone are a number). "
            "Default: the most likely one.",
        ),
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Position of the output token to explain, from 0. Default: the first [MASK], or the last token.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Method, or several separated by commas; may be repeated. Default: operator, or another that applies.",
        ),
    ] = None,
    patterns: Annotated[
        str | None,
        typer.Option(
            metavar="L.H,...", help="Heads whose attention patterns the page shows, if there is no room for all."
        ),
    ] = None,
    deletion: Annotated[
        bool,
        typer.Option(
            "--deletion/--no-deletion", help="Test the scores by running the model again with tokens removed."
        ),
    ] = True,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Folder of the tokenizer, if it is not in the folder of the model."),
    ] = None,
    json: JsonPath = None,
    matrices: Annotated[
        bool, typer.Option("--matrices", help="Include token-by-token matrices and head patterns in the JSON.")
    ] = False,
    report: ReportPath = None,
) -> None:
    from locater.amx import avoid_broken_amx
    from locater.commands.explaining import explanations

    check_writable(json, report)
    words = _prompt(prompt, text)
    avoid_broken_amx()
    methods = None if method is None else [name.strip() for part in method for name in part.split(",")]
    result = explanations(
        model,
        words,
        image=image,
        decoder_text=decoder_text,
        target=target,
        position=position,
        methods=None if methods is None else [name for name in methods if name],
        heads=None if patterns is None else _heads(patterns),
        tokenizer=tokenizer,
        deletion=deletion,
        chat=chat,
        progress=partial(show_progress, label="explaining"),
    )
    if report is not None:
        result.report(report)
    deliver(partial(result.to_json, matrices), result.source, result.show, json, report)


def _prompt(prompt: str | None, file: str | None) -> str | None:
    if prompt is not None and file is not None:
        raise LocaterError("--prompt and --text exclude each other: give one")
    if file is None:
        return prompt
    if file == "-":
        return standard_input()
    if not os.path.exists(file):
        raise LocaterError(f"--text {file}: no such file; for the prompt itself give --prompt")
    from locater.inputs.text import read_text

    return read_text(Path(file))


def _heads(text: str) -> list[tuple[int, int]]:
    """`3.1,4.0` as (layer, head)."""
    pairs = []
    for part in text.split(","):
        layer, dot, head = part.strip().partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise LocaterError(f"--patterns {text!r}: write layer.head, such as 3.1,4.0")
        pairs.append((int(layer), int(head)))
    return pairs
