"""Seconds of a run on this machine: every size, eager and compiled, alone and side by side; and every arm once.

The plan's minutes are sums of these. A number is of the whole device: what a run takes while others share it, over how
many share it.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from locater.errors import first_line
from locater.files import write_whole
from locater_lab.engine.reproduction import round_numbers
from locater_lab.studies.pretraining import plan as plans
from locater_lab.studies.pretraining.plan import BASES, Bases
from locater_lab.studies.pretraining.queue import Log, prepare_process, process_context, train
from locater_lab.train.plan import Plan

_barriers: dict[int, Any] = {}  # by the number of processes that meet, in a process of a pool


def _prepare(barriers: Mapping[int, Any]) -> None:
    prepare_process()
    _barriers.update(barriers)


STEPS, MARKS, SHORT = 150, 25, 75  # of a timed run; steps between marks; of a run that only has to work
SIDE_BY_SIDE = {"10M": (1, 4, 8, 12, 2), "30M": (1, 4, 8, 2), "85M": (1, 2, 4)}
OTHERS = (("10M", plans.NONE, "none"), ("10M", "mimetic", "sinusoidal"), ("masked", plans.NONE, "rotary"))


def timed(held: Mapping[str, Any], data: str, parties: int) -> dict[str, Any]:
    """One short run: seconds until its first step, of a step once all run, of an evaluation, and of the end. Processes
    meet after a third of the steps, so that what follows is taken side by side.
    """
    marks: dict[int, float] = {}
    began, met = time.monotonic(), list[int]()

    def mark(event: dict[str, Any]) -> None:
        if not met and 3 * event["step"] >= event["steps"]:
            met.append(event["step"])
            if parties in _barriers:
                with suppress(threading.BrokenBarrierError):
                    _barriers[parties].wait(60)
        marks[event["step"]] = time.monotonic()

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    line = train(held, data, mark)
    steps = sorted(marks)
    first, last = met[0], steps[-2]
    pace = (marks[last] - marks[first]) / (last - first)
    return {
        "loss": line.get("train_loss"),
        "start": marks[steps[0]] - began,
        "pace": pace,
        "evaluation": max(0.0, marks[steps[-1]] - marks[last] - pace * (steps[-1] - last)),
        "end": time.monotonic() - marks[steps[-1]],
        "memory": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    }


class Timings:
    """Short runs of every size, eager and compiled, alone and side by side, and of every arm. What the time does not
    reach is left out; what was found is written after each.
    """

    def __init__(self, data: Path, bases: Bases, minutes: float, jobs: int, out: Path, log: Log = print) -> None:
        self.data, self.bases, self.out, self.log = data, bases, out, log
        self.until, self.jobs = time.monotonic() + 60 * minutes, jobs
        self.found: list[dict[str, Any]] = []
        self._open_pool()

    def _open_pool(self) -> None:
        barriers = {jobs: process_context().Barrier(jobs) for jobs in range(2, self.jobs + 1)}
        self.pool = ProcessPoolExecutor(max(2, self.jobs), process_context(), _prepare, (barriers,))

    def all(self) -> None:
        """Models are compiled where the device is a GPU."""
        compiled = torch.cuda.is_available()
        none, rotary = plans.NONE, plans.POSITIONS[0]
        self.together([("10M", none, rotary)], False)
        for stage, counts in SIDE_BY_SIDE.items():
            for jobs in counts:
                if jobs <= self.jobs:
                    self.together([(stage, none, rotary)] * jobs, compiled)
            if stage == "10M":
                arms = [("10M", arm, plans.POSITIONS[n % 2]) for n, arm in enumerate(plans.ARMS)]
                self.apart([*arms, *OTHERS], compiled)
                self.together([(stage, none, rotary)] * min(8, self.jobs), False)
        self.pool.shutdown(wait=True, cancel_futures=True)

    def together(self, kinds: Sequence[tuple[str, str, str]], compiled: bool) -> None:
        """Equal runs of several seeds, side by side."""
        if time.monotonic() > self.until:
            return
        plan, jobs = self._plan(*kinds[0], compiled, STEPS), len(kinds)
        entry = self._entry(kinds[0], jobs, compiled)
        lines = self._results([replace(plan, seed=seed) for seed in range(jobs)], jobs, entry)
        if lines:
            means = {name: statistics.fmean(x[name] for x in lines) for name in lines[0] if name != "loss"}
            whole = self.bases[kinds[0][0]]
            seconds = means["start"] + whole.steps * means["pace"] + means["end"]
            seconds += whole.steps // whole.evaluate * means["evaluation"]
            speed = jobs * whole.batch * whole.length / means["pace"]
            entry |= {**means, "tokens a second": speed, "seconds a run": seconds / jobs, "loss": lines[0]["loss"]}
        self._keep(entry)

    def apart(self, kinds: Sequence[tuple[str, str, str]], compiled: bool) -> None:
        """One run of each kind: all of them have to work before the queue begins."""
        entries = [self._entry(kind, min(self.jobs, len(kinds)), compiled) for kind in kinds]
        sent = [self.pool.submit(timed, self._plan(*kind, compiled, SHORT).to_dict(), str(self.data), 0) for kind in kinds]  # fmt: skip
        for entry, future in zip(entries, sent, strict=True):
            try:
                entry |= future.result()
            except Exception as error:
                self._note(entry, error)
            self._keep(entry)

    def _results(self, sent: Sequence[Plan], parties: int, entry: dict[str, Any]) -> list[dict[str, Any]]:
        lines = []
        futures = [self.pool.submit(timed, plan.to_dict(), str(self.data), parties) for plan in sent]
        for future in futures:
            try:
                lines.append(future.result())
            except Exception as error:
                self._note(entry, error)
        return lines

    def _note(self, entry: dict[str, Any], error: Exception) -> None:
        entry["wrong"] = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, BrokenProcessPool):
            self._open_pool()

    def _plan(self, stage: str, arm: str, positions: str, compiled: bool, steps: int) -> Plan:
        whole = self.bases is BASES
        some: dict[str, Any] = dict(steps=steps, log=MARKS, evaluate=steps) if whole else dict(log=1)
        return replace(self.bases[stage], compile=compiled, positions=positions, **some, **plans.ARMS[arm])

    def _entry(self, kind: tuple[str, str, str], jobs: int, compiled: bool) -> dict[str, Any]:
        stage, arm, positions = kind
        return {"stage": stage, "arm": arm, "positions": positions, "jobs": jobs, "compiled": compiled, "wrong": ""}

    def _keep(self, entry: dict[str, Any]) -> None:
        self.found.append(entry)
        self.log(_timing_text(entry))
        write_whole(self.out, json.dumps(round_numbers(self.found, 8), indent=1) + "\n")


def _timing_text(entry: Mapping[str, Any]) -> str:
    name = f"{entry['stage']}, {entry['arm']}, {entry['positions']}, {'compiled' if entry['compiled'] else 'eager'}"
    if entry["wrong"]:
        return f"{name}, {entry['jobs']} at a time: {entry['wrong']}"
    numbers = {
        "start": ".1f", "pace": ".4f", "evaluation": ".2f", "end": ".1f", "tokens a second": ",.0f", "memory": ".1f",
        "seconds a run": ".1f", "loss": ".7f",
    }  # fmt: skip
    shown = (f"{key} {format(entry[key], form)}" for key, form in numbers.items() if entry.get(key) is not None)
    return f"{name}, {entry['jobs']} at a time: {', '.join(shown)}"
