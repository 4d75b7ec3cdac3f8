"""The head with anchors in closed form: its error by anchors, heads and temperature, and its map: study a."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from locater.spectrum import moments
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory.approximation import (
    Anchors,
    anchor_logits,
    best_sharpness,
    edge_error,
    head_maps,
    heads_bound,
    interpolated_by_heads,
    interpolation_bound,
    largest_error,
    ripple,
    segments,
)

LOW, HIGH = -1.0, 1.0
HARD = 100.0  # beta D^2 at which softmax takes the nearest anchor
COUNTS = (4, 8, 16, 32, 64, 128, 256)
HEADS = (1, 2, 4, 8, 16)
PER_HEAD = 8  # anchors
SHARPNESSES = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0, 16.0, 100.0)
GRID = 20_001

CLAIMS = (
    Claim(
        "a1", "A softmax head approximates a truncated linear function, a generalised ReLU, to any precision",
        f"largest error with {COUNTS[-1]} anchors on [-1, 1]", "at most", 0.005, where="abstract", bound="ours",
    ),
    Claim(
        "a2", "Its error falls as 1/p in the number of anchors p",
        "slope of log error in log (p - 1), nearest anchor", "about", -1.0, 0.05, where="Theorem 3.1 (version 1)", bound="ours",
    ),
    Claim(
        "a3", "With H heads it falls as 1/(p H), with the heads added up as here",
        f"slope of log error in log H, {PER_HEAD} anchors a head", "about", -1.0, 0.05, where="Theorem 3.2 (version 1)", bound="ours",
    ),
    Claim(
        "a4", "Errors stay below the bound that is derived here, for every temperature, number of anchors and of heads",
        "largest of error over bound", "at most", 1.0, by="ours",
    ),
    Claim(
        "a5", "The nearest anchor is not the best that softmax can do: at the best temperature the error is a fifth or less",
        "least largest error over that of the nearest anchor", "at most", 0.2, by="ours",
    ),
    Claim(
        "a6", "Between anchors the error is (2 pi / x) exp(-pi^2 / x) gaps, x = beta D^2",
        "largest relative difference from it, x from 0.5 to 2.5, middle of 64 anchors", "at most", 0.05, by="ours",
    ),
    Claim(
        "a7", "Heads buy smaller logits: with as many anchors in all, eight heads need a range of logits that is half as large or less",
        "largest range of a row's logits with 8 heads of 8 anchors, over one head with 57 (the same gap)", "at most", 0.5, by="ours",
    ),
    Claim(
        "a8", "The head's query-key map has rank 2, and no eigenvalue but 0 where tokens and anchors have channels of their own",
        "largest of |eigenvalue| over the spectral norm, and of the third singular value over the first", "at most", 1e-10, by="ours",
    ),
)  # fmt: skip


def heads_error(heads: int, count: int, sharpness: float) -> float:
    s = torch.linspace(LOW - 0.5, HIGH + 0.5, GRID, dtype=torch.float64)
    return float(
        (interpolated_by_heads(s, segments(LOW, HIGH, count, heads, sharpness)) - s.clamp(LOW, HIGH)).abs().max()
    )


def slope(at: list[float], values: list[float]) -> float:
    """Of log values in log at, by least squares.

    >>> round(slope([1.0, 2.0, 4.0], [8.0, 4.0, 2.0]), 6)
    -1.0
    """
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (at, values))
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def largest_over_bound() -> float:
    ratios = []
    for x in SHARPNESSES:
        for p in (2, 3, 8, 33):
            part = Anchors.sharp(LOW, HIGH, p, x)
            ratios.append(largest_error(part, 4001) / part.gap / interpolation_bound(x))
        for h in (2, 5):
            gap = (HIGH - LOW) / h / (PER_HEAD - 1)
            ratios.append(heads_error(h, PER_HEAD, x) / gap / heads_bound(x, PER_HEAD, h))
    return max(ratios)


def ripple_difference() -> float:
    """Of the closed form, in the middle of 64 anchors."""
    off = []
    for x in (0.5, 0.75, 1.0, 1.5, 2.0, 2.5):
        part = Anchors.sharp(LOW, HIGH, 64, x)
        s = torch.linspace(-part.gap / 2, part.gap / 2, 2001, dtype=torch.float64)
        error = (anchor_logits(s, part).softmax(-1) @ part.values - s).abs().max() / part.gap
        off.append(abs(float(error) / ripple(x) - 1))
    return max(off)


def logit_range(parts: list[Anchors]) -> float:
    """The largest difference of two logits of a row, over all s in the range and all heads."""
    s = torch.tensor([LOW, HIGH], dtype=torch.float64)
    rows = [anchor_logits(s, part) for part in parts]
    return max(float((row.amax(-1) - row.amin(-1)).max()) for row in rows)


def joint_map(weight: Tensor, shift: float, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """The head in one stream: channels (x, 1) of tokens, then two of anchors; W (n, n) maps queries to keys."""
    W, features = head_maps(weight, shift, anchors)
    n = len(W)
    whole = torch.zeros(n + 2, n + 2, dtype=torch.float64)
    whole[:n, n:] = W
    return whole, features


def map_row(count: int, sharpness: float, width: int = 10) -> dict[str, Any]:
    """Rank, mean, scale and temperature of the constructed head's W."""
    anchors = Anchors.sharp(LOW, HIGH, count, sharpness)
    W, _ = joint_map(normal(width, seed=0) / math.sqrt(width), 0.1, anchors)
    of = moments(torch.eye(len(W), dtype=torch.float64), W)
    singular = torch.linalg.svdvals(W)
    return {
        "anchors": count, "sharpness": sharpness, "rank": int((singular > 1e-10 * singular[0]).sum()),
        "stable_rank": float(of.stable_rank), "mean": float(of.mean), "scale": float(of.frobenius_sq.sqrt()),
        "beta": anchors.beta, "temperature": 1 / anchors.beta, "largest_eigenvalue": float(torch.linalg.eigvals(W).abs().max() / singular[0]),
        "third": float(singular[2] / singular[0]), "logits": logit_range([anchors]),
    }  # fmt: skip


def measure(setting: Setting) -> Results:
    hard = {p: largest_error(Anchors.sharp(LOW, HIGH, p, HARD)) for p in COUNTS}
    by_heads = {h: heads_error(h, PER_HEAD, HARD) for h in HEADS}
    best = best_sharpness(16)
    tuned = {p: largest_error(Anchors.sharp(LOW, HIGH, p, best)) for p in COUNTS}
    one = Anchors.sharp(LOW, HIGH, 8 * (PER_HEAD - 1) + 1, best)
    ranges = logit_range([one]), logit_range(segments(LOW, HIGH, PER_HEAD, 8, best))
    maps = [map_row(p, x) for p in (8, 64) for x in (best, HARD)]
    fixed = "none: solved"
    measured = {
        "a1": Measurement(hard[COUNTS[-1]], 0.0, fixed),
        "a2": Measurement(slope([p - 1 for p in COUNTS], list(hard.values())), 0.0, fixed),
        "a3": Measurement(slope(list(HEADS), list(by_heads.values())), 0.0, fixed),
        "a4": Measurement(largest_over_bound(), 0.0, fixed),
        "a5": Measurement(tuned[16] / hard[16], 0.0, fixed, {"sharpness": best}),
        "a6": Measurement(ripple_difference(), 0.0, fixed),
        "a7": Measurement(ranges[1] / ranges[0], 0.0, fixed, {"one_head": ranges[0], "eight_heads": ranges[1]}),
        "a8": Measurement(max(max(row["largest_eigenvalue"], row["third"]) for row in maps), 0.0, fixed),
    }
    tables = {
        "by_anchors": [{"anchors": p, "hard": hard[p], "half_gap": (HIGH - LOW) / (p - 1) / 2, "tuned": tuned[p]} for p in COUNTS],
        "by_heads": [{"heads": h, "error": by_heads[h], "tuned": heads_error(h, PER_HEAD, best)} for h in HEADS],
        "by_temperature": [
            {"sharpness": x, "error": largest_error(part) / part.gap, "edge": edge_error(x), "ripple": ripple(x) if x <= 3 else None,
             "bound": interpolation_bound(x)}
            for x in SHARPNESSES for part in [Anchors.sharp(LOW, HIGH, 32, x)]
        ],
        "constructed_maps": maps,
        "best_sharpness": best,
    }  # fmt: skip
    return Results(measured, tables)


STUDY = Study("the head with anchors", CLAIMS, measure)
