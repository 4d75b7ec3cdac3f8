"""The command line: one file per command. Exit status 0: done; 1: a head met --fail-on; 2: bad usage or input.

What only a running command needs, such as torch, is imported inside it, and the options of a command are built when it
is called: `locater --help` is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from locater.cli import ablate, compare, doctor, explain, fleet, probe, scan, watch
from locater.cli.shell import Command, Group, command_name, error_line, examples_text, pipe_safe_output, split_debug
from locater.redacted_and_escaped_text import escaped_output, without_secrets
from locater.registry import offered_entries
from locater.version import __version__

app = typer.Typer(
    help="An instrument for attention: find every head, read its query-key spectrum, predict, measure.",
    cls=Group,
    epilog=examples_text(
        "locater demo", "locater doctor path/to/model", "locater scan path/to/model", "locater COMMAND --help"
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
)
BUILT_IN = {
    module.__name__.rpartition(".")[2]: module
    for module in (doctor, scan, fleet, probe, compare, explain, ablate, watch)
}


def _list(name: str, module: Any) -> None:
    """Add a command to the list of commands. Its options are built when it is called, by its `build` if it has one."""
    _add(app, name, module, lambda: None)
    Group.late[name] = getattr(module, "build", partial(_build, name, module))


def _add(to: typer.Typer, name: str, module: Any, function: Callable[..., None]) -> None:
    to.command(name, cls=Command, help=module.HELP, epilog=examples_text(*module.EXAMPLES))(function)


def _build(name: str, module: Any) -> Any:
    alone = typer.Typer(add_completion=False)
    _add(alone, name, module, module.command)
    return typer.main.get_command(alone)


for name, module in BUILT_IN.items():
    _list(name, module)


def load_offered_commands() -> typer.Typer:
    """All commands, including those of other packages: `locater_lab` has `demo`, `train` and `reproduce`."""
    for name, point in offered_entries("commands").items():
        if name not in Group.late:
            _list(name, point.load())
    return app


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may also follow a command.")
    ] = False,
) -> None:
    if version:
        print(f"locater {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Entry point. An error is one line and exit status 2; --debug adds the traceback."""
    sys.stdout, sys.stderr = pipe_safe_output(sys.stdout), pipe_safe_output(sys.stderr)
    debug, args = split_debug(sys.argv[1:])
    try:
        own = command_name(args) in BUILT_IN or args == ["--version"]  # others are searched for, which takes a while
        known = app if own else load_offered_commands()
        status = typer.main.get_command(known).main(args, prog_name="locater", standalone_mode=False)
        sys.stdout.flush()  # a full disk is an error too
        if isinstance(status, int):  # of typer.Exit
            sys.exit(status)
    except SystemExit:
        raise
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BaseException as error:  # native libraries may raise what is not an Exception
        with escaped_output():
            if debug:
                import traceback

                traceback.print_exc()
            line = without_secrets(error_line(error, command_name(args)))
            print("locater: " + " ".join(line.split()), file=sys.stderr)
        sys.exit(2)
