"""`locater train`: the fields of `Plan` as options, and a few of its own."""

from __future__ import annotations

import inspect
import json as jsonlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from locater.cli.shell import check_writable
from locater.errors import LocaterError
from locater.files import write_whole
from locater.processor import avoid_broken_amx
from locater.train.plan import Plan
from locater.train.result import Result

OWN = {
    "plan": (
        str | None,
        typer.Option("--plan", metavar="FILE", help="Take the plan from JSON; command-line options override it."),
    ),
    "seeds": (int | None, typer.Option("--seeds", min=1, help="Run it with so many seeds, from --seed on: 0, 1, ...")),
    "sweep": (
        list[str] | None,
        typer.Option("--sweep", metavar="OPTION=A,B", help="Run it with each value; may be repeated."),
    ),
    "json": (
        str | None,
        typer.Option("--json", metavar="PATH", help="Write the result as JSON; - for standard output."),
    ),
}


def add_train(app: typer.Typer, **about: Any) -> None:
    """Put the command into the command line; `about` is for typer: help, examples."""

    def train(**given: Any) -> None:
        own = {name: given.pop(name) for name in OWN}
        check_writable(own["json"], None)
        from locater.train.sweep import combinations, parse_sweep

        asked = {name: value for name, value in given.items() if value not in (None, [])}
        plan = plan_of(own["plan"], asked)
        over = parse_sweep(own["sweep"] or [], own["seeds"], plan.seed)
        check_asked(asked, over, [each for _, each in combinations(plan, over)], own["seeds"] is not None)
        avoid_broken_amx()
        if over:
            _several(plan, over, own["json"])
        else:
            _one(plan, own["json"])

    hints = get_type_hints(Plan)
    options = {item.name: _option(item, hints[item.name]) for item in fields(Plan)} | OWN
    kind = inspect.Parameter.KEYWORD_ONLY
    train.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(n, kind, default=None, annotation=Annotated[hint, option])
            for n, (hint, option) in options.items()
        ]
    )
    train.__annotations__ = {name: Annotated[hint, option] for name, (hint, option) in options.items()}
    app.command("train", **about)(train)


def plan_of(path: str | None, given: dict[str, Any]) -> Plan:
    """The plan in a file, or the default one, with the options that were given."""
    held = {} if path is None else Plan.load(Path(path)).to_dict()
    return Plan.from_dict({**held, **given})


def check_asked(asked: Collection[str], over: Collection[str], plans: Sequence[Plan], seeds: bool) -> None:
    """Refuse options that would be passed over: given and swept both, or read by none of the plans. `seeds` begin at
    --seed.
    """
    for name in {*asked, *over}:
        option = f"--{name.replace('_', '-')}"
        if name in asked and name in over and not (name == "seed" and seeds):
            raise LocaterError(f"{option} and --sweep {name}=... exclude each other: give one")
        why = [plan.unread.get(name) for plan in plans]
        if all(why):
            raise LocaterError(f"{option} does nothing with {why[0]}: leave one of them out")


def _option(item: Any, hint: Any) -> tuple[Any, Any]:
    """Every option may be left out: None is told from a value, so that a plan in a file keeps its own."""
    flag = f"--{item.name.replace('_', '-')}"
    default = item.default if item.default not in (None, (), False) else None
    choices = (
        f" One of {', '.join(item.metadata['choices'])}."
        if item.metadata["choices"] and "positions" != item.name
        else ""
    )
    shown = "" if default is None else f" Default {default}."
    made = typer.Option(flag, help=item.metadata["help"] + choices + shown, show_default=False)
    return (list[str] if hint == tuple[str, ...] else hint) | None, made


def _one(plan: Plan, json: str | None) -> None:
    from locater.families.own import is_scanned
    from locater.train.display import Live
    from locater.train.loop import run

    live = Live()
    try:
        result = run(plan, live)
    except LocaterError:
        live.clear()
        raise
    except KeyboardInterrupt:
        live.clear()
        print(f"locater: interrupted; {_what_is_kept(plan)}", file=sys.stderr)
        raise typer.Exit(130) from None
    if json == "-":
        print(result.to_json())
        return
    print(summary(result))
    if json is not None:
        write_whole(Path(json), result.to_json() + "\n")
        print(f"Data written to {json}")
    print(
        f"Model written to {result.model}."
        + (f" Now: locater scan {result.model}" if is_scanned(plan.attention, plan.layers) else "")
    )


def _what_is_kept(plan: Plan) -> str:
    """After an interruption."""
    from locater.train.checkpoint import latest

    last = latest(Path(plan.out))
    if last is not None:
        return f"the same command goes on from {last}"
    why = " (--checkpoint 0)" if plan.checkpoint == 0 else ""
    return f"no checkpoint was written{why}, so the same command starts from the first step"


def _several(plan: Plan, over: dict[str, list[Any]], json: str | None) -> None:
    from locater.train.display import Live
    from locater.train.sweep import RESULTS, sweep

    lines = sweep(plan, over, lambda name: Live(label=f"{name}  "))
    if json is not None:
        data = jsonlib.dumps({"schema": 1, "source": plan.out, "runs": lines}, indent=2)
        print(data) if json == "-" else write_whole(Path(json), data + "\n")
    if json != "-":
        for line in lines:
            found = summary(Result.from_dict(line)) if line["status"] == "done" else line["message"]
            print(f"{line['name']}: {found}")
        print(f"Results in {Path(plan.out) / RESULTS}")
    lost = [line for line in lines if line["status"] != "done"]
    if lost:
        print(f"locater: {len(lost)} of {len(lines)} runs diverged, first {lost[0]['message']}", file=sys.stderr)
        raise typer.Exit(2)


def summary(result: Result) -> str:
    """A result in one line."""
    last = f"accuracy {result.accuracy:.4f}" if result.accuracy is not None else f"perplexity {result.perplexity:.4g}"
    entropy = "" if result.report_entropy is None else f", attention entropy {result.report_entropy:.3f}"
    if "least_loss" in result.data:
        last += f", {result.report_loss - result.data['least_loss']['report']:.4f} above its source"
    return f"report loss {result.report_loss:.4f} ({last}), select loss {result.select_loss:.4f}{entropy}"
