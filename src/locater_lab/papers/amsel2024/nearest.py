"""The task, and the one full-rank head that solves it: study a.

N points on the unit sphere of R^d. Of a query y the answer is the nearest point, or the farthest; in the trained models
every point asks for the point farthest from it. A softmax head with W = W_Q^T W_K = beta I (or -beta I) and values x_j
gives sum_j p_j x_j with p = softmax(beta <y, x_j>), which becomes the answer as beta grows. With the gap g between the
best and the second inner product the weight on the wrong points is at most (N - 1) exp(-beta g), so that

    |output - answer| <= 2 (N - 1) exp(-beta g).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study

Points = Float[Tensor, "*n N d"]

WIDTH, POINTS = 64, 16  # the published size
TEMPERATURES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 1e4, 1e5, 1e6)
SEEDS = 8
DRAWS = {True: 64, False: 512}  # sets of points by seed
COUNTS = (4, 64, 256)
GAP = 1e-3  # at a smaller gap the answer itself is in doubt

CLAIMS = (
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
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=-1)


def farthest(x: Points) -> Points:
    """Of every point the one with the least inner product.

    >>> farthest(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))[0]
    tensor([-1.,  0.])
    """
    return chosen(x, -x @ x.mT)


def chosen(x: Points, scores: Float[Tensor, "*n M N"]) -> Float[Tensor, "*n M d"]:
    """The point of the highest score, for each row of scores."""
    best = scores.argmax(-1, keepdim=True)
    return x.gather(-2, best.expand(*best.shape[:-1], x.shape[-1]))


def head(y: Float[Tensor, "*n M d"], x: Points, W: Float[Tensor, "d d"]) -> Float[Tensor, "*n M d"]:
    """One head: queries y, keys x, values x."""
    return torch.softmax(y @ W @ x.mT, -1) @ x


def gaps(scores: Float[Tensor, "*n M N"]) -> Float[Tensor, "*n M"]:
    """Highest less second score of each row."""
    top = scores.topk(2, -1).values
    return top[..., 0] - top[..., 1]


def errors(x: Points, beta: float) -> tuple[Float[Tensor, "*n N"], Float[Tensor, "*n N"]]:
    """Distance of the head -beta I from the farthest point, and the gap, for every point."""
    scores = -x @ x.mT
    out = head(x, x, -beta * torch.eye(x.shape[-1], dtype=x.dtype))
    return (out - chosen(x, scores)).norm(dim=-1), gaps(scores)


def measure(setting: Setting) -> Results:
    """The head on random sets, by temperature and number of points."""
    draws, beta = DRAWS[setting.quick], TEMPERATURES[-1]
    sets = [sphere(draws, POINTS, WIDTH, seed=seed) for seed in range(SEEDS)]
    sharp, above, curve = [], [], []
    for temperature in setting.each(list(TEMPERATURES)):
        squared = []
        for x in sets:
            distance, gap = errors(x, temperature)
            above.append(float((distance - 2 * (POINTS - 1) * (-temperature * gap).exp()).max()))
            squared.append(float(distance.square().mean()))
        curve.append({"beta": temperature, "error": sum(squared) / SEEDS, "by_seed": squared})
    for x in (*sets, *(sphere(4, n, WIDTH, seed=100 + n) for n in COUNTS)):
        distance, gap = errors(x, beta)
        sharp.append(float(distance[gap > GAP].max()))
    of_size = 2400 / WIDTH  # beta sqrt(d) = 2400 / sqrt(d), since logits are divided by sqrt(d)
    at_size = [float(errors(x, of_size)[0].square().mean()) for x in sets]
    measured = {
        "a1": Measurement(max(sharp), 0.0, f"none: largest of {len(sharp)} batches of sets"),
        "a2": Measurement(_nearest(sets, beta), 0.0, f"none: largest of {SEEDS * draws} sets"),
        "a3": Measurement(max(above), 0.0, f"none: largest of {len(above)} batches of sets"),
        "a4": by_seed(at_size),
    }
    return Results(measured, {"temperature": _table(curve, draws)})


def _nearest(sets: list[Tensor], beta: float) -> float:
    """Largest distance from the nearest point, of queries that are not among the points."""
    worst = 0.0
    for seed, x in enumerate(sets):
        y = sphere(len(x), 1, WIDTH, seed=1000 + seed)
        scores = y @ x.mT
        clear = gaps(scores) > GAP
        distance = (head(y, x, beta * torch.eye(WIDTH, dtype=x.dtype)) - chosen(x, scores)).norm(dim=-1)
        worst = max(worst, float(distance[clear].max()))
    return worst


def _table(curve: list[dict[str, Any]], draws: int) -> dict[str, Any]:
    return {"rows": curve, "width": WIDTH, "points": POINTS, "sets": SEEDS * draws}


STUDY = Study("one full-rank head", CLAIMS, measure)
