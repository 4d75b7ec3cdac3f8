"""Trains the unseen runs of the early-warning record, several at a time.

Each run is a loop of its own with `locater.Monitor()` attached as a user would, and a second monitor that observes
every 10th step for comparison. Its line has every loss and gradient norm, and the warnings as they came.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import platform
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from locater import Monitor
from locater.errors import LocaterError, first_line
from locater.inputs.corpus import embedded_text, fingerprint
from locater.inputs.text import read_text
from locater.version import __version__
from locater_lab.engine.provenance import SOURCES, check_commit, commit_of
from locater_lab.engine.reproduction import round_numbers
from locater_lab.studies.early_warning.plan import (
    BATCH,
    BY_NAME,
    LENGTH,
    STEPS,
    WORDS,
    TrainingRun,
    all_runs,
    build_model,
    make_optimizers,
    rate_at,
    vocabulary_size,
)
from locater_lab.train.sweep import append_line, read_lines

CHARACTERS = 10_000_000  # of the text
EXTREMES = {"max_logit": max, "spread": max, "entropy_ratio": min}  # over heads
DENSE = 10  # steps between observations of the second monitor


def read_texts(path: Path, folder: Path) -> dict[str, str]:
    """Write the tokens of each text to `folder`; the fingerprints of the texts."""
    wiki, docs = read_text(path)[:CHARACTERS], embedded_text()
    words = re.findall(r"\w+|[^\w\s]", wiki)
    ranks = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}  # 0 is every other word
    tokens: dict[str, Any] = {
        "wiki": np.frombuffer(wiki.encode(), np.uint8),
        "docs": np.frombuffer(docs.encode(), np.uint8),
        "words": np.array([ranks.get(word, 0) for word in words], np.int16),
    }
    for name, ids in tokens.items():
        np.save(folder / f"{name}.npy", ids)
    return {"wiki": f"{path.name} {fingerprint(wiki)[:12]}", "docs": f"Python's documentation {fingerprint(docs)[:12]}"}


def draw_batches(run: TrainingRun, ids: Tensor, most: int, size: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step, spoilt where the run has it."""
    generator = torch.Generator().manual_seed(run.seed)
    other = torch.Generator().manual_seed(run.seed + 1)  # so that a spoilt run has the batches of a whole one before
    labels = torch.randperm(most, generator=other)
    batch, length = size
    for step in range(1, STEPS + 1):
        at = torch.randint(len(ids) - length - 1, (batch,), generator=generator)
        rows = torch.stack([ids[i : i + length + 1] for i in at.tolist()]).long()
        since = None if run.onset is None else step - run.onset
        corrupted = since is not None and since >= 0 and step < run.until
        if corrupted and run.data == "random":
            rows = torch.randint(most, rows.shape, generator=other)
        if corrupted and run.data in ("shuffled", "creeping"):
            count = batch if run.data == "shuffled" else round(batch * min(1.0, (since or 0) / 150))
            for row in rows[:count]:
                row.copy_(row[torch.randperm(length + 1, generator=other)])
        inputs, targets = rows[:, :-1], rows[:, 1:]
        yield inputs, labels[targets] if corrupted and run.data == "relabelled" else targets


class WarningsSink:
    """A sink that stores the warnings of a run, and the extreme value over heads of what was observed."""

    def __init__(self) -> None:
        self.warnings: list[dict[str, Any]] = []
        self.observed: list[list[Any]] = []  # step, heads that are not finite, EXTREMES

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "warning":
            self.warnings.append({name: record[name] for name in ("step", "flag", "layer", "head", "value")})
        if record["kind"] == "step":
            heads = record["heads"]
            known = {name: [x for layer in heads[name] for x in layer if x is not None] for name in heads}
            row = [record["step"], sum(x is None for layer in heads["entropy"] for x in layer)]
            for name, choose in EXTREMES.items():
                row.append(round_numbers(float(choose(known[name])), 4) if known[name] else None)
            self.observed.append(row)

    def first(self) -> list[dict[str, Any]]:
        """Warnings without those of a step and flag that are listed already."""
        return list({(w["step"], w["flag"]): w for w in reversed(self.warnings)}.values())[::-1]

    def close(self) -> None:
        return


class TroubleHandler(logging.Handler):
    """Stores the troubles that the monitor logs. What it says of heads is in its sink."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "about_heads", False):
            self.messages.setdefault(record.getMessage())


def train(run: TrainingRun, tokens: Path, device: str, size: tuple[int, int], steps: int) -> dict[str, Any]:
    """One run, with its monitors; `size` is sequences and tokens of a batch."""
    kind = BY_NAME[run.kind]
    torch.manual_seed(run.seed)
    model = build_model(kind, run).to(device).train()
    optimizers_of_run = make_optimizers(kind, run, model)
    sparse, dense, log = WarningsSink(), WarningsSink(), TroubleHandler()
    logger = logging.getLogger("locater")
    logger.handlers, logger.propagate = [log], False
    monitors = [Monitor(sparse).attach(model), Monitor(dense, every=DENSE).attach(model)]
    ids = torch.from_numpy(np.load(tokens / f"{kind.text}.npy", allow_pickle=False))
    losses: list[float] = []
    norms: list[float] = []
    began = time.time()
    for step, (inputs, targets) in zip(
        range(1, steps + 1), draw_batches(run, ids, vocabulary_size(kind), size), strict=False
    ):
        for optimizer in optimizers_of_run:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(kind, run, step)
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.autocast(device, getattr(torch, kind.dtype), enabled=kind.dtype != "float32"):
            out = model(inputs) if kind.build == "own" else model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(out.flatten(0, 1).float(), targets.flatten())
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        for optimizer in optimizers_of_run:
            optimizer.step()
        for monitor in monitors:
            monitor.after_step(loss=loss, grad_norm=norm)
        losses.append(loss.item())
        norms.append(norm.item())
        if len(losses) > 10 and not any(map(math.isfinite, losses[-10:])):
            break  # it has diverged
    for monitor in monitors:
        monitor.detach()
    logger.handlers, logger.propagate = [], True
    return {
        "name": run.name,
        "run": {name: x for name, x in asdict(run).items() if x != math.inf}
        | ({"clip": None} if run.clip == math.inf else {}),
        "seconds": round(time.time() - began, 1),
        "losses": [None if not math.isfinite(x) else round(x, 3) for x in losses],
        "norms": round_numbers(norms, 3),
        "warnings": sparse.first(),
        "warnings_dense": dense.first(),
        "observed": dense.observed,
        "troubles": list(log.messages),
    }


def _work(run: TrainingRun, tokens: Path, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(run, tokens, device, (BATCH, LENGTH), STEPS)


def train_missing(out: Path, text: Path, jobs: int, log: Callable[[str], None]) -> None:
    """Train every planned run that has no line in `out`, `jobs` at a time, and append its line.

    A run that breaks leaves no line and stops no other; the first of them is raised at the end.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = {line["name"] for line in read_lines(out)}
    runs = [run for run in all_runs() if run.name not in done]
    facts: dict[str, Any] = {
        "machine": _machine(device),
        "locater": __version__,
        "commit": commit_of(SOURCES),
    }
    check_commit(out, facts["commit"])
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        facts["texts"] = read_texts(text, Path(folder))
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            waiting = {pool.submit(_work, run, Path(folder), device): run for run in runs}
            for i, future in enumerate(as_completed(waiting), 1):
                try:
                    line = future.result()
                except (
                    Exception
                ) as error:  # anything can end a worker (memory, a kill); its run has no line and is run again
                    broken.append(f"{waiting[future].name}: {type(error).__name__}: {first_line(error)}")
                    log(broken[-1])
                    continue
                append_line(out, {**line, **facts})
                loss_text = f"{len(line['losses'])} steps in {line['seconds']} s, loss {line['losses'][-1]}"
                log(f"{i} of {len(runs)} {line['name']}: {loss_text}")
    if broken:
        raise LocaterError(f"{len(broken)} runs broke and can be run again, the first: {broken[0]}")


def _machine(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__}
