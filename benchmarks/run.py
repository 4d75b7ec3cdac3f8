"""All benchmarks of a device, one after the other, and one table beside the last results.

    python benchmarks/run.py                        # those for the CPU (make bench)
    python benchmarks/run.py --device gpu           # those for a GPU (make bench DEVICE=gpu)
    python benchmarks/run.py --only checkpoint      # some of them
    python benchmarks/run.py --quick                # fewer rounds: do they all run?
    python benchmarks/run.py --keep                 # replace the results in benchmarks/results by the new ones
    python benchmarks/run.py --page                 # run nothing: make docs/performance.md from the results

Each benchmark runs in a process of its own. One that fails is named at the end, and its lines keep their last figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS
from lines import LINES, Device, Line

HERE = Path(__file__).parent
HEADER = ("what", "against", "aim", "last", "now", "change")


@dataclass(frozen=True)
class Benchmark:
    """A script, the devices that it has parts for, and its options for a quick run."""

    name: str
    devices: tuple[Device, ...] = ("cpu",)
    quick: tuple[str, ...] = ("--quick",)
    flag: str = "--gpu"  # for the part for a GPU
    file: str | None = None  # of its results, where it has another name

    def results(self, device: Device) -> str:
        """The file of its results, without .json."""
        if self.file is not None:
            return self.file
        return self.name if len(self.devices) == 1 else f"{self.name}-{device}"

    def command(self, device: Device, out: Path, quick: bool) -> list[str]:
        switch = [self.flag] if device == "gpu" and self.flag else []
        return [
            sys.executable,
            str(HERE / f"{self.name}.py"),
            *switch,
            *(self.quick if quick else ()),
            "--out",
            str(out),
        ]


BOTH: tuple[Device, ...] = ("cpu", "gpu")
BENCHMARKS = (
    Benchmark("checkpoint"),
    Benchmark("live", BOTH),
    Benchmark("doctor"),
    Benchmark("large"),
    Benchmark("remote"),
    Benchmark("discovery"),
    Benchmark("fleet"),
    Benchmark("startup"),
    Benchmark("training", BOTH),
    Benchmark("pages"),
    Benchmark("relevance"),
    Benchmark("explain", BOTH),
    Benchmark("ablate", BOTH),
    Benchmark("penalty", BOTH),
    Benchmark("controls", BOTH),
    Benchmark("observe", BOTH),
    Benchmark("generation", BOTH),
    Benchmark("mechanisms", BOTH, ()),
    Benchmark("attention", ("gpu",), ("--lengths", "8192"), flag=""),
    Benchmark("binary_products", ("gpu",), (), flag="", file="binary"),
)


def read(folder: Path) -> dict[str, Any]:
    """Results by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def table(lines: Iterable[Line], last: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table: figures of before and of now, and how much they differ."""
    rows = []
    for line in lines:
        old, new = (line.value(results.get(line.results)) for results in (last, now))
        change = "-" if not old or new is None else f"{100 * (new / old - 1):+.0f} %"
        rows.append((line.what, line.against, line.aim_words(), line.words(old), line.words(new), change))
    return rows


def align_columns(rows: list[tuple[str, ...]]) -> str:
    """A table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def run(device: Device, only: list[str], quick: bool, folder: Path) -> list[str]:
    """Run benchmarks into a folder; those that failed, with their last line."""
    failed = []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    for benchmark in BENCHMARKS:
        if device not in benchmark.devices or (only and benchmark.name not in only):
            continue
        began = time.perf_counter()
        command = benchmark.command(device, folder / f"{benchmark.results(device)}.json", quick)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        end = "done" if done.returncode == 0 else "failed"
        print(f"{benchmark.name}: {end} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            failed.append(f"{benchmark.name}: {said[-1] if said else f'status {done.returncode}'}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", nargs="+", default=[], choices=[x.name for x in BENCHMARKS], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; the figures are not kept")
    parser.add_argument("--keep", action="store_true", help="write the new results to benchmarks/results")
    parser.add_argument(
        "--page", action="store_true", help="make docs/performance.md from the results, and run nothing"
    )
    args = parser.parse_args()
    if args.page:
        from performance_page import write_page

        print("\n".join(str(path) for path in write_page(read(RESULTS))))
        return
    if args.quick and args.keep:
        parser.error("--quick and --keep exclude each other: figures of a quick run say little")
    last = read(RESULTS)
    with tempfile.TemporaryDirectory() as folder:
        failed = run(args.device, args.only, args.quick, Path(folder))
        now = read(Path(folder))
        print(align_columns([HEADER, *table([x for x in LINES[args.device] if x.results in now], last, now)]))
        if args.keep:
            for path in sorted(Path(folder).glob("*.json")):
                shutil.copy(path, RESULTS / path.name)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
