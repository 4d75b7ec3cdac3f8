"""Heads that nobody trains: the one full-rank head that solves the task (study a), and many heads of rank one, drawn at
random and weighted as well as can be (study b).

**The task.** N points on the unit sphere of R^d. Of a query y the answer is the nearest point, or the farthest; in the
trained models every point asks for the point farthest from it. A softmax head with W = W_Q^T W_K = beta I (or -beta I)
and values x_j gives sum_j p_j x_j with p = softmax(beta <y, x_j>), which becomes the answer as beta grows. With the gap
g between the best and the second inner product the weight on the wrong points is at most (N - 1) exp(-beta g), so that

    |output - answer| <= 2 (N - 1) exp(-beta g).

**Heads of rank one.** Two points x_1, x_2 that are orthonormal, a query y drawn evenly from the sphere of R^d, and hard
attention: a head with the vectors q and k gives x_1 where <q, y> <k, x_1 - x_2> is positive, else x_2. With u = (x_1 -
x_2) / sqrt(2), which is drawn evenly too,

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
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study

# ---- a: one full-rank head ----


Points = Float[Tensor, "*n N d"]

WIDTH, POINTS = 64, 16  # the published size
TEMPERATURES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 1e4, 1e5, 1e6)
SEEDS = 8
DRAWS = {True: 64, False: 512}  # sets of points by seed
POINT_COUNTS = (4, 64, 256)
GAP = 1e-3  # at a smaller gap the answer itself is in doubt

FULL_RANK_CLAIMS = (
    Claim(
        "a1", "One full-rank head, W a large multiple of -I, gives every point the one farthest from it, at any N",
        f"largest distance from the answer over all sets, N = 4 ... 256, beta {TEMPERATURES[-1]:.0e}, gaps above {GAP:g}", "at most", 1e-10,
        where="", bound="ours",
    ),
    Claim(
        "a2", "So does +I for the nearest point and a query of its own",
        f"largest distance from the answer, d = {WIDTH}, N = {POINTS}, beta {TEMPERATURES[-1]:.0e}, gaps above {GAP:g}", "at most", 1e-10,
        where="", bound="ours",
    ),
    Claim(
        "a3", "At a finite temperature the distance is at most 2 (N - 1) exp(-beta gap)",
        "largest of distance less bound, all temperatures", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a4", "A W of the published norm, 2400, is enough for the published loss of one head, where scores are divided by sqrt(d)",
        f"squared error of -beta I, ||beta I||_F = 2400 / sqrt({WIDTH}), d = {WIDTH}, N = {POINTS}", "at most", 0.015, by="ours",
    ),
)  # fmt: skip


def sphere(*shape: int, seed: int) -> Float[Tensor, "*shape"]:
    """Points drawn evenly from the unit sphere of the last axis, float64.

    >>> bool((sphere(3, 5, seed=0).norm(dim=-1) - 1).abs().max() < 1e-12)
    True
    """
    return torch.nn.functional.normalize(draw_normal(*shape, seed=seed), dim=-1)


def farthest(x: Points) -> Points:
    """Of every point the one with the least inner product.

    >>> farthest(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))[0]
    tensor([-1.,  0.])
    """
    return points_of_highest_score(x, -x @ x.mT)


def points_of_highest_score(x: Points, scores: Float[Tensor, "*n M N"]) -> Float[Tensor, "*n M d"]:
    """The point of the highest score, for each row of scores."""
    best = scores.argmax(-1, keepdim=True)
    return x.gather(-2, best.expand(*best.shape[:-1], x.shape[-1]))


def full_rank_head(y: Float[Tensor, "*n M d"], x: Points, W: Float[Tensor, "d d"]) -> Float[Tensor, "*n M d"]:
    """One head: queries y, keys x, values x."""
    return torch.softmax(y @ W @ x.mT, -1) @ x


def gaps(scores: Float[Tensor, "*n M N"]) -> Float[Tensor, "*n M"]:
    """Highest less second score of each row."""
    top = scores.topk(2, -1).values
    return top[..., 0] - top[..., 1]


def distances_and_gaps(x: Points, beta: float) -> tuple[Float[Tensor, "*n N"], Float[Tensor, "*n N"]]:
    """Distance of the head -beta I from the farthest point, and the gap, for every point."""
    scores = -x @ x.mT
    out = full_rank_head(x, x, -beta * torch.eye(x.shape[-1], dtype=x.dtype))
    return (out - points_of_highest_score(x, scores)).norm(dim=-1), gaps(scores)


def measure_full_rank_head(setting: Setting) -> Results:
    """The head on random sets, by temperature and number of points."""
    draws, beta = DRAWS[setting.quick], TEMPERATURES[-1]
    sets = [sphere(draws, POINTS, WIDTH, seed=seed) for seed in range(SEEDS)]
    sharp, above, curve = [], [], []
    for temperature in setting.each(list(TEMPERATURES)):
        squared = []
        for x in sets:
            distance, gap = distances_and_gaps(x, temperature)
            above.append(float((distance - 2 * (POINTS - 1) * (-temperature * gap).exp()).max()))
            squared.append(float(distance.square().mean()))
        curve.append({"beta": temperature, "error": sum(squared) / SEEDS, "by_seed": squared})
    for x in (*sets, *(sphere(4, n, WIDTH, seed=100 + n) for n in POINT_COUNTS)):
        distance, gap = distances_and_gaps(x, beta)
        sharp.append(float(distance[gap > GAP].max()))
    of_size = 2400 / WIDTH  # beta sqrt(d) = 2400 / sqrt(d), since logits are divided by sqrt(d)
    at_size = [float(distances_and_gaps(x, of_size)[0].square().mean()) for x in sets]
    measured = {
        "a1": Measurement(max(sharp), 0.0, f"none: largest of {len(sharp)} batches of sets"),
        "a2": Measurement(_largest_distance_from_nearest(sets, beta), 0.0, f"none: largest of {SEEDS * draws} sets"),
        "a3": Measurement(max(above), 0.0, f"none: largest of {len(above)} batches of sets"),
        "a4": by_seed(at_size),
    }
    return Results(measured, {"temperature": _temperature_table(curve, draws)})


def _largest_distance_from_nearest(sets: list[Tensor], beta: float) -> float:
    """Largest distance from the nearest point, of queries that are not among the points."""
    worst = 0.0
    for seed, x in enumerate(sets):
        y = sphere(len(x), 1, WIDTH, seed=1000 + seed)
        scores = y @ x.mT
        clear = gaps(scores) > GAP
        distance = (
            full_rank_head(y, x, beta * torch.eye(WIDTH, dtype=x.dtype)) - points_of_highest_score(x, scores)
        ).norm(dim=-1)
        worst = max(worst, float(distance[clear].max()))
    return worst


def _temperature_table(curve: list[dict[str, Any]], draws: int) -> dict[str, Any]:
    return {"rows": curve, "width": WIDTH, "points": POINTS, "sets": SEEDS * draws}


FULL_RANK_STUDY = Study("one full-rank head", FULL_RANK_CLAIMS, measure_full_rank_head)


# ---- b: many heads of rank one ----


Vectors = Float[Tensor, "H d"]

WIDTHS = (8, 64)
HEAD_COUNTS = {True: (1, 4, 16, 64, 256, 1024), False: (1, 4, 16, 64, 256, 1024, 4096)}
SAMPLES = {True: 200_000, False: 1_000_000}  # of a simulation
PAIRED = 12  # heads of it
NODES = 4001  # of the integral over t
# Of the paper's code, by width and number of heads
PUBLISHED = {8: {1: 0.69, 64: 0.28, 1024: 0.165, 16384: 0.13}, 64: {1: 0.72, 64: 0.47, 1024: 0.27, 16384: 0.185}}

RANDOM_CLAIMS = (
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


def head_products(q: Vectors, k: Vectors) -> Float[Tensor, "H H"]:
    """C, the expected products of heads."""
    angles = [(x @ x.mT).clamp(-1, 1).asin() for x in (q, k)]
    return 0.5 + 2 / math.pi**2 * angles[0] * angles[1]


def products_with_nearest(q: Vectors, k: Vectors) -> Float[Tensor, " H"]:
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
    C, b = head_products(q, k), products_with_nearest(q, k)
    weights = torch.linalg.solve(C, b)
    return float(1 - weights @ b), weights


def simulate_heads(q: Vectors, k: Vectors, samples: int, seed: int) -> tuple[Tensor, Tensor]:
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


def measure_random_heads(setting: Setting) -> Results:
    """Formulas against simulations, and the error over the number of heads."""
    samples = SAMPLES[setting.quick]
    q, k = random_heads(PAIRED, 8, seed=50)
    taken, _ = simulate_heads(q, k, samples, seed=0)
    apart = float(((0.5 + 0.5 * taken.mT @ taken / samples) - head_products(q, k)).abs().max())
    changes = []
    for seed in range(SEEDS):
        heads = random_heads(64, 8, seed)
        error, weights = best_error(*heads)
        changes.append(simulated_error(*simulate_heads(*heads, samples // 8, seed=1 + seed), weights) - error)
    errors = {
        (d, count): [best_error(*random_heads(count, d, seed=100 + seed))[0] for seed in range(SEEDS)]
        for d, count in setting.each([(d, count) for d in WIDTHS for count in HEAD_COUNTS[setting.quick]])
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


RANDOM_STUDY = Study("random heads of rank one", RANDOM_CLAIMS, measure_random_heads)
