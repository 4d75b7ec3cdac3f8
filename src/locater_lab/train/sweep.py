"""Several runs of one plan. Each finished run is a line in results.jsonl, so that an interrupted sweep loses no
finished run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

from locater.errors import LocaterError
from locater.runs.run_log import SWEEP
from locater_lab.train.loop import DivergedError, OnProgress, check_plan, run
from locater_lab.train.plan import Plan
from locater_lab.train.run_folder import PACE

RESULTS = SWEEP
LONGEST = 200  # bytes of a folder's name; file systems take 255, and temporary files need a few more


def sweep(
    plan: Plan,
    over: Mapping[str, Sequence[Any]],
    on_progress: Callable[[str], OnProgress] = lambda name: lambda event: None,
) -> list[dict[str, Any]]:
    """Run every combination of the options in `over`, each in a folder of its own below `plan.out`. Runs that already
    have a line are skipped. `on_progress(name)` makes the callback of each run.

    Returns one line per run: `name`, `status` ("done" or "diverged", then with `message`), and the result of those that
    are done.
    """
    plans = list(combinations(plan, over))
    for _, each in plans:  # before the first is run
        check_plan(each)
    path = Path(plan.out) / RESULTS
    for name, each in plans:
        if _line_of(each, read_results(path)) is None:
            append_line(path, _run(name, each, on_progress(name)))
    lines = read_results(path)
    return [line for _, each in plans if (line := _line_of(each, lines)) is not None]


def combinations(plan: Plan, over: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Plan]]:
    """Names and plans, the last option changing fastest. Refuses values that the plan does not take, and two runs of
    one name.
    """
    names: set[str] = set()
    for values in product(*over.values()):
        options = dict(zip(over, values, strict=True))
        name = ",".join(f"{option}={_folder_text(value)}" for option, value in options.items())
        if name in names or len(name.encode()) > LONGEST:
            why = "is the folder of two runs" if name in names else "is too long a name for a folder"
            raise LocaterError(
                f"--sweep: {name!r} {why}: give values that differ in letters or digits, or each its own --out"
            )
        names.add(name)
        try:
            yield name, replace(plan, **options, out=str(Path(plan.out) / name))
        except LocaterError as error:
            raise LocaterError(f"--sweep {name}: {error}") from None


def parse_sweep(texts: Sequence[str], seeds: int | None, first: int = 0) -> dict[str, list[Any]]:
    """Values by option, from the command line: `rate=1e-3,3e-3`, and a number of seeds from the first one on.

    >>> parse_sweep(["rate=1e-3,3e-3", "control=none,locater(target=1, hold=0.1)"], 2)
    {'rate': [0.001, 0.003], 'control': [(), ('locater(target=1, hold=0.1)',)], 'seed': [0, 1]}
    """
    hints = get_type_hints(Plan)
    known = [item.name for item in fields(Plan) if item.name not in PACE]
    over: dict[str, list[Any]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or name not in known:
            raise LocaterError(f"--sweep {text!r}: write it as option=value,value with an option of {', '.join(known)}")
        if name in over:
            raise LocaterError(f"--sweep {name} is given twice: write all its values in one, {name}=A,B")
        over[name] = [_parse_value(name, part, hints[name]) for part in _split_outside_brackets(values)]
        if len(set(over[name])) < len(over[name]) or not over[name]:
            raise LocaterError(f"--sweep {text!r}: give each value once")
    if seeds is not None:
        if "seed" in over:
            raise LocaterError("--seeds and --sweep seed=... exclude each other: give one")
        over["seed"] = list(range(first, first + seeds))
    return over


def read_results(path: Path) -> list[dict[str, Any]]:
    """Lines of finished runs."""
    return [line for line in read_lines(path) if isinstance(line.get("plan"), dict)]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines that `append_line` wrote; none where there is no file. An incomplete line is skipped."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line and flush it to the disk. After an incomplete line it starts on a new one."""
    try:
        incomplete = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        with path.open("ab") as file:
            file.write((b"\n" if incomplete else b"") + json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise LocaterError(
            f"{path}: cannot be written ({error.strerror}); the same command goes on from here"
        ) from None


def _run(name: str, plan: Plan, on_progress: OnProgress) -> dict[str, Any]:
    try:
        return {"name": name, "status": "done", **run(plan, on_progress).to_dict()}
    except DivergedError as error:  # a result about these settings, no reason to stop
        return {"name": name, "status": "diverged", "message": str(error), "plan": plan.to_dict()}


def _line_of(plan: Plan, lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    wanted = _identity(plan.to_dict())
    return next((line for line in lines if _identity(line["plan"]) == wanted), None)


def _identity(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in PACE}


def _split_outside_brackets(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _parse_value(name: str, text: str, hint: Any) -> Any:
    if hint == tuple[str, ...]:
        return () if text in ("none", "") else (text,)
    if text == "none" and type(None) in getattr(hint, "__args__", ()):
        return None
    kinds: dict[type, Callable[[str], Any]] = {
        bool: lambda x: {"true": True, "false": False}[x],
        int: int,
        float: float,
        str: str,
    }
    for kind, read in kinds.items():
        if hint is kind or kind in getattr(hint, "__args__", ()):
            try:
                return read(text)
            except (ValueError, KeyError):
                break
    raise LocaterError(f"--sweep {name}: {text!r} is not a valid value")


def _folder_text(value: Any) -> str:
    """A value as part of a folder's name."""
    text = "+".join(value) or "none" if isinstance(value, tuple) else str(value)
    return "".join(sign if sign.isalnum() or sign in "._+-=()" else "_" for sign in text)
