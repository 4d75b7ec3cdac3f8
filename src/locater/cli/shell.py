"""Between commands and the shell: help with examples, files to write, progress, consoles, and errors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup

from locater.errors import LocaterError, first_line
from locater.redacted_and_escaped_text import escape_controls, escaped_output, one_line

if TYPE_CHECKING:
    from locater.sources.remote import Traffic


def examples_text(*lines: str) -> str:
    """The last part of a command's help: an example on each line."""
    return "\n\n".join(("Examples:", *lines))


# Options of version 0.2 that were renamed, because the same name means something else in other commands.
MOVED = {
    ("explain", "--text-file"): "give --text FILE",
    ("explain", "--heads"): "give --patterns LAYER.HEAD,...; --heads is a number of heads",
    (
        "probe",
        "--corpus",
    ): "leave it out: the documentation that comes with Python is the default; --text FILE for yours",
    ("train", "--report"): "give --report-text PATH for text to publish numbers of; a page of a run is made by "
    "locater watch RUN --report PATH",
    ("reproduce", "--images"): "give --figures FOLDER",
}


class Command(TyperCommand):
    """A command of Locater."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args[: args.index("--") if "--" in args else len(args)]:
            option = word.partition("=")[0]
            if (ctx.info_name, option) in MOVED:
                raise LocaterError(f"{ctx.info_name} no longer has {option}: {MOVED[ctx.info_name, option]}")
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        return hide_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        with escaped_output():
            return super().invoke(ctx)


class Group(TyperGroup):
    """The commands. Those in `late` are built when they are called: help lists all and needs the options of none, and
    those of `train` need torch.

    Status 1 means that a head met --fail-on. Typer would also use it for a broken pipe and for a file that ends too
    soon, which are passed on here as errors.
    """

    late: dict[str, Callable[[], Any]] = {}  # name of a command: the function that builds it  # noqa: RUF012

    def get_params(self, ctx: Any) -> Any:
        return hide_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.late[name]() if name in self.late else command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (EOFError, BrokenPipeError) as error:
            raise UnexpectedEndError(error) from error


class UnexpectedEndError(Exception):
    """An EOFError or BrokenPipeError, which typer would take for the end of a dialogue or a closed pipe."""


class Output(io.FileIO):
    """Standard output or standard error. If the reader has closed the pipe, as `head -1` does, the rest is discarded:
    the command still finishes its work, writes its files, and reports with its exit status.
    """

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if isinstance(error, BrokenPipeError):
                return super().write(data)
            raise  # once, such as for a full disk: at exit Python writes what is left again


def pipe_safe_output(stream: Any) -> Any:
    """This stream in a form that survives a closed pipe and can write any character. None is a stream that was closed
    before the start: `print` would use the other one instead.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw: Any = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not io.FileIO:  # the console of Windows
        stream.reconfigure(errors="replace")
        return stream
    output: Any = Output(raw.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        output if raw is stream.buffer else io.BufferedWriter(output),  # none with python -u
        encoding=stream.encoding,
        errors="replace",  # a terminal without Greek letters still shows the table
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def hide_types(params: Any) -> Any:
    """Parameters without `<bool>` next to switches and `<str>` next to arguments in the help."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif isinstance(param, TyperArgument):
            param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
    return params


def check_writable(
    json: str | None, report: str | None, other: str | None = None, refusal: str = "{}: give it a file of its own"
) -> None:
    """Refuse a file that cannot be written, before any work is done.

    `refusal` is the message if `other` is the same file as one of the first two.
    """
    if report is not None and (report == "-" or _is_same_file(report, json)):
        raise LocaterError(f"--report {report}: give the page a file of its own")
    if other is not None and (other == "-" or _is_same_file(other, json) or _is_same_file(other, report)):
        raise LocaterError(refusal.format(other))
    for path in (json, report, other):
        if path is None or path == "-":
            continue
        folder = Path(path).parent
        if "\0" in path:
            raise LocaterError(f"{path!r}: no file can have this name")
        if not path or Path(path).is_dir():
            raise LocaterError(f"{path or 'the name of a file to write'}: is a folder or empty; give a file name")
        if not folder.is_dir():
            raise LocaterError(f"{path}: the folder {folder} does not exist")
        if not os.access(Path(path) if Path(path).exists() else folder, os.W_OK):
            raise LocaterError(f"{path}: no permission to write there")


def _is_same_file(path: str, other: str | None) -> bool:
    """Whether two names are of the same file: `out.html` and `./out.html`, or a link to it."""
    return bool(path and other) and other != "-" and os.path.realpath(path) == os.path.realpath(str(other))


def show_progress(
    parts: Iterable[Any], total: int, label: str = "reading heads", traffic: Traffic | None = None
) -> Iterable[Any]:
    """A progress bar on standard error; none on a pipe. `traffic` adds the bytes that were downloaded."""
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

    class Bytes(ProgressColumn):
        def render(self, task: Any) -> Text:
            if traffic is None or not traffic.requests:
                return Text("")
            of = f" of {traffic.planned / 1e6:,.0f}" if traffic.planned else ""
            return Text(f"{traffic.bytes / 1e6:,.0f}{of} MB")

    console = _Console(stderr=True)
    if not console.is_terminal:  # `disable` of rich before 14 still ends with an empty line
        yield from parts
        return
    columns = (TextColumn("{task.description}"), BarColumn(), Bytes(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(parts, total, description=label)


class _Console(Console):
    """A console whose text cannot control the terminal. Every printed string or table cell is one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(emoji=False, **settings)  # the name of a tensor may hold `:cat:`

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(one_line(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escape_controls(text), style, control)


def stdout_console() -> Console:
    """A console for tables: as wide as the terminal, or on a pipe as wide as COLUMNS or 140."""
    console = _Console()
    if console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    return _Console(width=int(columns) if columns.isdigit() and int(columns) else 140)


def standard_input() -> str:
    """The text on standard input."""
    if sys.stdin is None:
        raise LocaterError("standard input: closed; give a file")
    try:
        text = sys.stdin.read()
        text.encode()  # bytes that are not UTF-8 may have been read as lone surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise LocaterError(f"standard input: not UTF-8 text (at {error.start:,}): convert it") from None
    return text


def split_debug(args: list[str]) -> tuple[bool, list[str]]:
    """Whether --debug is among the arguments, before or after the command, and the arguments without it."""
    end = args.index("--") if "--" in args else len(args)
    others = [word for word in args[:end] if word != "--debug"]
    return len(others) < end, [*others, *args[end:]]


def command_name(args: Sequence[str]) -> str:
    """The name of the command, for messages."""
    return next((word for word in args if not word.startswith("-")), "start")


def error_line(error: BaseException, command: str) -> str:
    """One line about an error: of the user's input, of a file, or of this program."""
    if isinstance(error, LocaterError):
        return str(error)
    if hasattr(error, "format_message"):  # wrong usage, as typer words it
        context: Any = getattr(error, "ctx", None)
        path = "locater" if context is None else context.command_path
        return f"{error.format_message().rstrip('.')} ({path} --help)"
    cause = error.__cause__ if isinstance(error, UnexpectedEndError) and error.__cause__ else error
    if isinstance(cause, OSError) and cause.strerror and not isinstance(cause, BrokenPipeError):
        return f"{cause.filename or 'output'}: {cause.strerror}"
    return (
        f"{command}: unexpected {type(cause).__name__}: {first_line(cause)}; this is a bug in Locater: "
        "please report it with what the same command prints with --debug"
    )
