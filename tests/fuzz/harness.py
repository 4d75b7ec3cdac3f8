"""Tries mutated files one by one and says what came of each: refused, read and equal to the reference, read without a
reference to compare with, or a fault.

A good file, one that is not mutated, has to be read with every name of the reference.

A fault is an exception other than LocaterError, a number that the reference library refuses or reads differently, more
than LIMIT_S seconds, or more than a gigabyte. `attempt` works in this process; `supervised` in a worker that may hang
or die.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from locater import LocaterError
from tests.fuzz.formats import FORMATS, Format, NoReferenceError
from tests.fuzz.planted import PLANTED

GOOD = -1  # the seed of no mutation
LIMIT_S = 20.0
LIMIT_KB = 1_000_000  # on top of what the process had before


@dataclass(frozen=True)
class Outcome:
    seed: int
    kind: str  # refused, read (and equal to the reference), unchecked (read, and there is no reference), fault
    detail: str = ""


def attempt(form: Format, originals: Path, work: Path, seed: int) -> Outcome:
    """One mutated file, or the good one for the seed GOOD. It is left in `work` for a fault to be kept."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(originals, work)
    if seed != GOOD:
        form.mutate(Random(seed), work)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read = form.read(work)
    except LocaterError as error:
        outcome = (
            Outcome(seed, "refused")
            if len(str(error).splitlines()) == 1
            else Outcome(seed, "fault", f"not one line: {error!r}")
        )
        outcome = Outcome(seed, "fault", f"a good file is refused: {error}") if seed == GOOD else outcome
    except BaseException:
        outcome = Outcome(seed, "fault", traceback.format_exc())
    else:
        outcome = Outcome(seed, *_judge(form, work, read, seed == GOOD))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Outcome(seed, "fault", f"memory: {grown:,} kB") if grown > LIMIT_KB and outcome.kind != "fault" else outcome


def _judge(form: Format, work: Path, read: Any, whole: bool) -> tuple[str, str]:
    if form.reference is None:
        return "unchecked", ""
    try:
        expected = form.reference(work)
    except NoReferenceError as error:
        return ("fault", f"no reference for a good file: {error}") if whole else ("unchecked", "")
    except BaseException as error:
        return "fault", f"read where the reference library refuses: {error!r}"
    if whole and read != expected and _agree(read, expected):
        return "fault", f"names of the reference are missing: {_difference(expected, read)}"
    return (
        ("read", "")
        if _agree(read, expected)
        else ("fault", f"other than the reference: {_difference(read, expected)}")
    )


def _agree(read: Any, expected: Any) -> bool:
    """Equal where both have a tensor; names that only the reference has are tensors that are refused one by one."""
    if isinstance(read, tuple):
        return read[0] == expected[0] and _agree(read[1], expected[1])
    return all(name in expected and expected[name] == value for name, value in read.items())


def _difference(read: Any, expected: Any) -> str:
    pairs = zip(read, expected, strict=True) if isinstance(read, tuple) else [(read, expected)]
    return ", ".join(name for ours, theirs in pairs for name in ours if ours[name] != theirs.get(name))[:500]


def keep(kept: Path | None, work: Path, outcome: Outcome) -> None:
    """A fault's files and what went wrong, in a folder of their own."""
    if kept is None or outcome.kind != "fault":
        return
    target = kept / f"{kept.name}-{outcome.seed}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(work, target)
    (target / "fault.txt").write_text(outcome.detail)


def _work(conn: Any, name: str, originals: Path, work: Path, seeds: Iterable[int], kept: Path | None) -> None:
    warnings.simplefilter("ignore")  # what reference libraries say of broken files would bury the counts
    form = {**FORMATS, "planted": PLANTED}[name]
    attempt(form, originals, work, GOOD)  # imports what is needed, which is no part of a file's time
    conn.send(None)
    for seed in seeds:
        outcome = attempt(form, originals, work, seed)
        keep(kept, work, outcome)
        conn.send(outcome)


def supervised(
    name: str, originals: Path, work: Path, seeds: Sequence[int], kept: Path | None = None, limit_s: float = LIMIT_S
) -> Iterator[Outcome]:
    """The outcome of each seed from a worker process, which is replaced where it hangs or dies. Faults are kept in a
    folder.
    """
    context = multiprocessing.get_context("spawn")
    while seeds:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(theirs, name, originals, work, seeds, kept), daemon=True)
        worker.start()
        theirs.close()
        try:
            ours.recv()
            for seed in seeds:
                outcome, lost = _next(ours, worker, seed, limit_s)
                seeds = seeds[1:]
                if lost:
                    keep(kept, work, outcome)
                yield outcome
                if lost:
                    break
        finally:
            worker.kill()
            worker.join()
            ours.close()


def _next(conn: Any, worker: Any, seed: int, patience: float) -> tuple[Outcome, bool]:
    """What the worker says of a seed, and whether the worker is lost. Where others have the cores, it may take longer."""
    others = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
    patience *= max(1.0, others)
    try:
        if conn.poll(patience):
            return conn.recv(), False
        worker.kill()
        worker.join()
        return Outcome(seed, "fault", f"no answer within {patience:.0f} s"), True
    except EOFError:
        worker.join()
        return Outcome(seed, "fault", f"the process died (exit code {worker.exitcode})"), True


def summary(outcomes: Iterable[Outcome]) -> str:
    kinds = Counter(outcome.kind for outcome in outcomes)
    return (
        f"{kinds.total():6} tried, {kinds['refused']:6} refused, {kinds['read']:6} read and equal, "
        f"{kinds['unchecked']:6} read, no reference, {kinds['fault']:3} faults"
    )
