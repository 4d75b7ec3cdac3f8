"""`locater reproduce`: the one place that imports the papers, when the command is called."""

from __future__ import annotations

from typing import Any

import typer

from locater.cli.shell import Command, examples_text

HELP = (
    "Test the claims of a paper: stated beside measured, with spread and verdict. "
    "A claim that fails is a finding, not an error."
)
EXAMPLES = (
    "locater reproduce --list",
    "locater reproduce bao2024 --quick --report bao2024.html",
    "locater reproduce zoo --claim f",
)


def command() -> None:
    """Only for the list of commands; `build` makes the command with its options."""


def build() -> Any:
    from locater_lab.cli.reproducing import add_reproduce

    app = typer.Typer(add_completion=False)
    add_reproduce(app, cls=Command, help=HELP, epilog=examples_text(*EXAMPLES))
    return typer.main.get_command(app)
