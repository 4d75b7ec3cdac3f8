"""All that the golden tests import from the project. Where a module moves, these lines follow it, and no golden file
changes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import typer

import locater
from locater.control.base import known_options
from locater.families.registry import BY_TYPE
from locater.findings import FLAGS
from locater.results.probe import ProbeRow
from locater.runs.run_log import read_run
from locater_lab.engine.runs import Row, Runs
from locater_lab.engine.trained_models import sentence_model, why_unavailable
from locater_lab.mechanisms import mechanisms
from locater_lab.papers import PAPERS
from locater_lab.train.controls_and_conversion import controls
from locater_lab.train.loop import run as train
from locater_lab.train.plan import Plan

ROOT = Path(__file__).parents[2]
__all__ = [
    "MODELS",
    "ROOT",
    "Plan",
    "Row",
    "Runs",
    "command",
    "kept_runs_asked_for",
    "names",
    "read_run",
    "train",
    "why_unavailable",
]


MODELS: dict[str, Path] = {
    "demo": Path(str(locater.__file__)).parent / "demo",
    "twin": Path(str(locater.__file__)).parent / "demo" / "twin",
    "stories260K": ROOT.parent / "shared" / "models" / "stories260K",
    "MiniLM": (None if why_unavailable() else sentence_model()) or Path("all-MiniLM-L6-v2"),
}


@cache
def _main() -> Callable[[], None]:
    """The command line, where pyproject.toml says that it is."""
    module, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["locater"].split(":")
    return getattr(import_module(module), name)


def command(*arguments: object) -> None:
    """`command("scan", folder)` as the shell would start it in the root of the repository, on one thread; refused
    unless it ends well.
    """
    before, threads, told = sys.argv, torch.get_num_threads(), io.StringIO()
    sys.argv = ["locater", *map(str, arguments)]
    torch.set_num_threads(1)  # sums are added in the same order on every machine
    try:
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            _main()()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(
                f"locater {' '.join(map(str, arguments))} ended with {stop.code}: {told.getvalue()[-500:]}"
            ) from None
    finally:
        sys.argv = before
        torch.set_num_threads(threads)


def names() -> dict[str, Any]:
    """Every name that is data: it stands in kept runs, in plans on disk, in scripts, or in documents."""
    held = {name: PAPERS[name] for name in PAPERS}  # imports the papers, which offer controls of their own
    return {
        "claims": {
            name: {c.id: [c.relation, c.stated, c.tolerance] for c in paper.claims} for name, paper in held.items()
        },
        "controls": {
            name: {option: _plain(value) for option, value in known_options(kind).items()}
            for name, kind in controls().items()
        },
        "mechanisms": {m.name: {"kind": m.kind, "causal": m.causal, **_defaults(m.attend)} for m in mechanisms()},
        "plan": Plan().to_dict(),
        "commands": commands(),
        "columns": {
            "scan": _of_none(field.name for field in fields(locater.HeadRow)),
            "probe": _of_none(field.name for field in fields(ProbeRow)),
        },
        "flags": _of_none(flag.name for flag in FLAGS),
        "architectures": _of_none(sorted(BY_TYPE)),
        "public": _of_none(locater.__all__),
    }


def _of_none(names: Any) -> dict[str, None]:
    """Names alone, each a key, so that one can be renamed in keys.py."""
    return dict.fromkeys(names)


def _defaults(call: Callable[..., Any]) -> dict[str, Any]:
    """Options of a mechanism with their defaults; its first argument is what all take."""
    return {name: _plain(option.default) for name, option in list(inspect.signature(call).parameters.items())[1:]}


def _plain(default: Any) -> Any:
    return "must be given" if default is inspect.Parameter.empty else default


def commands() -> dict[str, dict[str, None]]:
    """Commands with their options and arguments."""
    root: Any = typer.main.get_command(sys.modules[_main().__module__].load_offered_commands())
    context = typer.Context(root)
    # some are built late
    parts = {"locater": root, **{name: root.resolve_command(context, [name])[1] for name in root.commands}}
    return {
        name: _of_none(
            option for held in part.params for option in (*held.opts, *held.secondary_opts) if option != "--help"
        )
        for name, part in parts.items()
    }


def kept_runs_asked_for(files: dict[str, Path]) -> dict[str, dict[str, int]]:
    """By file and paper: how many of the kept runs its claims ask for, found by their keys."""
    found: dict[str, dict[str, int]] = {}
    for name, path in files.items():
        runs = Runs(path)
        found[name] = {
            paper: len(
                {row.key for study in PAPERS[paper].studies if study.rows for row in study.rows(runs) if runs.of(row)}
            )
            for paper in PAPERS
        }
    return found
