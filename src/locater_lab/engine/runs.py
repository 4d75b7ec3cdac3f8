"""Training runs that claims rest on: named rows, run several at a time, one line of JSON for each that is done.

Lines are written as runs end, so that a sitting cut short loses what was under way and nothing else. A row's plan names
its data by file alone (`speeches.tar.xz`), and the folder is given when it is run: a line means the same wherever it
was made.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any

from locater.errors import LocaterError, first_line
from locater.runs.run_log import LOG, read_run
from locater.torch_private import compiler_module
from locater_lab.data.word_tokenizer import TOKENS_FOLDER, shared_tokens
from locater_lab.engine.provenance import SOURCES, check_commit, commit_of, versions
from locater_lab.engine.reproduction import Paper, round_numbers
from locater_lab.train.map_measures_and_diverged_layer import SINK
from locater_lab.train.plan import Plan
from locater_lab.train.run_folder import PACE
from locater_lab.train.sweep import append_line, read_lines

# ---- one run in this process, and the line that is stored of it ----


STORED = ("train_loss", "select_loss", "report_loss", "accuracy", "history", "seconds", "parameters", "measures")
TEXT_FIELDS = ("corpus", "select", "report")  # fields of a plan that name files of text
SAMPLES = 10  # images that are drawn from a model that denoises

_last_trained: list[tuple[Any, ...]] = []  # controls, mechanism and sizes of the last run of this process


def train(held: Mapping[str, Any], data: str) -> dict[str, Any]:
    """One run in this process; its weights are read and thrown away."""
    import torch

    from locater_lab.train.loop import DivergedError, run

    plan = Plan.from_dict(held)
    kind = (
        *(plan.control, plan.attention, plan.norm, plan.mlp, plan.fusion, plan.task, plan.heads, plan.convert),
        # of another size graphs would be for any size, and slower
        *(plan.layers, plan.width, plan.batch, plan.length, plan.positions),
    )
    if plan.compile and _last_trained != [kind]:
        torch.compiler.reset()  # graphs of other controls are of no use, and too many of them are refused
    _last_trained[:] = [kind]
    folder = Path(tempfile.mkdtemp(prefix="locater-run-"))
    try:
        result = run(with_data_folder(plan, Path(data), folder))
        found = {"status": "done", **{name: getattr(result, name) for name in STORED}, "entropy": result.report_entropy}
        observed: dict[str, Any] = observed_curves(folder / LOG) if plan.observe else {}
        if result.conversion is not None:
            observed["conversion"] = result.conversion
        if plan.task == "diffusion" and plan.seed == 0:
            observed["samples"] = image_samples(result.model, plan.device)
        return {**found, **observed, "heads": mean_moments(result.model), **machine(plan)}
    except DivergedError as error:
        return {"status": "diverged", "message": str(error).replace(str(folder), "run"), **machine(plan)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def image_samples(model: str, device: str) -> str:
    """A few images drawn from a model of --task diffusion, as a strip."""
    from locater_lab.engine.figures import png_strip
    from locater_lab.models.noise_and_patches import sample_images
    from locater_lab.models.transformer import load
    from locater_lab.train.optimizer_and_learning_rate import device_of

    return png_strip(sample_images(load(model).to(device_of(device)), SAMPLES))


def observed_curves(log: Path) -> dict[str, list[tuple[int, float]]]:
    """Means over heads at each observed step: `entropies` in nats, `sinks`, the weight on the first token, and
    `sink_rates`, the share of heads in which that is a sink.
    """
    steps = read_run(log).steps
    means = {name: _means(steps, column) for name, column in (("entropies", "entropy"), ("sinks", "sink"))}
    return {**means, "sink_rates": _means(steps, "sink", lambda weight: float(weight > SINK))}


def _means(
    steps: Sequence[Mapping[str, Any]], column: str, of: Callable[[float], float] = float
) -> list[tuple[int, float]]:
    by_step = [(step["step"], [of(x) for row in step["heads"][column] for x in row if x is not None]) for step in steps]
    return [(step, statistics.fmean(values)) for step, values in by_step if values]


def with_data_folder(plan: Plan, data: Path, out: Path) -> Plan:
    """The plan with its data where it is."""
    images = None if plan.images is None else str(data / plan.images)
    corpus, select, report = (tuple(str(data / name) for name in getattr(plan, part)) for part in TEXT_FIELDS)
    return replace(plan, out=str(out), corpus=corpus, select=select, report=report, images=images)


def mean_moments(model: str) -> dict[str, float] | None:
    """Means over heads of the moments in logit units, from the weights as they were saved; None where heads are not
    read.
    """
    from locater.commands.scanning import scan

    try:
        rows = scan(model).rows
    except LocaterError:
        return None
    return {
        name: statistics.fmean(float(getattr(row, name)) for row in rows) for name in ("M", "S", "F", "concentration")
    }


def machine(plan: Plan) -> dict[str, str]:
    """What a number may depend on besides its plan."""
    from locater_lab.train.optimizer_and_learning_rate import device_of

    return versions(device_of(plan.device).type)


# ---- many runs, each once ----


@dataclass(frozen=True)
class Row:
    """One run: the letter of the claim it is for, the arm it belongs to, and what it trains."""

    claim: str
    arm: str
    plan: Plan

    @property
    def options(self) -> dict[str, Any]:
        """What is not a plan's default; decides the run."""
        held, plain = self.plan.to_dict(), Plan().to_dict()
        return {name: value for name, value in held.items() if name not in PACE and value != plain.get(name)}

    @cached_property
    def key(self) -> str:
        return json.dumps(self.options, sort_keys=True)


def distinct_rows(rows: Iterable[Row]) -> list[Row]:
    """Each run once, as what it is asked for first."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row.key, row)
    return list(found.values())


class Runs:
    """Finished runs by what they trained, in a file that grows."""

    def __init__(self, path: Path | None = None, more: Sequence[Path] = ()) -> None:
        """`more` are files that are read and not written to; of a run that two files hold, the one in `path` counts."""
        self.path = path
        self.lines: dict[str, dict[str, Any]] = {}
        for file in (*more, *(() if path is None else (path,))):
            for line in read_lines(file):
                if isinstance(line.get("options"), dict):
                    self.lines[json.dumps(line["options"], sort_keys=True)] = line

    def of(self, row: Row) -> dict[str, Any] | None:
        return self.lines.get(row.key)

    def missing(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in distinct_rows(rows) if row.key not in self.lines]

    def add(self, row: Row, line: dict[str, Any]) -> None:
        whole = {"claim": row.claim, "arm": row.arm, "options": row.options, **line}
        self.lines[row.key] = whole
        if self.path is not None:
            check_commit(self.path, line.get("commit"))
            append_line(self.path, round_numbers(whole, 6))


def train_missing(
    rows: Callable[[Runs], Sequence[Row]],
    runs: Runs,
    data: Path,
    jobs: int,
    log: Callable[[str], None] = lambda text: None,
    until: float = math.inf,
) -> None:
    """Run every row that has no line, `jobs` at a time. `rows` is asked again after each, since some wait for the
    outcome of others. None begins after `until` (`time.monotonic`): what is under way ends, and the next call goes on.

    A run that breaks, rather than diverges, leaves no line and stops no other; the first of them is raised at the end.
    """
    _check_files(rows(runs), data)
    if runs.path is not None:
        check_commit(runs.path, commit_of(SOURCES))
    with tempfile.TemporaryDirectory(prefix="locater-tokens-") as folder, shared_tokens(Path(folder)):
        _tokenize(runs.missing(rows(runs)), data, Path(folder))
        _train_missing(rows, runs, data, jobs, log, until)


def _train_missing(
    rows: Callable[[Runs], Sequence[Row]],
    runs: Runs,
    data: Path,
    jobs: int,
    log: Callable[[str], None],
    until: float,
) -> None:
    asked: set[str] = set()
    broken: list[str] = []
    with ProcessPoolExecutor(jobs, process_context(), _set_token_folder, (os.environ.get(TOKENS_FOLDER),)) as pool:
        waiting: dict[Any, Row] = {}
        while True:
            for row in runs.missing(rows(runs)):
                if row.key not in asked and len(waiting) < jobs and time.monotonic() < until:
                    asked.add(row.key)
                    waiting[pool.submit(train, row.plan.to_dict(), str(data))] = row
            if not waiting:
                break
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                row = waiting.pop(done)
                name = f"{row.arm}, seed {row.plan.seed}, rate {row.plan.rate:g}"
                try:
                    runs.add(row, done.result())
                    log(f"{name}: {_outcome_text(runs.lines[row.key])}; {len(runs.missing(rows(runs)))} left")
                except Exception as error:  # anything can end a worker (compilers, memory, a kill); its run has no line and is run again
                    broken.append(f"{name}: {type(error).__name__}: {first_line(error)}")
                    log(broken[-1])
    if broken:
        raise LocaterError(f"{len(broken)} runs broke and can be run again, the first: {broken[0]}")


def process_context() -> Any:
    """New processes that CUDA can be used in. Where there is a server for it they are forked from one that has imported
    what a run needs: a dozen that import it at the same time take a dozen times as long.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([compiler_module(), "locater_lab.train.loop", "locater_lab.engine.runs"])
    return context


def _set_token_folder(tokens: str | None) -> None:
    """In a process that has the environment of its server, which may have begun before there was a folder of tokens."""
    if tokens is not None:
        os.environ[TOKENS_FOLDER] = tokens


def _tokenize(rows: Iterable[Row], data: Path, folder: Path) -> None:
    """Read each text once with all cores, before the processes that train on it ask for its tokens. What cannot be read
    is left to its run, which says so.
    """
    import torch

    from locater_lab.train.data import open_data

    texts: dict[tuple[Any, ...], Plan] = {}
    for row in rows:
        if row.plan.corpus and row.plan.task in ("causal", "masked"):
            plan = row.plan
            texts.setdefault((plan.corpus, plan.select, plan.report, plan.vocabulary, plan.words), plan)
    for plan in texts.values():
        with suppress(LocaterError):
            open_data(with_data_folder(plan, data, folder), folder, torch.device("cpu"))


def _check_files(rows: Sequence[Row], data: Path) -> None:
    """Refuse before anything is trained what would fail for want of a file."""
    for row in rows:
        texts = [name for part in TEXT_FIELDS for name in getattr(row.plan, part)]
        for name in (*texts, *([row.plan.images] if row.plan.images else [])):
            if not (data / name).is_file():
                raise LocaterError(
                    f"{data / name}: no such file, and the runs of claim {row.claim} train on it: give --data FOLDER"
                )


def _outcome_text(line: Mapping[str, Any]) -> str:
    return f"{line['report_loss']:.4f}" if line["status"] == "done" else str(line["status"])


def expected_rows(
    rows: Callable[[Runs], Sequence[Row]], known: Mapping[str, dict[str, Any]] | None = None
) -> list[Row]:
    """All rows that there will be, for a plan: those that wait for an outcome are counted at the first rate. `known` are
    lines of runs that there are, by key.
    """
    runs = Runs()
    runs.lines |= known or {}
    while missing := runs.missing(rows(runs)):
        for row in missing:
            runs.lines[row.key] = {
                "status": "done",
                "select_loss": row.plan.rate,
                "report_loss": 0.0,
                "entropy": 0.0,
            }
    return distinct_rows(rows(runs))


# Arms


@lru_cache(4096, typed=True)
def _cached_row(claim: str, arm: str, base: Plan, rate: float, seed: int) -> Row:
    """Kept, with its key: an arm asks for the same rows whenever a run ends, and a plan checks itself when it is made."""
    return Row(claim, arm, replace(base, rate=rate, seed=seed))


RATES = (1e-3, 2.5e-3, 6e-3)


@dataclass(frozen=True)
class Arm:
    """A way to train: what it changes in a base plan. Tuned: each rate with the first seed, then the other seeds at the
    best one. Seeds that chose the rate do not judge: `chose` is how many they are, where others than the first did.
    """

    name: str
    claim: str
    base: Plan
    rates: tuple[float, ...] = RATES
    seeds: int = 3
    chose: int = 0

    @property
    def choosing(self) -> int:
        """How many of the first seeds chose the rate."""
        return max(self.chose, 1 if len(self.rates) > 1 else 0)

    def edge(self, runs: Runs) -> float | None:
        """The best rate, where it is the lowest or the highest that was tried: the best of all may lie beyond it."""
        best = self.rate(runs) if len(self.rates) > 1 else None
        return best if best in (min(self.rates), max(self.rates)) else None

    def row(self, rate: float, seed: int) -> Row:
        return _cached_row(self.claim, self.name, self.base, rate, seed)

    def rate(self, runs: Runs) -> float | None:
        """The rate of the least select loss with the first seed; None until all are known, or where none was
        survived.
        """
        lines = [runs.of(self.row(rate, 0)) for rate in self.rates]
        if any(line is None for line in lines):
            return None
        done = [
            (line["select_loss"], rate)
            for line, rate in zip(lines, self.rates, strict=True)
            if line and line["status"] == "done"
        ]
        return min(done)[1] if done else None

    def rows(self, runs: Runs) -> Iterator[Row]:
        yield from (self.row(rate, 0) for rate in self.rates)
        best = self.rate(runs)
        if best is not None:
            yield from (self.row(best, seed) for seed in range(1, self.seeds))

    def lines_so_far(self, runs: Runs) -> list[dict[str, Any]]:
        """Lines of the seeds at the best rate, those that there are."""
        best = self.rate(runs)
        lines = [] if best is None else [runs.of(self.row(best, seed)) for seed in range(self.seeds)]
        return [line for line in lines if line is not None and line["status"] == "done"]

    def final_lines(self, runs: Runs) -> list[dict[str, Any]] | None:
        """The same of all seeds; None while one is missing."""
        found = self.lines_so_far(runs)
        return found if len(found) == self.seeds else None


# ---- runs that the tree keeps ----

KEPT = Path(__file__).parents[3] / "docs" / "results"  # in the tree; a wheel has no training runs
SHARED = ("bao2024-runs.jsonl", "mechanisms-runs.jsonl")  # of papers that have no file of their own


def kept_runs(paper: Paper) -> list[Path]:
    """The training runs that the tree keeps for a paper: a file of its own, or the shared ones; the last counts most."""
    if paper.kept:
        return [KEPT / name for name in paper.kept if (KEPT / name).is_file()]
    own = KEPT / f"{paper.name}-runs.jsonl"
    shared = [KEPT / name for name in SHARED if any(study.on_runs and study.needs_data for study in paper.studies)]
    return [own] if own.is_file() else [path for path in shared if path.is_file()]
