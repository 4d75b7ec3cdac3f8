"""`locater probe`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from locater.cli.options import FailOn, JsonPath, ReportPath
from locater.cli.output_and_exit_status import deliver, exit_if_crossed
from locater.cli.shell import check_writable, show_progress, standard_input
from locater.defaults import CACHE_LENGTH, LENGTH, TOKENS
from locater.errors import LocaterError

HELP = "Run a model on text or images, measure every head, and compare with predictions."
EXAMPLES = (
    "locater probe path/to/model --text my.txt --report probe.html",
    "locater probe path/to/vit --images pictures/",
    "locater probe path/to/model --text my.txt --cache --window 128 --loss 0.02 --out list",
    "locater probe path/to/model --text my.txt --lengths 256,1024,4096",
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
    length: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help=f"Tokens in a sequence. Default: {LENGTH}; {CACHE_LENGTH} with --cache."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help=f"About how many tokens to measure ({TOKENS}); half as many more are read for the statistics. With "
            "--cache half of them choose; with --lengths 16384 and at least four sequences.",
        ),
    ] = None,
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
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Instead: what heads do with so many tokens in front, and where it ends."),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option("--cache", help="Instead: which key heads need the long cache, and which can do with a window."),
    ] = False,
    window: Annotated[int, typer.Option(metavar="N", min=1, help="Keys that a head sees at most, with --cache.")] = 128,
    sinks: Annotated[int, typer.Option(metavar="N", min=0, help="First keys that it sees besides, with --cache.")] = 4,
    loss: Annotated[
        float, typer.Option(metavar="NATS", help="What the list of --cache may cost, in nats per token.")
    ] = 0.02,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --cache: measure each key head by itself, which takes longer.")
    ] = False,
    copies: Annotated[
        bool,
        typer.Option("--copies", help="With --cache: each text stands twice, and the loss of the second copy counts."),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of the list of --cache, as DuoAttention and kvpress read it."),
    ] = None,
) -> None:
    others = {"--rows": rows, "--save-statistics": save_statistics, "--fail-on": fail_on, "--images": images}
    if cache or lengths is not None:
        name = "--cache" if cache else "--lengths"
        others["--lengths"] = lengths if cache else None
        others["--length"] = None if cache else length
        if refused := next((other for other, value in others.items() if value is not None), None):
            raise LocaterError(f"{name} and {refused} exclude each other: give one")
    with_cache = {"--measure": measure, "--copies": copies, "--out": out is not None}
    if not cache and (wrong := next((name for name, given in with_cache.items() if given), None)):
        raise LocaterError(f"{wrong} goes with --cache")
    if cache:
        plan = CacheOptions(window, sinks, loss, measure, copies, out)
        _cache(model, text, tokenizer, plan, length or CACHE_LENGTH, tokens or TOKENS, json, report)
        return
    if lengths is not None:
        _lengths(model, text, tokenizer, _numbers(lengths), tokens, json, report)
        return
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
        length=length or LENGTH,
        tokens=tokens or TOKENS,
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


class CacheOptions(NamedTuple):
    """What --cache is asked."""

    window: int
    sinks: int
    loss: float
    measure: bool
    copies: bool
    out: str | None


def _cache(
    model: str,
    text: str | None,
    tokenizer: str | None,
    options: CacheOptions,
    length: int,
    tokens: int,
    json: str | None,
    report: str | None,
) -> None:
    from locater.amx import avoid_broken_amx
    from locater.commands.choosing_cache import cache_plan

    check_writable(json, report)
    if options.out is not None and (not options.out or Path(options.out).is_file()):
        raise LocaterError(f"--out {options.out}: name a folder")
    data, label = _text(text, None)
    avoid_broken_amx()
    result = cache_plan(
        model,
        data,
        window=options.window,
        sinks=options.sinks,
        loss=options.loss,
        measure=options.measure,
        copies=options.copies,
        tokenizer=tokenizer,
        length=length,
        tokens=tokens,
        label=label,
        progress=partial(show_progress, label="trying windows"),
    )
    if options.out is not None:
        result.export(options.out)
    if report is not None:
        result.report(report)
    deliver(result.to_json, result.source, result.show, json, report)
    if options.out is not None and json != "-":
        print(f"List written to {options.out}")


def _lengths(
    model: str,
    text: str | None,
    tokenizer: str | None,
    lengths: list[int],
    tokens: int | None,
    json: str | None,
    report: str | None,
) -> None:
    from locater.amx import avoid_broken_amx
    from locater.commands.probing_lengths import probe_lengths

    check_writable(json, report)
    data, label = _text(text, None)
    avoid_broken_amx()
    result = probe_lengths(
        model,
        data,
        lengths,
        tokenizer=tokenizer,
        tokens=tokens,
        label=label,
        progress=partial(show_progress, label="running the model"),
    )
    if report is not None:
        result.report(report)
    deliver(result.to_json, result.source, result.show, json, report)


def _numbers(text: str) -> list[int]:
    """`256,1024`: whole numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise LocaterError(f"--lengths {text!r}: write numbers of tokens, such as 256,1024,4096")
    return [int(part) for part in parts]


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
