"""A task that needs a sharp head: how long controls delay what a small model learns there.

A sequence is 32 random tokens of 64, twice. Only a model that finds the earlier copy of a token, and what followed it,
gets below log 64 in the second half. Judged: the first step at which the loss there, a mean over the last 5 steps, is
below half of log 64, and the loss at the end, a mean over the last 20 steps. Every arm has the batches of its seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional

from locater import LocAteR
from locater.version import __version__
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.train.sweep import append_line, read_lines

COPY_RUNS = "which-control-copies.jsonl"
TOKENS, HALF, BATCH, STEPS, RATE, WARMUP = 64, 32, 16, 400, 2e-3, 50
SMOOTH, LAST = 5, 20
LEARNED = 0.5  # of log 64
SEEDS = range(8)
SHAPE = Shape(vocabulary=TOKENS, layers=2, width=64, heads=4, kv_heads=4, hidden=192, length=2 * HALF)
ARMS: dict[str, dict[str, Any]] = {  # options of LocAteR, or a weight decay
    "none": {},
    "LocAteR, effective": {"shrink": 0.01, "hold": 0.01},
    "LocAteR, effective, 10 times": {"shrink": 0.1, "hold": 0.1},
    "LocAteR, measured": {"shrink": 0.001, "hold": 0.001, "form": "measured"},
    "weight decay 0.3": {"decay": 0.3},
}
DELAY = "steps until the loss is half of log 64, less those of no control"
CLAIMS = (
    Claim("b1", "LocAteR, effective form, delays learning to copy", DELAY, "at least", 0.0, by="ours"),
    Claim("b2", "LocAteR, measured form, delays learning to copy", DELAY, "at least", 0.0, by="ours"),
    Claim("b3", "A weight decay of 0.3 delays it by 5 steps at most", DELAY, "at most", 5.0, by="ours"),
    Claim("b4", "After 400 steps the effective form costs 0.01 nats at most", "change of loss, nats", "at most", 0.01, by="ours"),
    Claim("b5", "After 400 steps the measured form costs 0.01 nats at most", "change of loss, nats", "at most", 0.01, by="ours"),
)  # fmt: skip


def train_arm(arm: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """The line of one run: the loss of every step over the second halves."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, generator = Transformer(SHAPE).train(), torch.Generator().manual_seed(seed)
    options = dict(ARMS[arm])
    decay = options.pop("decay", 0.1)
    control = LocAteR(target=2.0, **options).attach(model) if options else None
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=decay)
    losses, began = [], time.time()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / WARMUP)
        half = torch.randint(TOKENS, (BATCH, HALF), generator=generator)
        rows = torch.cat([half, half], 1)
        loss = functional.cross_entropy(model(rows[:, :-1])[:, HALF - 1 :].flatten(0, 1), rows[:, HALF:].flatten())
        optimizer.zero_grad()
        (loss if control is None else loss + control.loss()).backward()
        optimizer.step()
        if control is not None:
            control.after_step()
        losses.append(round(loss.item(), 4))
    about = {"locater": __version__, "torch": torch.__version__, "seconds": round(time.time() - began, 1)}
    return {"arm": arm, "seed": seed, "losses": losses, **about}


def learned_at(losses: Sequence[float]) -> int | None:
    """The first step at which the smoothed loss is below half of log 64; None if none is."""
    bound = LEARNED * math.log(TOKENS)
    return next((i for i in range(SMOOTH, len(losses) + 1) if fmean(losses[i - SMOOTH : i]) < bound), None)


def measure_copying(setting: Setting) -> Results:
    """Judge the kept lines; with --jobs make those that are missing first."""
    path = next((x for x in (setting.runs, *setting.more_runs) if x is not None and x.name == COPY_RUNS), None)
    if path is None:
        return Results({})
    lines = {(line["arm"], line["seed"]): line for line in read_lines(path)}
    missing = [(arm, seed) for seed in SEEDS for arm in ARMS if (arm, seed) not in lines]
    if setting.jobs and missing:
        with ProcessPoolExecutor(setting.jobs, get_context("spawn")) as pool:
            for line in pool.map(train_arm, *zip(*missing, strict=True)):
                append_line(path, line)
                lines[line["arm"], line["seed"]] = line
                setting.log(f"{line['arm']}, seed {line['seed']}: learned at {learned_at(line['losses'])}")
    return copying_results(lines)


def copying_results(lines: Mapping[tuple[str, int], Mapping[str, Any]]) -> Results:
    """Differences within a seed, of the seeds that every arm has. A run that never learned counts as its last step."""
    seeds = [seed for seed in SEEDS if all((arm, seed) in lines for arm in ARMS)]
    if len(seeds) < 2:
        return Results({})
    steps = {arm: [learned_at(lines[arm, s]["losses"]) or len(lines[arm, s]["losses"]) for s in seeds] for arm in ARMS}
    ends = {arm: [round(fmean(lines[arm, seed]["losses"][-LAST:]), 6) for seed in seeds] for arm in ARMS}

    def change(values: Mapping[str, Sequence[float]], arm: str) -> list[float]:
        return [round(x - plain, 6) for x, plain in zip(values[arm], values["none"], strict=True)]

    measured = {
        "b1": by_seed(change(steps, "LocAteR, effective")),
        "b2": by_seed(change(steps, "LocAteR, measured")),
        "b3": by_seed(change(steps, "weight decay 0.3")),
        "b4": by_seed(change(ends, "LocAteR, effective")),
        "b5": by_seed(change(ends, "LocAteR, measured")),
    }
    rows = [
        {"arm": arm, "steps": steps[arm], "delay": change(steps, arm), "end": ends[arm], "cost": change(ends, arm)}
        for arm in ARMS
    ]
    return Results(measured, {"copying": rows, "copy_seeds": seeds})


STUDY = Study(
    "a task of copies",
    CLAIMS,
    measure_copying,
    f"its runs: --runs FILE called {COPY_RUNS} of earlier ones, with --jobs N to make those that it lacks",
    on_runs=True,
    needs_data=False,
)
