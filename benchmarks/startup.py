"""Seconds from the start of a process until a command has answered.

    python benchmarks/startup.py            # writes benchmarks/results/startup.json

    help, version       `locater --help`, `locater --version`: they import no torch
    torch               `python -c "import torch"`, the floor of every command that computes
    scan                `locater scan` of the demo's checkpoint
    train               `locater train`, one step of a tiny model on generated data, weights and result written

Commands take turns, ROUNDS times; the median counts, and the least processor time beside it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import command_line, in_turns, machine, median_run, place, write

ROOT = Path(__file__).parents[1]
ROUNDS = 5
TINY = "--task sort --vocabulary 16 --layers 1 --width 16 --heads 2 --length 8 --batch 2 --steps 1 --device cpu".split()


def commands(folder: str) -> dict[str, list[str]]:
    """Words after the name of the interpreter."""
    program = ["-m", "locater"]
    return {
        "help": [*program, "--help"],
        "version": [*program, "--version"],
        "torch": ["-c", "import torch"],
        "scan": [*program, "scan", str(ROOT / "src" / "locater" / "demo")],
        "train": [*program, "train", *TINY, "--out", folder],
    }


def time_command(words: list[str]) -> dict[str, Any]:
    """Seconds and processor seconds of one process. A folder at the end is a new one for each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if words[-2] == "--out":
        words = [*words[:-1], tempfile.mkdtemp(dir=words[-1])]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} did not run: {done.stderr.strip().splitlines()[-1]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor_seconds": used}


def main() -> None:
    args = command_line(__doc__, "startup").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contenders = {name: partial(time_command, words) for name, words in commands(folder).items()}
        runs = in_turns(contenders, 1 if args.quick else ROUNDS)
    results: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[1]}
    results |= {name: median_run(of_name, "seconds", "processor_seconds") for name, of_name in runs.items()}
    lines = [
        f"{name}: {results[name]['seconds']:.2f} s, at least {min(run['processor_seconds'] for run in of_name):.2f} s "
        "of processor time"
        for name, of_name in runs.items()
    ]
    write(json.loads(json.dumps(results)), place(args), "\n".join(lines))


if __name__ == "__main__":
    main()
