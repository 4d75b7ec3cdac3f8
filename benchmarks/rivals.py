"""The same work by Locater and by the tools that docs/compare-with.md names, in one run.

    make bench-rivals            # an environment of its own (benchmarks/rivals.txt), then benchmarks/results/rivals.json
    python benchmarks/rivals.py --table      # the tables of docs/compare-with.md from the kept results

Four works (benchmarks/rivals_work.py): the query-key spectrum of a checkpoint, the entropy of every head on one text,
attributions of an output to tokens, and a training step with entropies. Every tool runs in a process of its own with
one thread, tools take turns ROUNDS times, and medians count. Processor time is what the tables show: on a shared machine
it says more than the clock, which is kept too. A first run, which imports and fills caches, does not count. Memory is
the highest over what the process had after loading its model (for the first work, which loads from disk, before that).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from common import machine

HERE = Path(__file__).parent
OUT = HERE / "results" / "rivals.json"
ROUNDS = 3
PACKAGES = "torch transformers transformer-lens weightwatcher nnsight captum bertviz torch-module-monitor".split()
HEADINGS = {
    "weights": "weights, from disk to numbers",
    "entropy": "entropy of every head on one text",
    "attributions": "attributions to tokens",
    "training step": "a training step with the entropy of every head",
}


def run_tool(work: str, tool: str, folder: Path) -> dict[str, Any]:
    """One measurement in a process of its own; a tool that fails is named with its last line."""
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, str(HERE / "rivals_work.py"), work, tool, str(folder)]
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def join_runs(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds; what a tool gives and how far it is from float64 are those of the last."""
    if failed := [x for x in rounds if "failed" in x]:
        return failed[0]
    medians = {name: median(x[name] for x in rounds) for name in ("seconds", "processor_seconds", "peak_bytes")}
    return {**rounds[-1], **medians}


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def table(results: dict[str, Any]) -> str:
    """One table for each work: processor time over that of the first tool, memory, what it gives."""
    lines = []
    for work, tools in results["work"].items():
        lines += [f"| {HEADINGS[work]} | processor time | memory | gives | off by |", "|---|---|---|---|---|"]
        base = next(iter(tools.values()))["processor_seconds"]
        for tool, x in tools.items():
            if "failed" in x:
                lines.append(f"| {tool} | failed: {x['failed']} | | | |")
                continue
            ratio = f"{x['processor_seconds']:.2f} s ({x['processor_seconds'] / base:.2f} x)"
            off = "-" if x["error"] is None else f"{x['error']:.0e}" if x["error"] else "0"
            lines.append(f"| {tool} | {ratio} | {x['peak_bytes'] / 1e6:,.0f} MB | {x['numbers']} | {off} |")
        lines.append("")
    return "\n".join(lines)


def summary(kept: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    rounds = min(len(x) for tools in kept.values() for x in tools.values())
    work = {name: {tool: join_runs(x) for tool, x in tools.items()} for name, tools in kept.items()}
    return {
        "machine": machine() | {"load_at_the_end": os.getloadavg()[0]},
        "threads": 1,
        "rounds": rounds,
        "versions": versions(),
        "work": work,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the kept results")
    parser.add_argument("--work", help="only this one, and write nothing")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(OUT.read_text())))
        return
    from rivals_common import write_checkpoint
    from rivals_work import WORK

    kept: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder)
        for _ in range(args.rounds):
            for work in [args.work] if args.work else WORK:
                for tool in WORK[work]:
                    measured = run_tool(work, tool, folder)
                    print(f"{work} | {tool} | {json.dumps(measured)}", file=sys.stderr, flush=True)
                    kept.setdefault(work, {}).setdefault(tool, []).append(measured)
            results = summary(kept)
            if not args.work:
                OUT.write_text(json.dumps(results, indent=1) + "\n")  # after every round: a run may be cut off
    print(table(results))


if __name__ == "__main__":
    main()
