"""Trains what the plan asks for, as far as the time goes: each run that ends is a line of JSON, so that the queue can be
cut off after any run and goes on where it stopped.

    python -m locater_lab.studies.pretraining.queue pack TAG --texts TEXTS --to FOLDER   what another machine needs
    python -m locater_lab.studies.pretraining.queue time --data FOLDER --out timing.json   seconds of a run, side by side
    python -m locater_lab.studies.pretraining.queue run --data FOLDER --out new.jsonl --runs docs/results/pretraining-runs.jsonl
    python -m locater_lab.studies.pretraining.queue left --runs docs/results/pretraining-runs.jsonl   what is missing

`pack` writes the sources of a commit, a stamp with their hash, and the tokens, compressed. A machine without git gives
the stamp to `run`, which refuses sources that are not those of the stamp; with git it refuses a tree with changes. So
every line names the commit whose code made it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import locater
from locater.errors import LocaterError, first_line
from locater.files import write_whole
from locater_lab.engine.provenance import SOURCES, code_of_tree
from locater_lab.engine.reproduction import round_numbers
from locater_lab.engine.runs import Row, Runs, process_context, with_data_folder
from locater_lab.studies.pretraining import plan as plans
from locater_lab.studies.pretraining.plan import BASES, STAGES, STREAM, Bases
from locater_lab.train.map_measures_and_diverged_layer import SINK
from locater_lab.train.plan import Plan
from locater_lab.train.streams import (
    StreamData,
    check_stream,
    pack_stream,
    read_description,
    sources_of,
    unpack_stream,
    write_stream,
)

Log = Callable[[str], None]
DIGITS = 6
KEPT = ("train_loss", "select_loss", "report_loss", "accuracy", "history", "parameters", "tokens")  # of a result
STAMP, ARCHIVE = "stamp.json", "src.tar.xz"
TINY_VOCABULARY = 256

# ---- the tree that a line comes from ----


def commit_of_tree(stamp: Path | None = None, tree: Path | None = None) -> str:
    """The commit of the sources that run here, from a stamp or from git; refused where they are not as it has them."""
    if stamp is not None:
        held = json.loads(stamp.read_text(encoding="utf-8"))
        if held["code"] != code_of_tree(SOURCES):
            raise LocaterError(f"{stamp}: the sources here are not those of commit {held['commit']}: pack them again")
        return str(held["commit"])
    folder = tree or Path(locater.__file__).parents[2]
    commit = _git(folder, "rev-parse", "HEAD").decode().strip()
    if not commit:
        raise LocaterError(f"{folder}: no commit is known here, and a line must name one: give --stamp FILE")
    changed = _git(folder, "status", "--porcelain", "--", "src").decode()
    if changed:
        raise LocaterError(f"{folder}: {changed.splitlines()[0].strip()}: changed since the commit: commit it first")
    return commit[:12]


def _git(folder: Path, *arguments: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, timeout=60).stdout
    except OSError:
        return b""


def pack(tag: str, texts: Path, folder: Path, log: Log = print) -> None:
    """Sources of a tag, their stamp, and the stream, in a folder that can be copied to another machine."""
    tree = Path(locater.__file__).parents[2]
    commit = _git(tree, "rev-parse", f"{tag}^{{commit}}").decode().strip()[:12]
    archive = _git(tree, "archive", "--format=tar", tag, "src")
    if not archive:
        raise LocaterError(f"{tree}: has no commit {tag}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ARCHIVE).write_bytes(lzma.compress(archive))
    with tempfile.TemporaryDirectory() as name:
        import tarfile

        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(name, filter="data")
        code = code_of_tree(Path(name) / "src")
    write_whole(folder / STAMP, json.dumps({"commit": commit, "code": code}) + "\n")
    log(f"{tag} is {commit}, code {code}")
    if not (folder / STREAM).is_file():
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / STREAM
            write_stream(path, plans.SOURCES, texts, plans.VOCABULARY, Path(name) / plans.TOKENIZER, every=plans.EVERY)
            pack_stream(path, folder)
    check_text(folder / STREAM)
    log(f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 2**20:.1f} MiB in {folder}")


def check_text(path: Path) -> None:
    """Refuse a stream that is not the one of the plan."""
    found = read_description(path)["sha256"]
    if found != plans.SHA256:
        raise LocaterError(f"{path}: its tokens have the hash {found[:12]}, and the plan says {plans.SHA256[:12]}")


def tiny_stream(path: Path, folder: Path) -> dict[str, Any]:
    """The beginning of each part, its tokens modulo 256, in a folder of its own: the same queue in a moment."""
    document = read_description(path)
    folder.mkdir(parents=True, exist_ok=True)
    for entry in document["parts"]:
        most = 4000 if entry["split"] == "train" else 400
        tokens = np.fromfile(path.with_name(entry["file"]), "<u2", most) % TINY_VOCABULARY
        tokens.tofile(folder / entry["file"])
        entry |= {"tokens": len(tokens), "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}
    shutil.copy(path.with_name(document["tokenizer"]["file"]), folder)
    write_whole(folder / path.name, json.dumps({**document, "vocabulary": TINY_VOCABULARY}))
    return check_stream(folder / path.name)


# ---- one run ----


def train(held: Mapping[str, Any], data: str, on_progress: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:  # fmt: skip
    """One run in this process: what its line keeps, with all times in `took`. The weights are read and thrown away."""
    import torch

    from locater_lab.train.loop import DivergedError, run

    plan = Plan.from_dict(held)
    if plan.compile:  # as in a new process: what ran here before must not decide which kernels are used
        torch.compiler.reset()
    folder, began = Path(tempfile.mkdtemp(prefix="locater-run-")), time.monotonic()
    try:
        result = run(with_data_folder(plan, Path(data), folder), on_progress or (lambda event: None))
        trained = time.monotonic()
        line = {"status": "done", **{name: getattr(result, name) for name in KEPT}, "entropy": result.report_entropy}
        line |= {"sink_rate": result.measures["sink_rate"], "spike": result.measures["spike"]}
        line |= heads_and_sources(result.model, with_data_folder(plan, Path(data), folder))
        took = {"seconds": result.seconds, "run": trained - began, "whole": time.monotonic() - began}
        return {**line, "took": took}
    except DivergedError as error:
        message = str(error).replace(str(folder), "run")
        return {"status": "diverged", "message": message, "took": {"whole": time.monotonic() - began}}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def heads_and_sources(model: str, plan: Plan) -> dict[str, Any]:
    """Of every head its moments, from the saved weights, and what it does on the report split; and the report loss by
    source.
    """
    from locater.commands.scanning import scan
    from locater.observing import observe
    from locater_lab.models.transformer import load
    from locater_lab.train.data import open_data
    from locater_lab.train.loop import Evaluation
    from locater_lab.train.optimizer_and_learning_rate import device_of, uses_bfloat16

    device = device_of(plan.device)
    data = open_data(plan, Path(plan.out), device)
    evaluation = Evaluation(load(model).to(device), data, device, uses_bfloat16(plan, device))
    splits = [f"report {name}" for name in sources_of(data)] if isinstance(data, StreamData) else ["report"]
    with observe(evaluation.model) as seen:
        losses = [evaluation.loss_and_accuracy(split)[0] for split in splits]
    moments, watched = scan(model).rows, seen.rows
    heads: dict[str, list[Any]] = {name: [getattr(row, name) for row in moments] for name in ("M", "concentration")}
    heads["S/F"] = [None if not row.F else (row.S or 0.0) / row.F for row in moments]
    heads |= {name: [getattr(row, name) for row in watched] for name in ("entropy", "sink", "max_logit")}
    known = {name: [x for x in values if x is not None] for name, values in heads.items()}
    means = {name: statistics.fmean(values) if values else None for name, values in known.items()}
    means["sinks"] = statistics.fmean(x > SINK for x in known["sink"]) if known["sink"] else None
    return {"by_source": dict(zip(splits, losses, strict=True)), "means": means, "heads": round_numbers(heads, 4)}


# ---- many runs ----


def drain(
    stages: Sequence[str],
    runs: Runs,
    data: Path,
    *,
    facts: Mapping[str, Any],
    jobs: int = 1,
    minutes: float = float("inf"),
    bases: Bases = BASES,
    log: Log = print,
) -> list[str]:
    """Make the runs that these stages lack, `jobs` at a time, and keep a line of each. None begins after `minutes`.
    Returns what went wrong: a run that breaks leaves no line, and stops no other.
    """
    until = time.monotonic() + 60 * minutes
    asked: set[str] = set()
    broken: list[str] = []
    waiting: dict[Future[dict[str, Any]], Row] = {}
    pool = pool_of(jobs)
    try:
        while True:
            for row in runs.missing(plans.rows(runs, stages, bases)) if time.monotonic() < until else ():
                if len(waiting) >= jobs:
                    break
                if row.key not in asked:
                    asked.add(row.key)
                    waiting[_submit(pool, row, data)] = row
            if not waiting:
                return broken
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                row = waiting.pop(done)
                name = f"{row.claim}: {row.arm}, rate {row.plan.rate:g}, seed {row.plan.seed}"
                try:
                    line = round_numbers({**done.result(), **facts}, DIGITS)
                except BrokenProcessPool as error:  # every run that was under way is lost, and the queue goes on
                    broken.append(f"{name}: {first_line(error)}")
                    pool.shutdown(wait=False, cancel_futures=True)
                    pool = pool_of(jobs)
                    broken += [f"{other.arm}: was under way" for other in waiting.values()]
                    waiting.clear()
                    break
                except Exception as error:  # of any kind: compilers, memory
                    broken.append(f"{name}: {type(error).__name__}: {first_line(error)}")
                    log(broken[-1])
                    continue
                runs.add(row, line)
                log(f"{name}: {_outcome(line)}, {line['took']['whole']:.1f} s")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _outcome(line: Mapping[str, Any]) -> str:
    return f"{line['report_loss']:.4f}" if line["status"] == "done" else str(line["status"])


class _Here:
    """In place of a pool: one job, in this process."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        return


def pool_of(jobs: int) -> Any:
    """Processes for so many runs at a time; for one, this process."""
    return _Here() if jobs == 1 else ProcessPoolExecutor(jobs, process_context(), prepare_process)


def prepare_process() -> None:
    import torch

    torch.set_num_threads(1)  # a team of threads in each would fight over the cores
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _submit(pool: Any, row: Row, data: Path) -> Future[dict[str, Any]]:
    future: Future[dict[str, Any]] = pool.submit(train, row.plan.to_dict(), str(data))
    return future


def facts_of(commit: str, data: Path) -> dict[str, Any]:
    """What a line says of where it was made."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "torch": torch.__version__,
        "commit": commit,
        "code": code_of_tree(SOURCES),
        "text": read_description(data / STREAM)["sha256"][:12],
    }


def check_code(runs: Runs, stages: Sequence[str]) -> None:
    """All runs of a stage come from one state of the code."""
    here = code_of_tree(SOURCES)
    for line in runs.lines.values():
        if line["claim"] in stages and line["code"] != here:
            raise LocaterError(
                f"{line['claim']}: has runs of commit {line['commit']}, and the code here differs: run that commit"
            )


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=("pack", "time", "run", "left"))
    parser.add_argument("tag", nargs="?", default="HEAD", help="of pack: the commit whose sources run")
    parser.add_argument("--texts", type=Path, help="of pack: the folder of the texts")
    parser.add_argument("--to", type=Path, help="of pack: the folder that is written")
    parser.add_argument("--data", type=Path, help="the folder that pack wrote")
    parser.add_argument("--work", type=Path, help="where tokens are unpacked; default: beside temporary files")
    parser.add_argument("--runs", type=Path, help="lines that there are")
    parser.add_argument("--out", type=Path, help="where new lines, or times, are written")
    parser.add_argument("--stamp", type=Path, help="of the sources, on a machine without git")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--tiny", action="store_true", help="the same plans at a size for a CPU, to try the queue with")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    stages = tuple(given.stages.split(","))
    runs = Runs(given.out if given.act == "run" else None, [path for path in (given.runs,) if path is not None])
    if given.act == "pack":
        pack(given.tag, given.texts, given.to)
        return 0
    if given.act == "left":
        missing = {stage: len(runs.missing(plans.rows(runs, (stage,)))) for stage in STAGES}
        print("runs that can be made now:", ", ".join(f"{stage} {count}" for stage, count in missing.items()))
        return 0
    data = (given.work or Path(tempfile.gettempdir()) / "locater-pretraining").resolve()
    if not (data / STREAM).is_file():
        unpack_stream(given.data / STREAM, data)
    check_text(data / STREAM)
    if (given.data / plans.IMAGES).is_file():
        shutil.copy(given.data / plans.IMAGES, data)
    bases = BASES
    if given.tiny:
        bases, tiny = plans.tiny_bases(TINY_VOCABULARY), data / "tiny"
        tiny_stream(data / STREAM, tiny)
        data = tiny
    print(f"text ready after {time.monotonic() - began:.1f} s", flush=True)
    left = given.minutes - (time.monotonic() - began) / 60

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    if given.act == "time":
        print(f"commit {commit_of_tree(given.stamp)}")

        Timings(data, bases, left, given.jobs, given.out, log).all()
        return 0
    facts = facts_of(commit_of_tree(given.stamp), data)
    check_code(runs, stages)
    broken = drain(stages, runs, data, facts=facts, jobs=given.jobs, minutes=left, bases=bases, log=log)
    print(f"{len(broken)} runs broke" + "".join(f"\n{text}" for text in broken))
    return 1 if broken else 0


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


if __name__ == "__main__":  # by its own name, under which processes of a pool know it
    from locater_lab.studies.pretraining import queue

    raise SystemExit(queue.main())
