"""`locater train`: one run of a plan, or a sweep over several.

What needs torch is imported inside functions: the list of commands loads this module.
"""

from __future__ import annotations

import inspect
import json as jsonlib
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args, get_type_hints

import typer

from locater.cli.options import JsonPath
from locater.cli.shell import Command, check_writable, examples_text
from locater.errors import LocaterError
from locater.files import write_whole
from locater.redacted_and_escaped_text import one_line, terminal_behind

if TYPE_CHECKING:
    from locater_lab.train.plan import Plan
    from locater_lab.train.run_folder import Result

HELP = (
    "Train a small transformer on text or images, with heads observed and controls attached. "
    "The same command continues a run that was interrupted."
)
EXAMPLES = (
    "locater train --steps 500 --out runs/first",
    "locater train --control 'locater(target=2)' --seeds 3 --out runs/controlled",
)


def build() -> Any:
    app = typer.Typer(add_completion=False)
    app.command("train", cls=Command, help=HELP, epilog=examples_text(*EXAMPLES))(with_plan_options(train))
    return typer.main.get_command(app)


def train(
    options: dict[str, Any], plan: str | None, seeds: int | None, sweep: list[str] | None, json: str | None
) -> None:
    """`options` are the fields of the plan that the command line names."""
    from locater.amx import avoid_broken_amx
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
    from locater_lab.train.loop import run

    progress = ProgressLine()
    try:
        result = run(plan, progress)
    except LocaterError:
        progress.clear()
        raise
    except KeyboardInterrupt:
        progress.clear()
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
    from locater_lab.train.run_folder import Result
    from locater_lab.train.sweep import RESULTS, sweep

    lines = sweep(plan, values, lambda name: ProgressLine(label=f"{name}  "))
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


# ---- The options: the fields of `Plan` in groups, and a few for several runs ----


PANELS = {  # group of the help: fields of the plan
    "Data": (
        *("task", "corpus", "select", "report", "images", "vocabulary", "words", "bos", "length"),
        *("patch", "masked", "parents", "concentration"),
    ),
    "Model": (
        *("layers", "width", "heads", "kv_heads", "hidden", "positions", "qk_norm"),
        *("attention", "convert", "convert_at", "mlp", "norm", "build", "fusion", "scale", "dropout"),
    ),
    "Optimization": (
        *("steps", "batch", "accumulate", "rate", "warmup", "schedule", "floor"),
        *("optimizer", "beta2", "decay", "decay_qk", "clip", "seed"),
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
    from locater_lab.train.plan import Plan

    def command(**values: Any) -> None:
        own = {name: values.pop(name) for name in OWN_OPTIONS}
        train({name: value for name, value in values.items() if value not in (None, [])}, **own)

    hints, by_name = get_type_hints(Plan), {item.name: item for item in fields(Plan)}
    options: dict[str, Any] = {
        name: _plan_option(by_name[name], hints[name], panel) for panel, names in PANELS.items() for name in names
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
    from locater_lab.train.plan import Plan

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


def _plan_option(item: Field[Any], hint: Any, panel: str) -> Any:
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


# ---- The progress line: rewritten in place on a terminal, plain lines on a pipe ----


class ProgressLine:
    """Shows the progress that `run` reports. On a pipe at most one line in `pause` seconds, and the last."""

    def __init__(self, stream: TextIO | None = None, label: str = "", pause: float = 5.0) -> None:
        self.stream = terminal_behind(sys.stderr if stream is None else stream)
        self.label, self.pause = label, pause
        self.terminal = self.stream.isatty()
        self.next = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        last = event["step"] == event["steps"]
        if self.terminal:
            self.stream.write(f"\r\x1b[K{one_line(self.label)}{progress_text(event)}" + ("\n" if last else ""))
        elif last or time.monotonic() >= self.next:
            self.next = time.monotonic() + self.pause
            self.stream.write(f"{one_line(self.label)}{progress_text(event)}\n")
        self.stream.flush()

    def clear(self) -> None:
        """Erase the line, so that the next output starts on an empty one."""
        if self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def progress_text(event: dict[str, Any]) -> str:
    """One line on the progress of a run.

    >>> event = {"step": 50, "steps": 1000, "loss": 2.0, "perplexity": 7.389, "select_loss": None, "entropy": 3.25}
    >>> progress_text({**event, "tokens_per_second": 81234.0, "seconds_left": 754.0})
    'step 50/1000  loss 2.000  perplexity 7.389  entropy 3.25  81,234 tokens/s  12 min 34 s left'
    """
    parts = [f"step {event['step']}/{event['steps']}", f"loss {event['loss']:.3f}"]
    if event["perplexity"] is not None:
        parts.append(f"perplexity {event['perplexity']:.4g}")
    if event["select_loss"] is not None:
        parts.append(f"select {event['select_loss']:.3f}")
    if event["entropy"] is not None:
        parts.append(f"entropy {event['entropy']:.2f}")
    parts.append(f"{event['tokens_per_second']:,.0f} tokens/s")
    if event["step"] < event["steps"]:
        parts.append(f"{duration_text(event['seconds_left'])} left")
    return "  ".join(parts)


def duration_text(seconds: float) -> str:
    """
    >>> duration_text(5.2), duration_text(754), duration_text(7300)
    ('5 s', '12 min 34 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
