"""The command line: one command per verb. Exit status 0 done, 1 findings crossed --fail-on, 2 bad usage or unreadable
input.

Whatever imports torch is imported inside the commands, so that the help is there at once.
"""

from __future__ import annotations

import io
import json as jsonlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from locater.cli.shell import (
    Command,
    Group,
    check_writable,
    command_in,
    examples,
    show_progress,
    stdout_console,
    what_failed,
    without_debug,
)
from locater.errors import LocaterError
from locater.files import write_whole
from locater.findings import Condition, parse_conditions
from locater.verbs.scan_result import LENGTH, NUMERIC_COLUMNS, SCAN_FLAGS, TOKENS, Scan
from locater.version import __version__

if TYPE_CHECKING:
    from locater.verbs.comparing import Comparison
    from locater.verbs.probe_result import Probe

app = typer.Typer(
    help="An instrument for attention: find every head, read its query-key spectrum, predict, measure.", cls=Group,
    epilog=examples("locater demo", "locater scan path/to/model", "locater COMMAND --help"),
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip

JsonPath = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write the data as JSON; - for standard output.")
]
ReportPath = Annotated[
    str | None, typer.Option("--report", metavar="PATH", help="Write an HTML page that works offline.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Take parameters as stored, without folding norms.")]
Length = Annotated[int, typer.Option(help="Tokens in view, for entropy and sharpness.")]
FailOn = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT", help="Exit with 1 if a head has a flag (sharp,nonfinite) or crosses a bound ('M<-1')."
    ),
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; also after a command.")
    ] = False,
) -> None:
    if version:
        print(f"locater {__version__}")
        raise typer.Exit


@app.command(
    "scan", cls=Command,
    epilog=examples(
        "locater scan path/to/model --report scan.html",
        "locater scan openai-community/gpt2 --json gpt2.json",
        "locater scan checkpoint-500 --fail-on 'sharp,nonfinite,M<-1'",
    ),
)  # fmt: skip
def scan_command(
    model: Annotated[str, typer.Argument(help="A folder, a weights file or a hub id.")],
    json: JsonPath = None,
    eigenvalues: Annotated[
        bool, typer.Option("--eigenvalues", help="Put every head's eigenvalues into the JSON.")
    ] = False,
    raw: Raw = False,
    length: Length = LENGTH,
    fail_on: FailOn = None,
    query: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Query tensors of an unknown architecture, * for the layer.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Key tensors of an unknown architecture, * for the layer.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads per layer, where no configuration tells.")
    ] = None,
    report: ReportPath = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Read the I-th of N parts of the layers, for job arrays.")
    ] = None,
    statistics: Annotated[
        str | None, typer.Option(metavar="PATH", help="Statistics of the layers' inputs, from probe --save-statistics.")
    ] = None,
) -> None:
    """Read the query-key spectrum of every head from weights alone, and say what the theory makes of it."""
    from locater.predict import Statistics
    from locater.verbs.scanning import scan

    conditions = parse_conditions(fail_on, NUMERIC_COLUMNS, SCAN_FLAGS) if fail_on is not None else []
    check_writable(json, report)
    found = scan(
        model, length=length, raw=raw, eigenvalues=eigenvalues, details=report is not None, shard=_shard(shard), query=query, key=key,
        heads=heads, progress=show_progress, statistics=None if statistics is None else Statistics.load(statistics),
    )  # fmt: skip
    _deliver(found, json, report, eigenvalues)
    _fail_if_crossed(conditions, found.rows)


@app.command(
    "probe", cls=Command,
    epilog=examples(
        "locater probe path/to/model --text my.txt --report probe.html",
        "locater probe path/to/vit --images pictures/",
        "locater probe checkpoint-500 --tokenizer path/to/base --fail-on locked,exploding",
    ),
)  # fmt: skip
def probe_command(
    model: Annotated[str, typer.Argument(help="A folder as save_pretrained writes it, or a hub id.")],
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to run it on (.xz and .gz too); - for standard input.")
    ] = None,
    corpus: Annotated[
        bool, typer.Option("--corpus", help="Run it on the documentation inside Python, which is the default.")
    ] = False,
    images: Annotated[
        str | None, typer.Option(metavar="PATH", help="A folder of pictures, or an .npy array, for vision models.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="Tokenizer, where the model's folder has none.")
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a sequence.")] = LENGTH,
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens to measure, about; half as many again give the statistics.")
    ] = TOKENS,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Measure so many rows of attention in each batch, not all.")
    ] = None,
    json: JsonPath = None,
    report: ReportPath = None,
    save_statistics: Annotated[
        str | None, typer.Option(metavar="PATH", help="Keep the statistics for scan --statistics.")
    ] = None,
    fail_on: FailOn = None,
) -> None:
    """Run a model on text or images: measure every head, beside what is predicted of it."""
    from locater.processor import avoid_broken_amx
    from locater.verbs.probe_result import OLD_COLUMNS, PROBE_COLUMNS, PROBE_FLAGS
    from locater.verbs.probing import probe

    conditions = (
        parse_conditions(fail_on, PROBE_COLUMNS, PROBE_FLAGS, old_names=OLD_COLUMNS) if fail_on is not None else []
    )
    check_writable(json, report, save_statistics, "--save-statistics {}: give the statistics a file of their own")
    held, label = _text(text, corpus, images)
    avoid_broken_amx()
    found = probe(
        model, held, images=images, tokenizer=tokenizer, length=length, tokens=tokens, rows=rows, label=label,
        progress=partial(show_progress, what="running the model"),
    )  # fmt: skip
    if save_statistics is not None and found.statistics is not None:
        found.statistics.save(save_statistics)
    _deliver_probe(found, json, report, save_statistics)
    _fail_if_crossed(conditions, found.rows)


@app.command(cls=Command, epilog=examples("locater demo", "locater demo --report demo.html --twin twin.html"))
def demo(
    json: JsonPath = None,
    report: ReportPath = None,
    twin: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write a page that sets the model beside its LocAteR twin.")
    ] = None,
) -> None:
    """Scan the small trained model that comes with the package, and set it beside its twin that was trained with
    LocAteR.
    """
    from locater.verbs.comparing import compare
    from locater.verbs.scanning import scan

    check_writable(json, report, twin, "--twin {}: give the page of both a file of its own")
    models = [str(files("locater") / "demo"), str(files("locater") / "demo" / "twin")]
    found = scan(models[0], details=report is not None)
    _deliver(found, json, report, eigenvalues=False)
    if twin is None and json == "-":
        return
    side = compare(found, models[1])
    if twin is not None:
        side.report(twin)
    if json != "-":
        _show_twin(side, models, twin)


def _show_twin(side: Comparison, models: list[str], page: str | None) -> None:
    from locater.report.terminal import print_comparison

    plain, held = (jsonlib.loads((Path(folder) / "training.json").read_text()) for folder in models)
    console = stdout_console()
    console.print(
        f"\nA: this model, {plain['command']}: validation loss {plain['validation_loss']:.4f}\n"
        f"B: its twin, {held['command']}: validation loss {held['validation_loss']:.4f}",
        markup=False, highlight=False,
    )  # fmt: skip
    print_comparison(side, console)
    if page is not None:
        console.print(f"Both side by side: {page}", markup=False, highlight=False)
    console.print("These were the models inside the package. Now one of yours: [bold]locater scan PATH[/bold]")


@app.command(
    "compare", cls=Command,
    epilog=examples(
        "locater compare base finetuned --report compare.html",
        "locater compare step-100.json step-200.json --json -",
    ),
)  # fmt: skip
def compare_command(
    a: Annotated[str, typer.Argument(help="A model, a checkpoint, or the JSON of a scan.")],
    b: Annotated[str, typer.Argument(help="Another; differences are B minus A.")],
    json: JsonPath = None,
    report: ReportPath = None,
    length: Length = LENGTH,
    raw: Raw = False,
) -> None:
    """Set two models, or two checkpoints of one run, side by side."""
    from locater.verbs.comparing import compare

    check_writable(json, report)
    found = compare(a, b, length=length, raw=raw, progress=show_progress)
    if report is not None:
        found.report(report)
    from locater.report.terminal import print_comparison

    title = f"A: {a} ({len(found.a.rows)} heads)\nB: {b} ({len(found.b.rows)} heads)"
    _hand_over(found, title, lambda console: print_comparison(found, console), json, report)


@app.command(
    cls=Command, epilog=examples("locater watch runs/first --open", "locater watch runs/first --report run.html")
)
def watch(
    run: Annotated[str, typer.Argument(help="A run's log (.jsonl), or the folder that holds it.")],
    json: JsonPath = None,
    report: ReportPath = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the live page on this machine; 0 takes a free one.")
    ] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the live page in a browser.")] = False,
) -> None:
    """Look at a training run: live in a browser while it goes on, or as a page and data with --report and --json."""
    from locater.report.watch import serve, watch_page
    from locater.tracking.run_log import read_run

    check_writable(json, report)
    if json is None and report is None:
        serve(run, port, open_browser)
        return
    found = read_run(run)
    if report is not None:
        write_whole(Path(report), watch_page(found))
    _hand_over(found, f"{run}: {found.summary()}", lambda console: None, json, report)


@app.command(cls=Command)
def train() -> None:
    """Train a small transformer on text or images: heads observed, controls applied, interruptions survived."""


@app.command(cls=Command)
def reproduce() -> None:
    """Run a paper's claims: stated beside measured, with spread and verdict. A claim that fails is a finding, not an
    error.
    """


def _late_train() -> Any:
    from locater.cli.train import add_train

    late = typer.Typer(add_completion=False)
    more = "\n\nThe same command again goes on where a run was cut off."
    lines = examples(
        "locater train --steps 500 --out runs/first",
        "locater train --control 'locater(target=2)' --seeds 3 --out runs/held",
    )
    add_train(late, cls=Command, help=f"{train.__doc__}{more}", epilog=lines)
    return typer.main.get_command(late)


def _late_reproduce() -> Any:
    from locater_papers.command import add_reproduce

    late = typer.Typer(add_completion=False)
    lines = examples(
        "locater reproduce --list",
        "locater reproduce bao2024 --quick --report bao2024.html",
        "locater reproduce zoo --claim f",
    )
    add_reproduce(late, cls=Command, help=reproduce.__doc__, epilog=lines)
    return typer.main.get_command(late)


Group.late = {"train": _late_train, "reproduce": _late_reproduce}  # their options come from modules that import torch


def _deliver(found: Scan, json: str | None, report: str | None, eigenvalues: bool) -> None:
    if report is not None:
        found.report(report)
    from locater.report.terminal import print_scan

    title = f"{found.source}: {len(found.rows)} heads in {len(found.layers)} attention layers"
    _hand_over(found.plain(eigenvalues), title, lambda console: print_scan(found, console), json, report)


def _deliver_probe(found: Probe, json: str | None, report: str | None, statistics: str | None) -> None:
    if report is not None:
        found.report(report)
    from locater.report.terminal import print_probe

    _hand_over(found, found.source, lambda console: print_probe(found, console), json, report, statistics)


def _hand_over(
    data: Any,
    title: str,
    show: Callable[[Console], None],
    json: str | None,
    report: str | None,
    statistics: str | None = None,
) -> None:
    """The data alone on standard output for `--json -`; else a title, the tables, the data in a file, and what was
    written where.
    """
    if json == "-":
        print(data.to_json())
        return
    console = stdout_console()
    console.print(title, markup=False, highlight=False)
    show(console)
    if json is not None:
        write_whole(Path(json), data.to_json() + "\n")
    _say_written(console, json, report, statistics)


def _fail_if_crossed(conditions: Sequence[Condition], rows: Sequence[Any]) -> None:
    crossed = [(c.text, row) for c in conditions for row in rows if c.test(vars(row))]
    if crossed:
        text, row = crossed[0]
        count = len({(r.layer, r.head) for _, r in crossed})
        heads = "1 head crosses" if count == 1 else f"{count} heads cross"
        print(f"locater: {heads} --fail-on, first {text} at layer {row.layer} head {row.head}", file=sys.stderr)
        raise typer.Exit(1)


def _text(text: str | None, corpus: bool, images: str | None) -> tuple[str | Path | None, str | None]:
    """What to run a model on, and what the result calls it; without a text that of `probe`."""
    if (text is not None) + corpus + (images is not None) > 1:
        raise LocaterError("--text, --corpus and --images exclude each other: give one")
    if images is not None:
        return None, images
    if text == "-":
        try:
            given = sys.stdin.read()
            given.encode()  # bytes that are no UTF-8 may have passed as lone surrogates
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            raise LocaterError(f"standard input: not UTF-8 text (at {error.start:,})") from None
        return given, "standard input"
    if text == "":
        raise LocaterError("--text: the name of the file is empty; - reads standard input")
    if text is not None:
        return Path(text), text
    from locater.verbs.probe_data import DEFAULT_TEXT

    return None, DEFAULT_TEXT + ("" if corpus else " (the default; --text FILE for yours)")


def _say_written(console: Console, json: str | None, report: str | None, statistics: str | None = None) -> None:
    for what, path in (("Data", json), ("Page", report), ("Statistics", statistics)):
        if path is not None:
            console.print(f"{what} written to {path}", markup=False, highlight=False)


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit()):
        raise LocaterError(f"--shard {text!r}: give it as I/N, such as 2/8")
    return int(number), int(count)


def main() -> None:
    """Entry point: what goes wrong is one line and exit status 2; a traceback with --debug alone."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no Greek still gets its table
    debug, args = without_debug(sys.argv[1:])
    try:
        app(args)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:  # of libraries outside Python too, which raise what is no Exception
        if debug:
            import traceback

            traceback.print_exc()
        print("locater: " + " ".join(what_failed(error, command_in(args)).split()), file=sys.stderr)
        sys.exit(2)
