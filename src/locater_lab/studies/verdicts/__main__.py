"""`make verdicts`: plant every fault, ask every command, write the lines and the page."""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from locater_lab.studies.verdicts import bench
from locater_lab.studies.verdicts.models import TINY, Model, trained_models
from locater_lab.studies.verdicts.page import goal, of_text, page

ROOT = Path()  # of the repository, where make runs
LINES, PAGE = ROOT / "docs" / "results" / "verdicts.jsonl", ROOT / "docs" / "verdicts.md"
WHY: dict[str, str] = {}  # of faults that do harm and are missed: why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, help="the folder of the real models; without it the demo alone")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--fault", default="", help="faults whose set, group or name has this in it: unseen 2")
    parser.add_argument(
        "--calls",
        default=",".join(bench.CALLS),
        help="commands that are asked, with commas between; none: losses alone",
    )
    parser.add_argument("--no-tiny", action="store_true", help="leave the tiny models out")
    parser.add_argument("--jobs", type=int, default=2, help="how many models at a time")
    parser.add_argument("--page", action="store_true", help="only make the page from the lines")
    parser.add_argument(
        "--lines", type=Path, default=LINES, help="the file of lines; the page is made from the usual one"
    )
    args = parser.parse_args()
    if not args.page:
        args.lines.parent.mkdir(parents=True, exist_ok=True)
        # the largest first, each in a process of its own; threads inside would only fight over the cores
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            work = partial(
                bench.run_all, path=args.lines, only=args.fault, calls=tuple(filter(None, args.calls.split(",")))
            )
            for line in pool.map(work, _jobs(args)):
                print(line, flush=True)
    lines = bench.compact(args.lines)
    if args.lines == LINES:
        PAGE.write_text(page(lines, WHY))
    if told := of_text(lines):
        print(f"doctor --text, by the change of the loss:\n{told}")
    found = goal(lines)
    print(f"{len(lines)} lines: {args.lines}")
    print(f"doctor on models that judge: found {found['harmful'].found_text()}, named {found['harmful'].right_text()}, false alarms {found['alarms'].found} of {found['alarms'].of}")  # fmt: skip


def _jobs(args: argparse.Namespace) -> list[Model | str]:
    """Models, and types of which a tiny one is written."""
    trained = [model for model in reversed(trained_models(args.models)) if args.only in model.name]
    tiny = [] if args.models is None or args.no_tiny else [kind for kind in TINY if args.only in f"tiny {kind}"]
    return [*trained, *tiny]


if __name__ == "__main__":
    main()
