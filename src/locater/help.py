"""How the command line presents itself: examples, switches without a type, and commands that are built when they are called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def examples(*lines: str) -> str:
    """What a command's help ends with: a line each."""
    return "\n\n".join(("Examples:", *lines))


class Command(TyperCommand):
    """A command whose switches stand in the help without `<bool>` beside them."""

    def get_params(self, ctx: Any) -> Any:
        return untyped_switches(super().get_params(ctx))


class Group(TyperGroup):
    """The commands. The options of some come from modules that import torch: those are built when they are called.

    Typer ends with status 1 where a pipe is closed or a file ends too soon. Here status 1 means that --fail-on was crossed.
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
