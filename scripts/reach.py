"""Build a tiny model of every model type that transformers knows, and write down what Locater makes of it.

`make reach`, or `python scripts/reach.py [--only llama,gemma] [--sample 100] [--jobs 2] [--again] [--page]`.

One JSON line for each type goes to docs/results/reach.jsonl. Types whose line was made with the same version of the code
are left out, so that an interrupted run goes on. docs/families.md is made from the lines at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
LINES = ROOT / "docs" / "results" / "reach.jsonl"
ROOMS = ("calls", "layers", "families", "discovery", "observing")  # whose code finds, verifies and observes attention
DIGITS = 12  # of the version of the code that a line names
SECONDS = 60  # of processor time, for one model type
PATIENCE = 240  # seconds by the clock, for one model type: other work may have the cores
MEMORY = 8 << 30  # bytes of address space, for one model type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", help="model types, with commas between")
    parser.add_argument("--sample", type=int, help="that many types, evenly spaced")
    parser.add_argument("--jobs", type=int, default=2, help="how many types at a time")
    parser.add_argument("--again", action="store_true", help="measure also what is in the file")
    parser.add_argument("--page", action="store_true", help="only make docs/families.md from the file")
    parser.add_argument("--lines", type=Path, default=LINES, help="the file of JSON lines")
    args = parser.parse_args()
    if not args.page:
        measure_types(args)
    if args.lines == LINES:
        import families

        families.write()
    warn_of_other_code(read(args.lines))


def measure_types(args: argparse.Namespace) -> None:
    """Measure the chosen types, `--jobs` at a time, and write each line as it comes."""
    import torch
    import transformers
    from tests.reach.row import row
    from tests.reach.tiny import model_types

    from locater.version import code_version

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    types = choose_types(model_types(), args.only, args.sample)
    code = code_version(*ROOMS)[:DIGITS]
    known = {} if args.again else {name: line for name, line in read(args.lines).items() if line.get("code") == code}
    left = [model_type for model_type in types if model_type not in known]
    started = time.perf_counter()
    for done, line in enumerate(rows_as_ready(left, row, args.jobs), 1):
        line.update(code=code, transformers=transformers.__version__, types=len(model_types()))
        with args.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"\r{done}/{len(left)} {line['model_type']:40.40}", end="", file=sys.stderr)
    keep_last(args.lines)
    print(f"\n{len(left)} model types in {time.perf_counter() - started:.0f} s", file=sys.stderr)


def warn_of_other_code(lines: dict[str, dict[str, Any]]) -> None:
    """Say how many lines were made with sources that have changed since."""
    from locater.version import code_version

    code = code_version(*ROOMS)[:DIGITS]
    others = [name for name, line in lines.items() if line.get("code") != code]
    if others:
        print(
            f"{len(others)} lines are of another version of the code: run without --page to measure them",
            file=sys.stderr,
        )


def choose_types(types: list[str], only: str | None, sample: int | None) -> list[str]:
    """The named types, or some evenly spaced, or all."""
    if only is not None:
        names = only.split(",")
        unknown = [name for name in names if name not in types]
        if unknown:
            sys.exit(f"reach: transformers has no model type {unknown[0]!r}")
        return names
    if sample is not None and sample < len(types):
        return [types[at * len(types) // sample] for at in range(sample)]
    return types


def rows_as_ready(types: list[str], work: Any, jobs: int) -> Any:
    """Rows in the order in which they are ready, each made in a process of its own with limits of time and memory."""
    waiting, running = list(types), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            model_type = waiting.pop(0)
            child, pipe = start(model_type, work)
            running[child] = (model_type, pipe)
        child, status = os.wait()
        model_type, pipe = running.pop(child)
        with os.fdopen(pipe) as file:
            text = file.read()
        yield json.loads(text) if status == 0 and text else failed_row(model_type, status)


def start(model_type: str, work: Any) -> tuple[int, int]:
    """A child that writes its row to a pipe: its number, and where to read. A row is shorter than a pipe's buffer."""
    out, into = os.pipe()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(into)
        return child, out
    signal.alarm(PATIENCE)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.write(into, json.dumps(work(model_type)).encode())
    os._exit(0)


def failed_row(model_type: str, status: int) -> dict[str, Any]:
    """The row of a type whose process did not end by itself."""
    timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU)
    why = f"not done after {SECONDS} s of processor time" if timed_out else f"its process ended with status {status}"
    return {"model_type": model_type, "built": False, "ran": False, "why": why}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by model type; of two lines the later one."""
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {line["model_type"]: line for line in lines}


def keep_last(path: Path) -> None:
    """One line for each type, sorted."""
    rows = read(path)
    path.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))


if __name__ == "__main__":
    main()
