"""The options of `locater train`: the fields of `Plan` in groups, and a few for several runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from locater.cli.options import JsonPath
from locater.errors import LocaterError
from locater_lab.train.plan import Plan

PANELS = {  # group of the help: fields of the plan
    "Data": (
        *("task", "corpus", "select", "report", "images", "vocabulary", "words", "bos", "length"),
        *("patch", "masked", "parents", "concentration"),
    ),
    "Model": (
        *("layers", "width", "heads", "kv_heads", "hidden", "positions", "qk_norm"),
        *("attention", "convert", "convert_at", "mlp", "norm", "fusion", "scale", "dropout"),
    ),
    "Optimization": (
        *("steps", "batch", "accumulate", "rate", "warmup", "schedule", "floor"),
        *("optimizer", "beta2", "decay", "clip", "seed"),
    ),
    "Attention: control and measurement": ("control", "observe"),
    "The run and its files": ("out", "evaluate", "checkpoint", "keep", "log"),
    "Machine": ("device", "precision", "compile", "deterministic"),
}
FLAGS = {"report": "--report-text"}  # --report is a page, in all commands
METAVARS = {
    "out": "FOLDER",
    **dict.fromkeys(("corpus", "select", "report", "images"), "PATH"),
    "parents": "N,N",
    "attention": "MECHANISM",
    "convert": "MECHANISM",
    "control": "CONTROL",
    "device": "DEVICE",
}
SEVERAL = "Plans and several runs"
OWN_OPTIONS = {  # options that are not fields of the plan
    "plan": Annotated[
        str | None,
        typer.Option(
            metavar="FILE", rich_help_panel=SEVERAL, help="Read the plan from JSON; command-line options override it."
        ),
    ],
    "seeds": Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, rich_help_panel=SEVERAL, help="Train with this many seeds: --seed, --seed + 1, ..."
        ),
    ],
    "sweep": Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=A,B", rich_help_panel=SEVERAL, help="Train with each of these values; may be repeated."
        ),
    ],
    "json": JsonPath,
}


def with_plan_options(train: Callable[..., None]) -> Callable[..., None]:
    """A command whose options are the fields of the plan and OWN_OPTIONS; it calls `train(options, **own options)`."""

    def command(**values: Any) -> None:
        own = {name: values.pop(name) for name in OWN_OPTIONS}
        train({name: value for name, value in values.items() if value not in (None, [])}, **own)

    hints, by_name = get_type_hints(Plan), {item.name: item for item in fields(Plan)}
    options: dict[str, Any] = {
        name: _option(by_name[name], hints[name], panel) for panel, names in PANELS.items() for name in names
    }
    options |= OWN_OPTIONS
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in options.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = options
    return command


def plan_with(path: str | None, options: dict[str, Any]) -> Plan:
    """The plan in a file, or the default one, with these options."""
    base = {} if path is None else Plan.load(Path(path)).to_dict()
    return Plan.from_dict({**base, **options})


def check_options(options: Collection[str], swept: Collection[str], plans: Sequence[Plan], seeds: bool) -> None:
    """Refuse options without effect: those that are also swept, or that none of the plans reads.

    `--seed` may be given with --seeds, which start there.
    """
    for name in {*options, *swept}:
        option = _flag(name)
        if name in options and name in swept and not (name == "seed" and seeds):
            raise LocaterError(f"{option} and --sweep {name}=... exclude each other: give one")
        reasons = [plan.unread.get(name) for plan in plans]
        if all(reasons):
            raise LocaterError(f"{option} does nothing with {reasons[0]}: leave one of them out")


def _option(item: Field[Any], hint: Any, panel: str) -> Any:
    """An option that may be left out. Its default is None, so that a plan in a file keeps its own value."""
    no_value = item.default is None or item.default == () or item.default is False
    metavar = _metavar(item, hint)
    choices = item.metadata["choices"]
    shown = f" One of {', '.join(choices)}." if choices and metavar != "|".join(choices) else ""
    shown += "" if no_value else f" Default {item.default}."
    flag = _flag(item.name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if item.default is True else flag,
        metavar=metavar,
        help=item.metadata["help"] + shown,
        show_default=False,
        rich_help_panel=panel,
    )
    return Annotated[(list[str] if hint == tuple[str, ...] else hint) | None, option]


LONGEST_METAVAR = 24  # columns that the help has for it at a width of 80


def _metavar(item: Field[Any], hint: Any) -> str:
    """What the help calls the value of an option: its choices, or one word where they would break in the middle."""
    choices = "|".join(item.metadata["choices"])
    if choices:
        return choices if len(choices) <= LONGEST_METAVAR else item.name.upper()
    kinds = {hint, *get_args(hint)}
    return METAVARS.get(item.name) or ("N" if int in kinds else "NUMBER" if float in kinds else "TEXT")


def _flag(name: str) -> str:
    """The option of a field of the plan."""
    return FLAGS.get(name) or f"--{name.replace('_', '-')}"
