"""Training runs of a paper's claims on a machine that is lent for a while: no command line of Locater and no git is needed.

    python -m locater_lab.engine.provenance                                    # here: a stamp beside src, for lines to name the commit
    python -m locater_lab.papers.queue bao2024 o --runs FILE --data FOLDER --jobs 8 --minutes 9
    python -m locater_lab.papers.queue bao2024 o --runs FILE                   # what is missing

A line is written as a run ends. After so many minutes no run begins, what is under way ends, and the same command goes
on where it stopped. Code that is not of a commit makes no line.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from locater.errors import LocaterError
from locater_lab.engine.provenance import CHANGED, SOURCES, commit_of
from locater_lab.engine.reproduction import studies_of
from locater_lab.engine.runs import Row, Runs, expected_rows, train_missing


def main(arguments: Sequence[str] | None = None) -> int:
    from locater_lab.papers import paper

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper")
    parser.add_argument("claim", help="a claim, or the letter of several")
    parser.add_argument("--runs", type=Path, required=True, help="lines that there are; new ones are added")
    parser.add_argument(
        "--data", type=Path, help="what is trained on; without it the runs that are missing are counted"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no run begins")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    studies = [study for study in studies_of(paper(given.paper), given.claim) if study.rows is not None]

    def rows(runs: Runs) -> list[Row]:
        return [row for study in studies if study.rows is not None for row in study.rows(runs)]

    runs = Runs(given.runs)
    if given.data is not None:
        commit = commit_of(SOURCES)
        if commit is None or commit.endswith(CHANGED):
            raise LocaterError(
                f"{SOURCES}: no commit has this code: commit it, and write its stamp where there is no git"
            )
        told = began
        print(f"commit {commit}, {len(expected_rows(rows, runs.lines))} runs in all", flush=True)

        def log(text: str) -> None:
            print(f"{time.monotonic() - told:.0f} s  {text}", flush=True)

        train_missing(rows, runs, given.data, given.jobs, log, began + 60 * given.minutes)
    left = [row for row in expected_rows(rows, runs.lines) if row.key not in runs.lines]
    print(
        f"{len(left)} runs are missing: {', '.join(f'{row.arm} seed {row.plan.seed}' for row in left[:8])}"
        if left
        else "all runs are there"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
