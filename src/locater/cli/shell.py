"""The command line and its shell: help with examples, commands built when they are called, targets, consoles, and how
failures end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from locater.errors import LocaterError, first_line


def examples(*lines: str) -> str:
    """What a command's help ends with: a line each."""
    return "\n\n".join(("Examples:", *lines))


class Command(TyperCommand):
    """A command whose switches stand in the help without `<bool>` beside them."""

    def get_params(self, ctx: Any) -> Any:
        return untyped_switches(super().get_params(ctx))


class Group(TyperGroup):
    """The commands. The options of some come from modules that import torch: those are built when they are called.

    Typer ends with status 1 where a pipe is closed or a file ends too soon. Here status 1 means that --fail-on was
    crossed.
    """

    late: dict[str, Callable[[], Any]] = {}  # name of a command: what builds it  # noqa: RUF012

    def get_params(self, ctx: Any) -> Any:
        return untyped_switches(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.late[name]() if name in self.late else command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            value = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
            raise typer.Exit(0) from None
        except EOFError as error:
            raise UnexpectedEndError(error) from error
        return value


class UnexpectedEndError(Exception):
    """An EOFError, which typer would take for the end of a conversation."""


def untyped_switches(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def check_writable(
    json: str | None, report: str | None, other: str | None = None, refusal: str = "{}: give it a file of its own"
) -> None:
    """Refuse a target that cannot be written before any work is done; `refusal` is said of an `other` that is one of
    the first two.
    """
    if report is not None and report in (json, "-"):
        raise LocaterError(f"--report {report}: give the page a file of its own")
    if other is not None and other in (json, report, "-"):
        raise LocaterError(refusal.format(other))
    for path in (json, report, other):
        if path is None or path == "-":
            continue
        folder = Path(path).parent
        if not path or Path(path).is_dir():
            raise LocaterError(f"{path or 'the name of a file to write'}: is a folder or empty; give a file name")
        if not folder.is_dir():
            raise LocaterError(f"{path}: the folder {folder} does not exist")
        if not os.access(Path(path) if Path(path).exists() else folder, os.W_OK):
            raise LocaterError(f"{path}: no permission to write there")


def show_progress(parts: Iterable[Any], total: int, what: str = "reading heads") -> Iterable[Any]:
    """A bar on the terminal, on standard error, for work longer than a second; nothing on a pipe."""
    from rich.progress import track

    console = Console(stderr=True)
    return track(parts, what, total, console=console, transient=True, disable=not console.is_terminal)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `Group`: the reader has seen enough, which rich would end with status 1."""
        raise BrokenPipeError


def stdout_console() -> Console:
    """For tables: as wide as the terminal, or as COLUMNS says, 140 on a pipe."""
    console = _Console()
    columns = os.environ.get("COLUMNS", "")
    return (
        console if console.is_terminal else _Console(width=int(columns) if columns.isdigit() and int(columns) else 140)
    )


def without_debug(args: list[str]) -> tuple[bool, list[str]]:
    """Whether --debug is given, before or after the command, and the arguments without it."""
    end = args.index("--") if "--" in args else len(args)
    kept = [word for word in args[:end] if word != "--debug"]
    return len(kept) < end, [*kept, *args[end:]]


def command_in(args: Sequence[str]) -> str:
    """The name of the command, for messages."""
    return next((word for word in args if not word.startswith("-")), "start")


def what_failed(error: BaseException, command: str) -> str:
    """What is wrong, in a line: with the user's input, with a file, or with this program."""
    if isinstance(error, LocaterError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: {error.strerror}"
    cause = error.__cause__ if isinstance(error, UnexpectedEndError) and error.__cause__ else error
    return (
        f"{command}: unexpected {type(cause).__name__}: {first_line(cause)}; this is a bug in Locater: please report it with what "
        "the same command prints with --debug"
    )
