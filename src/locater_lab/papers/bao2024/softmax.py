"""Does a concentrated spectrum localize the true softmax, and does it avoid both collapses? Random-walk tokens, no
approximation. Study b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from locater.measures import rank_residual
from locater.numerics import spearman
from locater.spectrum import moments
from locater.theory import localization
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study

HEAD, LENGTH = 64, 128  # directions of the map; tokens
SCALE = HEAD**-0.5
MEANS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # M, the mean self-logit
VARIATIONS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # standard deviation of the eigenvalues over their mean
SIZES = tuple(2.0 ** (k / 4) for k in range(-8, 37))  # M of a concentrated map, sqrt F of one with mean zero
WALKS, ROWS_OF = {True: 2000, False: 16_000}, {True: 24, False: 200}  # walks per seed: last query alone; every query
CHUNK = 1000  # walks in memory at a time
SEEDS = 12  # correlations of exactly 1 with every seed are judged by signs, which takes so many on a page of this size
NEAR = 8  # the nearest eighth

CLAIMS = (
    Claim(
        "b1", "At the same mean, eigenvalues of smaller variance make attention prefer near tokens more",
        "rank correlation of variance with the centre of the true softmax, least favourable mean", "at most", -0.9,
        where="abstract", bound="ours",
    ),
    Claim(
        "b2", "At the same mean, eigenvalues of smaller variance put more weight on the nearest tokens",
        "rank correlation of variance with the weight on the nearest eighth, least favourable mean", "at most", -0.9,
        by="ours",
    ),
    Claim(
        "b3", "The index Lambda, from two moments, orders heads as the true softmax does",
        "rank correlation of Lambda with the centre of the true softmax, all means and variances", "at least", 0.9, by="ours",
    ),
    Claim(
        "b4", "Small variance and a mean that is not zero can prevent rank collapse and entropy collapse at once",
        "the smaller of residual kept and entropy ratio, at the best mean, tokens of equal norm", "at least", 0.5,
        where="abstract", bound="ours",
    ),
    Claim(
        "b5", "It is the concentration that avoids both: spread eigenvalues of mean zero cannot do as well at any scale",
        "gain of the concentrated map in that number over mean zero at its best scale, tokens of equal norm", "at least", 0.05,
        by="ours",
    ),
    Claim(
        "b6", "The same on the walk as the paper draws it, whose tokens grow with position",
        "gain of the concentrated map in that number over mean zero at its best scale, raw walk", "at least", 0.05, by="ours",
    ),
    Claim(
        "b7", "Effective dimensionality decreases when the spectrum concentrates",
        "rank correlation of concentration with stable rank over 120 drawn spectra", "at most", 0.0, by="summary",
    ),
)  # fmt: skip


def spectrum(mean: float, variation: float, size: float = 0.0) -> Tensor:
    """HEAD eigenvalues: M = `mean` with this coefficient of variation, or mean zero with sqrt F = `size`; normal
    quantiles in shape.

    >>> values = spectrum(4.0, 0.5)
    >>> round(float(SCALE * values.sum()), 6), round(float(values.std(correction=0) / values.mean()), 6)
    (4.0, 0.5)
    """
    shape = torch.special.ndtri((torch.arange(HEAD, dtype=torch.float64) + 0.5) / HEAD)
    shape = shape / shape.square().mean().sqrt()
    return (mean * (1 + variation * shape) / HEAD + size * shape / HEAD**0.5) / SCALE


def walk(count: int, seed: int, unit: bool = False) -> Tensor:
    """(count, LENGTH, HEAD) tokens of random walks with steps I/T; `unit` gives each token |x|^2 = d, as a norm
    does.
    """
    x = torch.randn(count, LENGTH, HEAD, generator=torch.Generator().manual_seed(seed)).cumsum(1) / LENGTH**0.5
    return x * HEAD**0.5 / x.norm(dim=-1, keepdim=True) if unit else x


@dataclass(frozen=True)
class Row:
    """The true softmax of the last query, averaged over walks."""

    centre: float  # mean position of the weight, -1 farthest to 1 nearest
    near: float  # weight on the nearest eighth
    entropy_ratio: float
    participation: float  # 1 / (T sum p^2)


def last_query(x: Tensor, values: Tensor) -> Row:
    """Attention of the last token over all, with W = diag(values), and again with their order reversed: odd noise
    cancels.
    """
    p = torch.stack(
        [
            (SCALE * (x[:, -1] * v).unsqueeze(1) @ x.mT).squeeze(1).softmax(-1)
            for v in (values.float(), values.float().flip(0))
        ]
    )
    at = 2 * (torch.arange(1, LENGTH + 1) - (LENGTH + 1) / 2) / LENGTH
    entropy = torch.special.entr(p).sum(-1) / math.log(LENGTH)
    measures = ((p * at).sum(-1), p[..., -LENGTH // NEAR :].sum(-1), entropy, 1 / p.square().sum(-1) / LENGTH)
    return Row(*(float(each.mean()) for each in measures))


def layer(x: Tensor, values: Tensor) -> tuple[float, float]:
    """Residual that a layer of attention (values and output the identity) keeps, as a share of its input's; mean
    entropy ratio.
    """
    p = (SCALE * (x * values.float()) @ x.mT).softmax(-1)
    kept = rank_residual(p @ x, norm="frobenius") / rank_residual(x, norm="frobenius")
    return float(kept.mean()), float(torch.special.entr(p).sum(-1).mean()) / math.log(LENGTH)


def sweep(seed: int, quick: bool) -> list[list[Row]]:
    """Last-query measures over MEANS x VARIATIONS."""
    parts = [_grid(walk(CHUNK, 1000 * seed + part)) for part in range(WALKS[quick] // CHUNK)]
    return [[_mean_row([part[i][j] for part in parts]) for j in range(len(VARIATIONS))] for i in range(len(MEANS))]


def _grid(x: Tensor) -> list[list[Row]]:
    return [[last_query(x, spectrum(mean, variation)) for variation in VARIATIONS] for mean in MEANS]


def _mean_row(rows: list[Row]) -> Row:
    return Row(*(sum(values) / len(rows) for values in zip(*(astuple(row) for row in rows), strict=True)))


def frontier(seed: int, quick: bool, unit: bool) -> dict[str, list[tuple[float, float]]]:
    """(residual kept, entropy ratio) over SIZES of a concentrated map and of one with mean zero."""
    x = walk(ROWS_OF[quick], seed, unit)
    return {
        "concentrated": [layer(x, spectrum(size, 0.0)) for size in SIZES],
        "mean zero": [layer(x, spectrum(0.0, 0.0, size)) for size in SIZES],
    }


def dimensions(seed: int, each: int = 40) -> tuple[float, list[tuple[float, float]]]:
    """Rank correlation of kappa with stable rank over drawn spectra, and the pairs (kappa, stable rank / d_head).

    Eigenvalues mean + t * noise with normal, exponential and heavy-tailed noise, t from nearly nothing to far beyond
    the mean.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for law in range(3):
        noise = torch.randn(each, HEAD, dtype=torch.float64, generator=generator)
        shape = (noise, -(noise.abs() + 1e-3).log() - 0.64, noise**3)[law]
        values = 1 + torch.logspace(-2, 1.5, each, dtype=torch.float64)[:, None] * shape / shape.std()
        m = moments(torch.eye(HEAD, dtype=torch.float64), torch.diag_embed(values))
        pairs += list(zip(m.concentration.abs().tolist(), (m.stable_rank / HEAD).tolist(), strict=True))
    kappa, rank = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return spearman(kappa, rank) or 0.0, pairs


def measure(setting: Setting) -> Results:
    """Both sweeps for every seed, and the spectra."""
    grids, unit, raw, ranks = [], [], [], []
    for seed in setting.each(list(range(SEEDS))):
        grids.append(sweep(seed, setting.quick))
        unit.append(frontier(seed, setting.quick, unit=True))
        raw.append(frontier(seed, setting.quick, unit=False))
        ranks.append(dimensions(seed))
    gains = [[_best(f["concentrated"]) - _best(f["mean zero"]) for f in each] for each in (unit, raw)]
    measured = {
        "b1": by_seed([_worst(grid, "centre") for grid in grids]),
        "b2": by_seed([_worst(grid, "near") for grid in grids]),
        "b3": by_seed([_agreement(grid) for grid in grids]),
        "b4": by_seed([_best(points["concentrated"]) for points in unit]),
        "b5": by_seed(gains[0]),
        "b6": by_seed(gains[1]),
        "b7": by_seed([correlation for correlation, _ in ranks]),
    }
    tables = {
        "phase": _phase(grids),
        "near_by_mean": _by_mean(grids, "near"),
        "collapse": {"tokens of equal norm": _mean_frontier(unit), "raw walk": _mean_frontier(raw)},
        "stable_rank": _rank_table([pair for _, pairs in ranks for pair in pairs]),
    }
    return Results(measured, tables)


def _best(points: Sequence[Sequence[float]]) -> float:
    return max(min(point) for point in points)


def _mean_frontier(frontiers: Sequence[Mapping[str, list[tuple[float, float]]]]) -> dict[str, dict[str, Any]]:
    """Of each family of maps: the curve averaged over seeds, and the smaller of its two numbers at its best."""
    curves = {name: torch.tensor([each[name] for each in frontiers]).mean(0).tolist() for name in frontiers[0]}
    return {name: {"curve": points, "best": _best(points)} for name, points in curves.items()}


def _correlations(grid: list[list[Row]], name: str) -> list[float]:
    order = torch.tensor(VARIATIONS)
    return [spearman(order, torch.tensor([getattr(cell, name) for cell in row])) or 0.0 for row in grid]


def _worst(grid: list[list[Row]], name: str) -> float:
    return max(_correlations(grid, name))


def _by_mean(grids: list[list[list[Row]]], name: str) -> dict[str, float]:
    each = torch.tensor([_correlations(grid, name) for grid in grids]).mean(0).tolist()
    return {f"M = {mean:g}": value for mean, value in zip(MEANS, each, strict=True)}


def _index() -> Tensor:
    """Lambda (MEANS, VARIATIONS) from the two moments."""
    values = torch.stack([torch.stack([spectrum(mean, variation) for variation in VARIATIONS]) for mean in MEANS])
    F = SCALE**2 * values.square().sum(-1)
    return localization(SCALE * values.sum(-1), F, F)


def _agreement(grid: list[list[Row]]) -> float:
    return spearman(_index().flatten(), torch.tensor([cell.centre for row in grid for cell in row])) or 0.0


def _phase(grids: list[list[list[Row]]]) -> dict[str, Any]:
    names = ("centre", "near", "entropy_ratio", "participation")
    means = {
        n: torch.tensor([[[getattr(c, n) for c in row] for row in grid] for grid in grids]).mean(0).tolist()
        for n in names
    }
    return {"M": list(MEANS), "variation": list(VARIATIONS), "Lambda": _index().tolist(), **means}


def _rank_table(pairs: list[tuple[float, float]]) -> dict[str, float]:
    kappa, rank = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    edges = (0.0, 0.1, 0.5, 0.9, 0.99, 1.001)
    bins = {f"kappa {a:g} to {min(b, 1):g}": rank[(kappa >= a) & (kappa < b)] for a, b in pairwise(edges)}
    return {name: float(ranks.median()) for name, ranks in bins.items() if len(ranks)}


STUDY = Study("concentration and the true softmax", CLAIMS, measure)
