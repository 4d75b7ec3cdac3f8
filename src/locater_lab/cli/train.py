"""`locater train`: one run of a plan, or a sweep over several."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from locater.cli.shell import Command, check_writable, examples_text
from locater.errors import LocaterError
from locater.files import write_whole

if TYPE_CHECKING:
    from locater_lab.train.plan import Plan
    from locater_lab.train.result import Result

HELP = (
    "Train a small transformer on text or images, with heads observed and controls attached. "
    "The same command continues a run that was interrupted."
)
EXAMPLES = (
    "locater train --steps 500 --out runs/first",
    "locater train --control 'locater(target=2)' --seeds 3 --out runs/controlled",
)


def command() -> None:
    """Only for the list of commands; `build` makes the command with its options."""


def build() -> Any:
    from locater_lab.cli.train_options import with_plan_options

    app = typer.Typer(add_completion=False)
    app.command("train", cls=Command, help=HELP, epilog=examples_text(*EXAMPLES))(with_plan_options(train))
    return typer.main.get_command(app)


def train(
    options: dict[str, Any], plan: str | None, seeds: int | None, sweep: list[str] | None, json: str | None
) -> None:
    """`options` are the fields of the plan that the command line names."""
    from locater.amx import avoid_broken_amx
    from locater_lab.cli.train_options import check_options, plan_with
    from locater_lab.train.sweep import combinations, parse_sweep

    check_writable(json, None)
    base = plan_with(plan, options)
    values = parse_sweep(sweep or [], seeds, base.seed)
    check_options(options, values, [each for _, each in combinations(base, values)], seeds is not None)
    avoid_broken_amx()
    if values:
        _train_several(base, values, json)
    else:
        _train_one(base, json)


def _train_one(plan: Plan, json: str | None) -> None:
    from locater_lab.models.family import is_scanned
    from locater_lab.train.display import Live
    from locater_lab.train.loop import run

    live = Live()
    try:
        result = run(plan, live)
    except LocaterError:
        live.clear()
        raise
    except KeyboardInterrupt:
        live.clear()
        print(f"locater: interrupted; {_how_to_continue(plan)}", file=sys.stderr)
        raise typer.Exit(130) from None
    if json == "-":
        print(result.to_json())
        return
    if json is not None:
        write_whole(Path(json), result.to_json() + "\n")
    print(summary(result))
    if json is not None:
        print(f"Data written to {json}")
    scan = f" Now: locater scan {result.model}" if is_scanned(plan.attention, plan.layers) else ""
    print(f"Model written to {result.model}.{scan}")


def _how_to_continue(plan: Plan) -> str:
    """After an interruption."""
    from locater_lab.train.checkpoint import latest

    last = latest(Path(plan.out))
    if last is not None:
        return f"the same command goes on from {last}"
    why = " (--checkpoint 0)" if plan.checkpoint == 0 else ""
    return f"no checkpoint was written{why}, so the same command starts from the first step"


def _train_several(plan: Plan, values: dict[str, list[Any]], json: str | None) -> None:
    from locater_lab.train.display import Live
    from locater_lab.train.result import Result
    from locater_lab.train.sweep import RESULTS, sweep

    lines = sweep(plan, values, lambda name: Live(label=f"{name}  "))
    if json is not None:
        data = jsonlib.dumps({"schema": 1, "source": plan.out, "runs": lines}, indent=2)
        print(data) if json == "-" else write_whole(Path(json), data + "\n")
    if json != "-":
        for line in lines:
            outcome = summary(Result.from_dict(line)) if line["status"] == "done" else line["message"]
            print(f"{line['name']}: {outcome}")
        print(f"Results in {Path(plan.out) / RESULTS}")
    diverged = [line for line in lines if line["status"] != "done"]
    if diverged:
        first = diverged[0]["message"]
        print(f"locater: {len(diverged)} of {len(lines)} runs diverged, first {first}", file=sys.stderr)
        raise typer.Exit(2)


def summary(result: Result) -> str:
    """A result in one line."""
    last = "mean squared error" if result.perplexity is None else f"perplexity {result.perplexity:.4g}"
    if result.accuracy is not None:
        last = f"accuracy {result.accuracy:.4f}"
    entropy = "" if result.report_entropy is None else f", attention entropy {result.report_entropy:.3f}"
    if "least_loss" in result.data:
        least = "Bayes" if result.plan.task == "ngram" else "its source"
        last += f", {result.report_loss - result.data['least_loss']['report']:.4f} above {least}"
    line = f"report loss {result.report_loss:.4f} ({last}), select loss {result.select_loss:.4f}{entropy}"
    if result.conversion is None:
        return line
    before, after = (result.conversion[when]["loss"] for when in ("before", "after"))
    return (
        f"{line}; --convert at step {result.conversion['step']} moved the report loss from {before:.4f} to {after:.4f}"
    )
