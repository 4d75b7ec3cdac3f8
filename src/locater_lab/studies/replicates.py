"""Does a training run repeat? Equal plans, each in two processes: eager, compiled, and compiled with deterministic
algorithms.

    make study STUDY='replicates --data FOLDER --json docs/results/replicates.json'

FOLDER has speeches.tar.xz. The plan is the plain arm of bao2024, 1,500 steps, which takes about two minutes for all six
on a GPU. On a CPU every run repeats.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from locater.files import write_whole
from locater_lab.engine.runs import machine, train
from locater_lab.papers.bao2024.arms import PLAIN

MODES: dict[str, Any] = {
    "eager": dict(compile=False, deterministic=False),
    "compiled": dict(compile=True, deterministic=False),
    "compiled, deterministic": dict(compile=True, deterministic=True),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with speeches.tar.xz")
    parser.add_argument("--steps", type=int, default=PLAIN.base.steps)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    plan = replace(PLAIN.row(2.5e-3, 0).plan, steps=given.steps)
    plans = [replace(plan, **mode).to_dict() for mode in MODES.values() for _ in range(2)]
    with ProcessPoolExecutor(len(plans), get_context("spawn")) as pool:
        lines = list(pool.map(train, plans, [given.data] * len(plans)))
    results: dict[str, Any] = {"plan": plan.to_dict(), **machine(plan), "modes": {}}
    for number, mode in enumerate(MODES):
        losses = [line["report_loss"] for line in lines[2 * number : 2 * number + 2]]
        results["modes"][mode] = {"losses": losses, "equal": losses[0] == losses[1]}
        print(f"{mode:24} {losses[0]:.10f} {losses[1]:.10f} {'equal' if losses[0] == losses[1] else 'differ'}")
    if given.json is not None:
        write_whole(given.json, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
