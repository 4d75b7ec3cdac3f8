"""Many heads of rank one, drawn at random and weighted as well as can be: study b.

Two points x_1, x_2 that are orthonormal, a query y drawn evenly from the sphere of R^d, and hard attention: a head with
the vectors q and k gives x_1 where <q, y> <k, x_1 - x_2> is positive, else x_2. With u = (x_1 - x_2) / sqrt(2), which
is drawn evenly too,

    E <head_i, head_j>  = 1/2 + (2 / pi^2) asin(<q_i, q_j>) asin(<k_i, k_j>)       = C_ij
    E <head_i, nearest> = 1/2 + g(<q_i, k_i>) / 2                                  = b_i
    g(r) = (2 / pi) E [asin(t) sign(<k, u>) | <q, k> = r],  t = <q, u>

and the best weights a = C^-1 b leave the squared error 1 - <a, b>. Given t, <k, u> is r t + sqrt((1 - r^2) (1 - t^2)) w
with w one coordinate of an even point of the sphere of R^(d-1), so that g is an integral over t alone. Heads are drawn
as in the paper's code: q evenly from the sphere, the cosine of q and k evenly from -1 to 1. One full-rank head has no
error here.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.amsel2024.nearest import sphere

Vectors = Float[Tensor, "H d"]

SEEDS = 8
WIDTHS = (8, 64)
COUNTS = {True: (1, 4, 16, 64, 256, 1024), False: (1, 4, 16, 64, 256, 1024, 4096)}
SAMPLES = {True: 200_000, False: 1_000_000}  # of a simulation
PAIRED = 12  # heads of it
NODES = 4001  # of the integral over t
# Of the paper's code, by width and number of heads
PUBLISHED = {8: {1: 0.69, 64: 0.28, 1024: 0.165, 16384: 0.13}, 64: {1: 0.72, 64: 0.47, 1024: 0.27, 16384: 0.185}}

CLAIMS = (
    Claim(
        "b1", "The arcsine formula for the product of two random heads of rank one",
        f"largest distance from a simulation, {PAIRED} heads, d = 8", "at most", 0.01, where="", bound="ours",
    ),
    Claim(
        "b2", "The error of the best weights, from the formulas, is that of the heads themselves",
        "error of 64 weighted heads in a simulation less that of the formulas, d = 8", "about", 0.0, 0.01, by="ours",
    ),
    Claim(
        "b3", "64 heads of rank one, d = 8, as in the paper's code",
        "squared error with the best weights", "about", 0.28, 0.03, where="code", bound="ours",
    ),
    Claim(
        "b4", "1024 heads, d = 8",
        "squared error with the best weights", "about", 0.165, 0.03, where="code", bound="ours",
    ),
    Claim(
        "b5", "64 heads, d = 64",
        "squared error with the best weights", "about", 0.47, 0.03, where="code", bound="ours",
    ),
    Claim(
        "b6", "1024 heads, d = 64",
        "squared error with the best weights", "about", 0.27, 0.03, where="code", bound="ours",
    ),
    Claim(
        "b7", "Sixteen times the heads do not halve the error of rank one",
        "squared error of 1024 heads over that of 64, d = 64", "at least", 0.5, by="ours",
    ),
)  # fmt: skip


def random_heads(count: int, d: int, seed: int) -> tuple[Vectors, Vectors]:
    """q and k of heads: q evenly from the sphere, the cosine of the two evenly from -1 to 1.

    >>> q, k = random_heads(5, 8, seed=0)
    >>> bool((k.norm(dim=-1) - 1).abs().max() < 1e-12)
    True
    """
    q, other = sphere(count, d, seed=2 * seed), sphere(count, d, seed=2 * seed + 1)
    across = torch.nn.functional.normalize(other - (other * q).sum(-1, keepdim=True) * q, dim=-1)
    generator = torch.Generator().manual_seed(seed)
    r = 2 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 1
    return q, r * q + (1 - r.square()).sqrt() * across


def products(q: Vectors, k: Vectors) -> Float[Tensor, "H H"]:
    """C, the expected products of heads."""
    angles = [(x @ x.mT).clamp(-1, 1).asin() for x in (q, k)]
    return 0.5 + 2 / math.pi**2 * angles[0] * angles[1]


def with_nearest(q: Vectors, k: Vectors) -> Float[Tensor, " H"]:
    """b, the expected products of heads with the nearest point."""
    return 0.5 + 0.5 * agreement((q * k).sum(-1), q.shape[-1])


def agreement(r: Float[Tensor, " H"], d: int) -> Float[Tensor, " H"]:
    """g, by the trapezoid rule over the angle of t."""
    angle = torch.linspace(0, math.pi, NODES, dtype=torch.float64)[1:-1]  # t = cos(angle)
    t, density = angle.cos(), angle.sin() ** (d - 2)
    r = r.clamp(-1, 1)[:, None]
    reach = r * t / ((1 - r.square()).clamp_min(1e-300).sqrt() * angle.sin())
    signs = _mean_sign(d)(reach)
    return 2 / math.pi * (t.asin() * density * signs).sum(-1) / density.sum()


@cache
def _mean_sign(d: int) -> Any:
    """E sign(c + w) as a function of c, w one coordinate of an even point of the sphere of R^(d-1), d > 2."""
    angle = torch.linspace(0, math.pi, NODES, dtype=torch.float64)
    weight = angle.sin() ** (d - 3)
    below = torch.cat([torch.zeros(1, dtype=torch.float64), ((weight[1:] + weight[:-1]) / 2).cumsum(0)])
    below = below / below[-1]  # share of w above cos(angle)

    def mean_sign(c: Tensor) -> Tensor:
        place = torch.acos((-c).clamp(-1, 1)) * (NODES - 1) / math.pi  # w above -c: angles below this
        low = place.floor().long().clamp(0, NODES - 2)
        share = below[low] + (place - low) * (below[low + 1] - below[low])
        return 2 * share - 1

    return mean_sign


def best_error(q: Vectors, k: Vectors) -> tuple[float, Float[Tensor, " H"]]:
    """Squared error of the best weights, and the weights."""
    C, b = products(q, k), with_nearest(q, k)
    weights = torch.linalg.solve(C, b)
    return float(1 - weights @ b), weights


def simulated(q: Vectors, k: Vectors, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Which point each head takes (+1 the first, -1 the second) and which is the nearest, for drawn queries and points.

    Two orthonormal points, from two normal vectors by Gram-Schmidt; nothing here uses u or the formulas.
    """
    d = q.shape[-1]
    y, first, other = (sphere(samples, d, seed=9000 + 10 * seed + n) for n in range(3))
    second = torch.nn.functional.normalize(other - (other * first).sum(-1, keepdim=True) * first, dim=-1)
    taken = torch.where((y @ q.mT) * (first @ k.mT) > (y @ q.mT) * (second @ k.mT), 1.0, -1.0)
    nearest = torch.where((y * first).sum(-1) > (y * second).sum(-1), 1.0, -1.0)
    return taken.double(), nearest.double()


def simulated_error(taken: Tensor, nearest: Tensor, weights: Float[Tensor, " H"]) -> float:
    """Squared distance of the weighted heads from the nearest point: the points are orthonormal, so that weights on each
    add up.
    """
    on_first, on_second = ((taken == sign).double() @ weights for sign in (1.0, -1.0))
    first = (nearest > 0).double()
    return float(((on_first - first).square() + (on_second - (1 - first)).square()).mean())


def measure(setting: Setting) -> Results:
    """Formulas against simulations, and the error over the number of heads."""
    samples = SAMPLES[setting.quick]
    q, k = random_heads(PAIRED, 8, seed=50)
    taken, _ = simulated(q, k, samples, seed=0)
    apart = float(((0.5 + 0.5 * taken.mT @ taken / samples) - products(q, k)).abs().max())
    changes = []
    for seed in range(SEEDS):
        heads = random_heads(64, 8, seed)
        error, weights = best_error(*heads)
        changes.append(simulated_error(*simulated(*heads, samples // 8, seed=1 + seed), weights) - error)
    errors = {
        (d, count): [best_error(*random_heads(count, d, seed=100 + seed))[0] for seed in range(SEEDS)]
        for d, count in setting.each([(d, count) for d in WIDTHS for count in COUNTS[setting.quick]])
    }
    measured = {
        "b1": Measurement(apart, 0.0, f"none: largest of {PAIRED**2} pairs, {samples:,} draws"),
        "b2": by_seed(changes),
        **{f"b{3 + n}": by_seed(errors[place]) for n, place in enumerate(((8, 64), (8, 1024), (64, 64), (64, 1024)))},
        "b7": by_seed([a / b for a, b in zip(errors[64, 1024], errors[64, 64], strict=True)]),
    }
    rows = [
        {
            "width": d,
            "heads": count,
            "error": fmean(values),
            "least": min(values),
            "most": max(values),
            "published": PUBLISHED[d].get(count),
        }
        for (d, count), values in errors.items()
    ]
    return Results(measured, {"random_heads": {"rows": rows, "draws": SEEDS}})


STUDY = Study("random heads of rank one", CLAIMS, measure)
