"""Makes the base runs and branches of the rescue trial, several at a time; each that ends is a line of JSON.

    python -m locater_lab.studies.rescue.queue --text articles.txt.xz --states FOLDER --out FOLDER --jobs 14 --minutes 9
    python -m locater_lab.studies.rescue.queue --write-stamp stamp.json     for --stamp, on a machine without git

What is cut off goes on where it stopped with the same command: states stay in --states, and one that was lost is made
again by its base run. `--toy` is the same at toy size, on a CPU in minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from locater.errors import first_line
from locater.files import write_whole
from locater_lab.engine.provenance import SOURCES, code_of_tree
from locater_lab.studies.early_warning import training
from locater_lab.studies.pretraining.queue import commit_of_tree
from locater_lab.studies.rescue.base_runs import TOY, Size, planned_runs, state_file, train_base
from locater_lab.studies.rescue.branches import ARMS, train_branch
from locater_lab.train.sweep import append_line, read_lines

BASE, BRANCHES = "rescue-runs.jsonl", "rescue-branches.jsonl"
Work = Callable[[], dict[str, Any]]


def chosen_states(lines: Sequence[Mapping[str, Any]], size: Size) -> list[str]:
    """Names of the runs whose states are branched, by the rule of the plan, in the order in which they are."""
    runs = {line["name"]: line["run"] for line in lines}
    of = {sort: sorted(line["name"] for line in lines if line["state"] == sort) for sort in ("alarmed", "quiet")}
    kinds = {runs[name]["kind"] for name in of["alarmed"]}
    rungs = {(runs[name]["kind"], runs[name]["rate"]) for name in of["alarmed"]}
    names: list[str] = []
    for sort, of_sort in of.items():
        random.Random(0).shuffle(of_sort)
        if sort == "quiet":  # of the kinds of alarmed runs; those of their rates first
            of_sort = [name for name in of_sort if runs[name]["kind"] in kinds]
            of_sort.sort(key=lambda name: (runs[name]["kind"], runs[name]["rate"]) not in rungs)
        counts: Counter[str] = Counter()
        taken = []
        for name in of_sort:
            counts[runs[name]["kind"]] += 1
            taken += [name] if counts[runs[name]["kind"]] <= size.of_kind else []
        names += taken[: size.states]
    random.Random(1).shuffle(names)  # so that what is cut off is a random part of both
    return names


@dataclass
class Queue:
    """Work for several processes, until a time after which none begins."""

    jobs: int
    until: float
    log: Callable[[str], None]
    broken: list[str] = field(default_factory=list)

    def __enter__(self) -> Queue:
        self._pool = self._new_pool()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn"), _prepare)

    def drain(self, work: Iterable[tuple[str, Work]], take: Callable[[dict[str, Any]], None]) -> None:
        """Give `take` what each piece of work returns, as it ends. One that breaks is named and stops no other; those
        that a broken process took with it are tried a second time.
        """
        left = [(name, each, 1) for name, each in reversed(list(work))]
        waiting: dict[Future[dict[str, Any]], tuple[str, Work, int]] = {}
        while left or waiting:
            while left and len(waiting) < self.jobs and time.monotonic() < self.until:
                entry = left.pop()
                waiting[self._pool.submit(entry[1])] = entry
            if not waiting:
                return
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                name, each, tries = waiting.pop(done)
                try:
                    take(done.result())
                except BrokenProcessPool as error:
                    under_way = [(name, each, tries), *waiting.values()]
                    waiting.clear()
                    self._note(f"{', '.join(entry[0] for entry in under_way)}: {first_line(error)}")
                    left += [(name, each, tries - 1) for name, each, tries in under_way if tries]
                    self._pool.shutdown(wait=False, cancel_futures=True)
                    self._pool = self._new_pool()
                    break
                except Exception as error:  # of any kind: memory, a device
                    self._note(f"{name}: {type(error).__name__}: {first_line(error)}")

    def _note(self, text: str) -> None:
        self.broken.append(text)
        self.log(text)


def _prepare() -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    import logging

    logging.getLogger("locater").setLevel(logging.ERROR)


def run_trial(out: Path, tokens: Path, states: Path, size: Size, queue: Queue, facts: Mapping[str, Any]) -> None:
    """Make the base runs, and then the branches, that have no line yet."""
    where: dict[str, Any] = dict(
        tokens=tokens, states=states, device="cuda" if torch.cuda.is_available() else "cpu", size=size
    )
    runs = {run.name: run for run in planned_runs(size)}
    pieces = {name: partial(_quietly, train_base, run, **where) for name, run in runs.items()}
    known = {line["name"]: line["state"] for line in read_lines(out / BASE)}

    def keep_base(line: dict[str, Any]) -> None:
        if line["name"] not in known:  # else its state had been lost
            known[line["name"]] = line["state"]
            append_line(out / BASE, {**line, **facts})
        ran = f"{len(line['losses'])} steps, {line['seconds']} s"
        queue.log(f"{len(known)} of {len(runs)} {line['name']}: {line['state'] or 'no state'}, {ran}")

    queue.drain(((name, pieces[name]) for name in runs if name not in known), keep_base)
    if any(name not in known for name in runs):
        return
    names = chosen_states([line for line in read_lines(out / BASE) if line["name"] in runs], size)
    done = {(line["name"], line["arm"]) for line in read_lines(out / BRANCHES)}
    wanted = [(name, arm) for name in names for arm in ARMS if (name, arm) not in done]
    lost = [name for name in dict.fromkeys(name for name, _ in wanted) if not state_file(states, name).is_file()]
    queue.drain(((name, pieces[name]) for name in lost), keep_base)

    def keep_branch(line: dict[str, Any]) -> None:
        done.add((line["name"], line["arm"]))
        append_line(out / BRANCHES, {**line, **facts})
        ran = "does not apply" if line["losses"] is None else f"loss {line['losses'][-1]}, {line['seconds']} s"
        queue.log(f"{len(done)} of {len(names) * len(ARMS)} {line['name']}, {line['sort']}, {line['arm']}: {ran}")

    branches = (
        (f"{name}, {arm}", partial(_quietly, train_branch, runs[name], arm, **where))
        for name, arm in wanted
        if state_file(states, name).is_file()
    )
    queue.drain(branches, keep_branch)


def _quietly(work: Callable[..., dict[str, Any]], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Without what a monitor says on the console at the end of each run."""
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()):
        return work(*arguments, **options)


def summary(out: Path, size: Size) -> str:
    """How far the trial is."""
    base, branches = list(read_lines(out / BASE)), list(read_lines(out / BRANCHES))
    names = chosen_states(base, size)
    planned = len(planned_runs(size))
    lines = [
        f"base runs: {len(base)} of {planned}, {sum(line['seconds'] for line in base):.0f} s of processes",
        f"states: {dict(Counter(line['state'] or 'none' for line in base))}",
        f"chosen: {dict(Counter(line['state'] for line in base if line['name'] in names))}",
        f"branches: {len(branches)} of {len(names) * len(ARMS)}, {sum(x.get('seconds', 0) for x in branches):.0f} s of processes",
        f"by arm: {dict(Counter(line['arm'] for line in branches))}",
    ]
    whole = len(base) >= planned and len(branches) >= len(names) * len(ARMS)
    return "\n".join([*lines, "the trial is complete" if whole else "more is to be made: give the same command again"])


def texts(path: Path | None, folder: Path) -> Iterator[str]:
    """Write the tokens that the kinds read. Without a text, a toy: bytes of Python's documentation for all."""
    if path is not None:
        yield from training.read_texts(path, folder).values()
        return
    from locater.inputs.corpus import embedded_text

    ids = np.frombuffer(embedded_text().encode(), np.uint8)
    for name in ("wiki", "docs", "words"):
        np.save(folder / f"{name}.npy", ids)
        yield name


def facts_of(stamp: Path | None, checked: bool, read: Sequence[str]) -> dict[str, Any]:
    """What a line says of where it was made. A toy does not need a commit."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    commit = commit_of_tree(stamp) if checked else None
    return {
        "device": device,
        "torch": torch.__version__,
        "commit": commit,
        "code": code_of_tree(SOURCES),
        "texts": list(read),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="articles.txt.xz")
    parser.add_argument("--states", type=Path, help="a folder for states, several GB; they are needed for the branches")
    parser.add_argument("--out", type=Path, help="a folder that the lines are written to")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which nothing begins")
    parser.add_argument("--seeds", type=int, help="of every rate; 2 where the time is short")
    parser.add_argument("--most", type=int, help="states of each sort; 40 where the time is short")
    parser.add_argument("--stamp", type=Path, help="of the sources, on a machine without git")
    parser.add_argument("--write-stamp", type=Path, help="write the stamp of a tree without changes, and nothing else")
    parser.add_argument("--toy", action="store_true", help="two kinds, 40 steps, two rates")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    if given.write_stamp is not None:
        stamp = {"commit": commit_of_tree(), "code": code_of_tree(SOURCES)}
        write_whole(given.write_stamp, json.dumps(stamp) + "\n")
        print(f"{given.write_stamp}: commit {stamp['commit']}, code {stamp['code']}")
        return 0
    if given.out is None or (not given.toy and (given.text is None or given.states is None)):
        parser.error("give --out with --text and --states, or with --toy")
    size = TOY if given.toy else Size()
    size = replace(size, seeds=given.seeds or size.seeds, states=given.most or size.states)

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        facts = facts_of(given.stamp, not given.toy, list(texts(given.text, Path(folder))))
        log(f"commit {facts['commit']}, {facts['device']}, torch {facts['torch']}: texts are ready")
        states = given.states or Path(folder)
        for path in (states, given.out):
            path.mkdir(parents=True, exist_ok=True)
        with Queue(given.jobs, began + 60 * given.minutes, log) as queue:
            run_trial(given.out, Path(folder), states, size, queue, facts)
    log("at the end:\n" + summary(given.out, size))
    print(f"{len(queue.broken)} broke" + "".join(f"\n{text}" for text in queue.broken))
    return 1 if queue.broken else 0


if __name__ == "__main__":  # by its own name, under which processes of a pool know it
    from locater_lab.studies.rescue import queue as this

    raise SystemExit(this.main())
