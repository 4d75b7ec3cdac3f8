"""Functions of a whole sequence by attention alone, in two layers, and in one layer and a softmax: study b.

Both begin with a head whose logits are all 0: it averages over tokens, so that values which depend on a token's place
collect every linear form of the whole sequence, exactly. Then

    two layers           one head with anchors for every unit of f(X) = sum_i c_i ReLU(w_i^T vec X + t_i)
    layer and softmax    one softmax over a grid of anchors z_k in the space of vec X, with the values f(z_k)

The constructions are of this project; the paper's own may differ.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.hu2025.construction import HARD, slope
from locater_lab.theory.approximation import Anchors, best_sharpness, interpolated

UNITS = 6
TOKENS, WIDTH = 3, 2  # of the two layers
COUNTS = (4, 8, 16, 32, 64)
SIDES = (4, 8, 16, 32)  # anchors on an axis of the grid; two tokens of one channel
POINTS = 4000

CLAIMS = (
    Claim(
        "b1", "Two layers of self-attention, with linear maps, approximate a function of the whole sequence",
        f"largest error over the largest |f|, {COUNTS[-1]} anchors a head", "at most", 0.05, where="abstract", bound="ours",
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


class Target(NamedTuple):
    """f(X) = sum_i c_i ReLU(w_i^T vec X + t_i) on [0, 1]^n."""

    weights: Float[Tensor, "units n"]
    shifts: Float[Tensor, " units"]
    scales: Float[Tensor, " units"]

    def __call__(self, z: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
        return (z @ self.weights.mT + self.shifts).clamp_min(0) @ self.scales


def target(numbers: int, seed: int = 0) -> Target:
    weights = normal(UNITS, numbers, seed=seed) / math.sqrt(numbers)
    return Target(weights, 0.3 * normal(UNITS, seed=seed + 1), normal(UNITS, seed=seed + 2))


def gathered(x: Float[Tensor, "b s d"], weights: Float[Tensor, "out n"]) -> Float[Tensor, "b s out"]:
    """A head with logits 0: every token gets weights vec X. Values are s W_u x_u for the token at place u.

    >>> x = torch.tensor([[[1.0], [2.0]]])
    >>> gathered(x, torch.tensor([[10.0, 1.0]])).flatten().tolist()
    [12.0, 12.0]
    """
    tokens, width = x.shape[1:]
    by_place = weights.reshape(len(weights), tokens, width)
    values = tokens * torch.einsum("bud,oud->buo", x, by_place)
    logits = torch.zeros(len(x), tokens, tokens, dtype=x.dtype)
    return logits.softmax(-1) @ values


def two_layers(x: Float[Tensor, "b s d"], f: Target, count: int, sharpness: float) -> Float[Tensor, "b s"]:
    """Every token's output. A unit that is never positive on the domain has no head."""
    forms = gathered(x, f.weights) + f.shifts
    out = torch.zeros(x.shape[:2], dtype=x.dtype)
    for unit, scale in enumerate(f.scales.tolist()):
        most = float(f.weights[unit].clamp_min(0).sum() + f.shifts[unit])
        if most > 0:
            out += scale * interpolated(forms[..., unit], Anchors.sharp(0.0, most, count, sharpness))
    return out


def layer_and_softmax(x: Float[Tensor, "b s d"], f: Target, side: int, sharpness: float) -> Float[Tensor, "b s"]:
    """The same by one softmax over a grid: logits beta (2 z . z_k - |z_k|^2) are linear in z."""
    numbers = x.shape[1] * x.shape[2]
    z = gathered(x, torch.eye(numbers, dtype=x.dtype))
    axis = torch.linspace(0, 1, side, dtype=x.dtype)
    grid = torch.cartesian_prod(*[axis] * numbers).reshape(-1, numbers)
    beta = sharpness * (side - 1) ** 2
    logits = beta * (2 * z @ grid.mT - grid.square().sum(1))
    return logits.softmax(-1) @ f(grid)


def errors(sharpness: float) -> tuple[list[float], list[float]]:
    """Largest errors over the largest |f|: of two layers by anchors, of a layer and a softmax by the grid's side."""
    generator = torch.Generator().manual_seed(5)
    f, g = target(TOKENS * WIDTH), target(2, seed=10)
    x = torch.rand(POINTS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.rand(POINTS, 2, 1, generator=generator, dtype=torch.float64)
    true, other = f(x.flatten(1))[:, None], g(y.flatten(1))[:, None]
    first = [float((two_layers(x, f, p, sharpness) - true).abs().max() / true.abs().max()) for p in COUNTS]
    second = [float((layer_and_softmax(y, g, n, sharpness) - other).abs().max() / other.abs().max()) for n in SIDES]
    return first, second


def measure(setting: Setting) -> Results:
    hard, tuned = errors(HARD), errors(best_sharpness(16))
    of = f"none: largest of {POINTS} sequences"
    measured = {
        "b1": Measurement(hard[0][-1], 0.0, of),
        "b2": Measurement(hard[1][-1], 0.0, of),
        "b3": Measurement(slope([p - 1 for p in COUNTS], hard[0]), 0.0, of),
        "b4": Measurement(slope([(n - 1) ** 2 for n in SIDES], hard[1]), 0.0, of),
    }
    tables = {
        "two_layers": [{"anchors": p, "in_all": UNITS * p, "hard": a, "tuned": b} for p, a, b in zip(COUNTS, hard[0], tuned[0], strict=True)],
        "layer_and_softmax": [{"side": n, "in_all": n * n, "hard": a, "tuned": b} for n, a, b in zip(SIDES, hard[1], tuned[1], strict=True)],
    }  # fmt: skip
    return Results(measured, tables)


STUDY = Study("whole sequences", CLAIMS, measure)
