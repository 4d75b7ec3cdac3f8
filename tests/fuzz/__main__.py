"""`python -m tests.fuzz`: mutated files of every format, none of which may give a traceback, a hang, a gigabyte or a
wrong number.

    make fuzz                                            # 20,000 files, at most ten minutes
    python -m tests.fuzz --format gguf --seed 17         # one file once more, with its traceback

Faults are kept in fuzz-faults/ (the files and what went wrong), one folder each, named by format and seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.formats import FORMATS
from tests.fuzz.harness import GOOD, Outcome, attempt, summary, supervised

FAULTS = Path("fuzz-faults")


def run(name: str, seeds: range, folder: Path, deadline: float) -> list[Outcome]:
    """All seeds of one format until the deadline; faults are kept."""
    kept = FAULTS / name.replace(" ", "-")
    outcomes = []
    for outcome in supervised(name, folder / name / "originals", folder / name / "work", [GOOD, *seeds], kept):
        outcomes.append(outcome)
        if outcome.kind == "fault":
            print(
                f"{name}: seed {outcome.seed}: {outcome.detail.strip().splitlines()[-1]:.200} (kept in {kept})",
                flush=True,
            )
        if time.monotonic() > deadline:
            break
    print(f"{name:15} {summary(outcomes)}", flush=True)
    return outcomes


def made(names: list[str], folder: Path) -> None:
    """The good files of each format."""
    for name in names:
        originals = folder / name / "originals"
        originals.mkdir(parents=True)
        FORMATS[name].make(originals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000, help="how many to try in all")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--format", choices=list(FORMATS), help="this one alone")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one file of --format once more, with its traceback")
    args = parser.parse_args()
    chosen = [args.format] if args.format else list(FORMATS)
    with tempfile.TemporaryDirectory(prefix="fuzz", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        made(chosen, folder)
        if args.format and args.seed is not None:
            print(
                attempt(FORMATS[args.format], folder / args.format / "originals", FAULTS / "repeated", args.seed).detail
                or "no fault"
            )
            return
        total, deadline = sum(FORMATS[name].share for name in chosen), time.monotonic() + 60 * args.minutes
        with ThreadPoolExecutor(args.jobs) as pool:
            counts = {name: args.files * FORMATS[name].share // total for name in chosen}
            jobs = [
                pool.submit(run, name, range(args.first, args.first + count), folder, deadline)
                for name, count in counts.items()
            ]
            outcomes = [outcome for job in jobs for outcome in job.result()]
    print(f"{'in all':15} {summary(outcomes)}")
    sys.exit(any(outcome.kind == "fault" for outcome in outcomes))


if __name__ == "__main__":
    main()
