"""Softmax attention as an interpolator, constructed: the head with anchors in closed form, its error by anchors, heads
and temperature, and its map (study a), and functions of a whole sequence by attention alone, in two layers, and in
one layer and a softmax (study b).

Functions of a sequence begin with a head whose logits are all 0: it averages over tokens, so that values which depend
on a token's place collect every linear form of the whole sequence, exactly. Then

    two layers           one head with anchors for every unit of f(X) = sum_i c_i ReLU(w_i^T vec X + t_i)
    layer and softmax    one softmax over a grid of anchors z_k in the space of vec X, with the values f(z_k)

The constructions are of this project; the paper's own may differ.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locater.spectrum import moments
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.devices_and_processes import draw_normal, log_slope
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory.approximation import (
    Anchors,
    anchor_logits,
    best_sharpness,
    edge_error,
    head_maps,
    heads_bound,
    interpolate,
    interpolate_by_heads,
    interpolation_bound,
    largest_error,
    ripple,
    segments,
)

# ---- a: the head with anchors ----


LOW, HIGH = -1.0, 1.0
HARD_SHARPNESS = 100.0  # beta D^2 at which softmax takes the nearest anchor
ANCHOR_COUNTS = (4, 8, 16, 32, 64, 128, 256)
HEADS = (1, 2, 4, 8, 16)
PER_HEAD = 8  # anchors
SHARPNESSES = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0, 16.0, 100.0)
GRID = 20_001

HEAD_CLAIMS = (
    Claim(
        "a1", "A softmax head approximates a truncated linear function, a generalised ReLU, to any precision",
        f"largest error with {ANCHOR_COUNTS[-1]} anchors on [-1, 1]", "at most", 0.005, where="abstract", bound="ours",
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
        (interpolate_by_heads(s, segments(LOW, HIGH, count, heads, sharpness)) - s.clamp(LOW, HIGH)).abs().max()
    )


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
    W, _ = joint_map(draw_normal(width, seed=0) / math.sqrt(width), 0.1, anchors)
    of = moments(torch.eye(len(W), dtype=torch.float64), W)
    singular = torch.linalg.svdvals(W)
    return {
        "anchors": count, "sharpness": sharpness, "rank": int((singular > 1e-10 * singular[0]).sum()),
        "stable_rank": float(of.stable_rank), "mean": float(of.mean), "scale": float(of.frobenius_sq.sqrt()),
        "beta": anchors.beta, "temperature": 1 / anchors.beta, "largest_eigenvalue": float(torch.linalg.eigvals(W).abs().max() / singular[0]),
        "third": float(singular[2] / singular[0]), "logits": logit_range([anchors]),
    }  # fmt: skip


def measure_head(setting: Setting) -> Results:
    hard = {p: largest_error(Anchors.sharp(LOW, HIGH, p, HARD_SHARPNESS)) for p in ANCHOR_COUNTS}
    by_heads = {h: heads_error(h, PER_HEAD, HARD_SHARPNESS) for h in HEADS}
    best = best_sharpness(16)
    tuned = {p: largest_error(Anchors.sharp(LOW, HIGH, p, best)) for p in ANCHOR_COUNTS}
    one = Anchors.sharp(LOW, HIGH, 8 * (PER_HEAD - 1) + 1, best)
    ranges = logit_range([one]), logit_range(segments(LOW, HIGH, PER_HEAD, 8, best))
    maps = [map_row(p, x) for p in (8, 64) for x in (best, HARD_SHARPNESS)]
    fixed = "none: solved"
    measured = {
        "a1": Measurement(hard[ANCHOR_COUNTS[-1]], 0.0, fixed),
        "a2": Measurement(log_slope([p - 1 for p in ANCHOR_COUNTS], list(hard.values())), 0.0, fixed),
        "a3": Measurement(log_slope(list(HEADS), list(by_heads.values())), 0.0, fixed),
        "a4": Measurement(largest_over_bound(), 0.0, fixed),
        "a5": Measurement(tuned[16] / hard[16], 0.0, fixed, {"sharpness": best}),
        "a6": Measurement(ripple_difference(), 0.0, fixed),
        "a7": Measurement(ranges[1] / ranges[0], 0.0, fixed, {"one_head": ranges[0], "eight_heads": ranges[1]}),
        "a8": Measurement(max(max(row["largest_eigenvalue"], row["third"]) for row in maps), 0.0, fixed),
    }
    tables = {
        "by_anchors": [{"anchors": p, "hard": hard[p], "half_gap": (HIGH - LOW) / (p - 1) / 2, "tuned": tuned[p]} for p in ANCHOR_COUNTS],
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


HEAD_STUDY = Study("the head with anchors", HEAD_CLAIMS, measure_head)


# ---- b: whole sequences ----


UNITS = 6
SEQUENCE_TOKENS, SEQUENCE_WIDTH = 3, 2  # of the two layers
SEQUENCE_ANCHORS = (4, 8, 16, 32, 64)
SIDES = (4, 8, 16, 32)  # anchors on an axis of the grid; two tokens of one channel
SAMPLE_POINTS = 4000

SEQUENCE_CLAIMS = (
    Claim(
        "b1", "Two layers of self-attention, with linear maps, approximate a function of the whole sequence",
        f"largest error over the largest |f|, {SEQUENCE_ANCHORS[-1]} anchors a head", "at most", 0.05, where="abstract", bound="ours",
    ),
    Claim(
        "b2", "So does one layer, followed by a softmax function",
        f"largest error over the largest |f|, two tokens, {SIDES[-1]} anchors an axis", "at most", 0.05, where="abstract", bound="ours",
    ),
    Claim(
        "b3", "The error of two layers falls as 1/p",
        "slope of log error in log (p - 1), nearest anchor", "about", -1.0, 0.15, by="ours",
    ),
    Claim(
        "b4", "That of one layer and a softmax falls as p^(-1/n) for n numbers: it pays for the second layer with anchors",
        "slope of log error in log of all anchors, nearest anchor, n = 2", "about", -0.5, 0.15, by="ours",
    ),
)  # fmt: skip


class TargetFunction(NamedTuple):
    """f(X) = sum_i c_i ReLU(w_i^T vec X + t_i) on [0, 1]^n."""

    weights: Float[Tensor, "units n"]
    shifts: Float[Tensor, " units"]
    scales: Float[Tensor, " units"]

    def __call__(self, z: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
        return (z @ self.weights.mT + self.shifts).clamp_min(0) @ self.scales


def draw_target(numbers: int, seed: int = 0) -> TargetFunction:
    weights = draw_normal(UNITS, numbers, seed=seed) / math.sqrt(numbers)
    return TargetFunction(weights, 0.3 * draw_normal(UNITS, seed=seed + 1), draw_normal(UNITS, seed=seed + 2))


def gather_linear_forms(x: Float[Tensor, "b s d"], weights: Float[Tensor, "out n"]) -> Float[Tensor, "b s out"]:
    """A head with logits 0: every token gets weights vec X. Values are s W_u x_u for the token at place u.

    >>> x = torch.tensor([[[1.0], [2.0]]])
    >>> gather_linear_forms(x, torch.tensor([[10.0, 1.0]])).flatten().tolist()
    [12.0, 12.0]
    """
    tokens, width = x.shape[1:]
    by_place = weights.reshape(len(weights), tokens, width)
    values = tokens * torch.einsum("bud,oud->buo", x, by_place)
    logits = torch.zeros(len(x), tokens, tokens, dtype=x.dtype)
    return logits.softmax(-1) @ values


def two_layers(x: Float[Tensor, "b s d"], f: TargetFunction, count: int, sharpness: float) -> Float[Tensor, "b s"]:
    """Every token's output. A unit that is never positive on the domain has no head."""
    forms = gather_linear_forms(x, f.weights) + f.shifts
    out = torch.zeros(x.shape[:2], dtype=x.dtype)
    for unit, scale in enumerate(f.scales.tolist()):
        most = float(f.weights[unit].clamp_min(0).sum() + f.shifts[unit])
        if most > 0:
            out += scale * interpolate(forms[..., unit], Anchors.sharp(0.0, most, count, sharpness))
    return out


def layer_and_softmax(
    x: Float[Tensor, "b s d"], f: TargetFunction, side: int, sharpness: float
) -> Float[Tensor, "b s"]:
    """The same by one softmax over a grid: logits beta (2 z . z_k - |z_k|^2) are linear in z."""
    numbers = x.shape[1] * x.shape[2]
    z = gather_linear_forms(x, torch.eye(numbers, dtype=x.dtype))
    axis = torch.linspace(0, 1, side, dtype=x.dtype)
    grid = torch.cartesian_prod(*[axis] * numbers).reshape(-1, numbers)
    beta = sharpness * (side - 1) ** 2
    logits = beta * (2 * z @ grid.mT - grid.square().sum(1))
    return logits.softmax(-1) @ f(grid)


def sequence_errors(sharpness: float) -> tuple[list[float], list[float]]:
    """Largest errors over the largest |f|: of two layers by anchors, of a layer and a softmax by the grid's side."""
    generator = torch.Generator().manual_seed(5)
    f, g = draw_target(SEQUENCE_TOKENS * SEQUENCE_WIDTH), draw_target(2, seed=10)
    x = torch.rand(SAMPLE_POINTS, SEQUENCE_TOKENS, SEQUENCE_WIDTH, generator=generator, dtype=torch.float64)
    y = torch.rand(SAMPLE_POINTS, 2, 1, generator=generator, dtype=torch.float64)
    true, other = f(x.flatten(1))[:, None], g(y.flatten(1))[:, None]
    first = [float((two_layers(x, f, p, sharpness) - true).abs().max() / true.abs().max()) for p in SEQUENCE_ANCHORS]
    second = [float((layer_and_softmax(y, g, n, sharpness) - other).abs().max() / other.abs().max()) for n in SIDES]
    return first, second


def measure_sequence(setting: Setting) -> Results:
    hard, tuned = sequence_errors(HARD_SHARPNESS), sequence_errors(best_sharpness(16))
    of = f"none: largest of {SAMPLE_POINTS} sequences"
    measured = {
        "b1": Measurement(hard[0][-1], 0.0, of),
        "b2": Measurement(hard[1][-1], 0.0, of),
        "b3": Measurement(log_slope([p - 1 for p in SEQUENCE_ANCHORS], hard[0]), 0.0, of),
        "b4": Measurement(log_slope([(n - 1) ** 2 for n in SIDES], hard[1]), 0.0, of),
    }
    tables = {
        "two_layers": [{"anchors": p, "in_all": UNITS * p, "hard": a, "tuned": b} for p, a, b in zip(SEQUENCE_ANCHORS, hard[0], tuned[0], strict=True)],
        "layer_and_softmax": [{"side": n, "in_all": n * n, "hard": a, "tuned": b} for n, a, b in zip(SIDES, hard[1], tuned[1], strict=True)],
    }  # fmt: skip
    return Results(measured, tables)


SEQUENCE_STUDY = Study("whole sequences", SEQUENCE_CLAIMS, measure_sequence)
