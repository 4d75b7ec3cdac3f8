"""The same encoders at a small size, on a CPU: study c.

d and N are 8, the MLP has 64 channels, the lengths of tokens begin at sqrt(d), and there are 1,200 steps; everything else
is as in `encoder.py`. It says whether the order of the ranks is there already at this size, at equal parameters and by
the time that a step takes. Several layers are left to the published size: at this rate encoders of three layers learn
nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.amsel2024.encoder import Encoder, Encoders, drawn, losses, trained

WIDTH = POINTS = 8
RANKS = (1, 2, 4, 8)
STEPS = {True: 1, False: 3}  # times those of the arms
BASE = Encoder(rank=1, width=WIDTH, points=POINTS, hidden=64, seeds=8, batch=8, rate=0.03, length=WIDTH**0.5)
NARROW = tuple(replace(BASE, rank=r, steps=1200) for r in RANKS)  # d^2 parameters
WIDE = tuple(replace(BASE, rank=r, copies=WIDTH, steps=1200) for r in (1, 4, 8))  # d^3
REPEATS = 24  # of each timing, the two in turns
TIMED = 8  # steps of one

SEEN = f"as seen at d = {WIDTH}, N = {POINTS}"
CLAIMS = (
    Claim(
        "c1", f"With d^2 parameters full rank is far better than half of it, {SEEN}",
        "loss at rank d over loss at rank d / 2, one layer, one copy", "at most", 0.3, by="ours",
    ),
    Claim(
        "c2", f"With d^3 parameters full rank is better than half of it, {SEEN}",
        "loss at rank d less loss at rank d / 2, one layer, d copies", "at most", 0.0, by="ours",
    ),
    Claim(
        "c3", f"One full-rank head beats rank one with d times its parameters, {SEEN}",
        "loss at rank d with one copy less loss at rank 1 with d copies", "at most", 0.0, by="ours",
    ),
    Claim(
        "c4", f"With d^2 parameters half of full rank is hardly better than rank one, {SEEN}",
        "loss at rank d / 2 over loss at rank 1, one layer, one copy", "at least", 0.7, by="ours",
    ),
    Claim(
        "c5", f"The W that one full-rank head learns is a multiple of -I, {SEEN}",
        "angle of W to the identity in degrees", "at least", 175.0, by="ours",
    ),
    Claim(
        "c6", f"A step of one full-rank head takes no longer than one of d heads of rank one, {SEEN}",
        "seconds of a training step, rank d over rank 1, one copy each, in turns", "at most", 1.0, by="ours",
    ),
)  # fmt: skip


def measure(setting: Setting) -> Results:
    """Every arm, all seeds at once; then steps of two arms timed in turns."""
    arms = (*NARROW, *WIDE)
    results = {arm: trained(replace(arm, steps=arm.steps * STEPS[setting.quick])) for arm in setting.each(list(arms))}

    def loss(arm: Encoder) -> list[float]:
        return [float(x) for x in results[arm]["loss"]]

    def over(a: Encoder, b: Encoder) -> Measurement:
        return by_seed([x / y for x, y in zip(loss(a), loss(b), strict=True)])

    def less(a: Encoder, b: Encoder) -> Measurement:
        return by_seed([x - y for x, y in zip(loss(a), loss(b), strict=True)])

    one, _, half, full = NARROW
    times = step_times(full, one)
    measured = {
        "c1": over(full, half),
        "c2": less(WIDE[2], WIDE[1]),
        "c3": less(full, WIDE[0]),
        "c4": over(half, one),
        "c5": by_seed(results[full]["heads"]["angle"]),
        "c6": by_seed([a / b for a, b in times], of="repeats"),
    }
    rows = [_row(arm, result) for arm, result in results.items()]
    table = {
        "rows": rows,
        "seeds": BASE.seeds,
        "step_milliseconds": {
            name: 1000 * median(pair[n] for pair in times) for n, name in enumerate(("full rank", "rank one"))
        },
    }
    return Results(measured, {"small": table})


def step_times(a: Encoder, b: Encoder) -> list[tuple[float, float]]:
    """Seconds of a forward and backward pass of each, in turns, so that both see the same machine."""
    steps = [partial(_pass, Encoders(arm)) for arm in (a, b)]
    for step in steps:
        step()
    return [(_seconds(steps[0]), _seconds(steps[1])) for _ in range(REPEATS)]


def _pass(model: Encoders) -> None:
    torch.autograd.grad(losses(model, drawn(model.arm, model.arm.batch, "cpu")).sum(), model.parameters)


def _seconds(step: partial[None]) -> float:
    start = time.process_time()  # of this process alone, whatever else the machine does
    for _ in range(TIMED):
        step()
    return (time.process_time() - start) / TIMED


def _row(arm: Encoder, result: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of an arm: sizes, losses, and W of its heads."""
    means = {name: fmean(values) for name, values in result["heads"].items()}
    return {
        **{name: arm.options[name] for name in ("layers", "copies", "rank")},
        "steps": arm.steps,
        "heads": arm.heads,
        "losses": result["loss"],
        "mean_loss": fmean(result["loss"]),
        "least": min(result["loss"]),
        **means,
        "curve": [[100 * (n + 0.5), loss] for n, loss in enumerate(result["curve"])],
    }


STUDY = Study("small encoders", CLAIMS, measure)
