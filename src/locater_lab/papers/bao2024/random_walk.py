"""The theory on tokens of its own random walk: the propagation probability (study a), and whether a concentrated
spectrum localizes the true softmax and avoids both collapses (study b).

Study a sets the closed form and the exact mixture beside the simulated walk (docs/theory.md, sections 3 and 4). Study b
approximates nothing.
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
from locater.theory import localization, mixture_propagation, signal_propagation, unit_moments
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory import simulate

# ---- a: the propagation probability ----


NUMBERS = {True: 24_000_000, False: 240_000_000}  # normal numbers drawn per case, quick or not
MOST_WALKS = {True: 20_000, False: 100_000}  # at most
NUMBERS_AT_ONCE = 2_000_000  # numbers in memory at a time
DRAWS = 4096  # of the query, for the mixture
MANY = 64  # directions from which the closed form should do
LENGTHS, RANKS = (16, 64, 256, 1024, 4096), (1, 4, 16, 64, 128)
LARGEST = 16_384  # length x rank that a case may have: beyond it there would be a few hundred walks and no precision
EXPECTED = 5  # events that a simulation should see of a kind before its standard error means anything
PROFILES = ("profile", "closed", "mixture")
SELF_LOGIT = 4.0  # M of every symmetric map

PROPAGATION_CLAIMS = (
    Claim(
        "a1", "With many directions, two moments of the spectrum give the propagation probability of every token",
        f"error of the closed form against simulated walks where it should be largest, worst of ranks from {MANY} on", "at most", 0.05,
        where="theorem on signal propagation", bound="ours",
    ),
    Claim(
        "a2", "Two moments are enough at 16 directions too, where the theorem, a limit of many directions, promises nothing",
        "largest difference between W and -W of trace 0, whose first two moments are equal (94 % of tr W^2 in one direction)",
        "at most", 0.01, by="ours",
    ),
    Claim(
        "a3", "Averaged over queries, the conditional law of the walk gives the propagation probability exactly at any rank",
        "largest distance of the mixture from simulated walks, in their joint standard errors", "at most", 4.5, by="ours",
    ),
    Claim(
        "a4", "The closed form's error is 0.064 |g1|, g1 the skewness of the query's quadratic form, for maps near a projector",
        "median over ranks of error / |g1|, projectors, against the mixture", "about", 0.064, 0.008, by="ours",
    ),
)  # fmt: skip


def head_maps(rank: int, symmetric: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Query and key map (h, d) of a head: a multiple of a projector, or one whose keys share half of its queries' map.

    >>> q, k = head_maps(4, symmetric=True)
    >>> round((4**-0.5 * (q.mT @ k).trace()).item(), 6)      # the mean self-logit
    4.0
    """
    if symmetric:
        root = (SELF_LOGIT / math.sqrt(rank)) ** 0.5 * torch.eye(rank, dtype=torch.float64)
        return root, root
    generator = torch.Generator().manual_seed(seed + rank)
    q, noise = torch.randn(2, rank, rank + min(rank, 16), dtype=torch.float64, generator=generator)
    k = q / 2 + noise
    size = rank**-0.5 * torch.linalg.matrix_norm(q.mT @ k)  # sqrt F
    return q / size.sqrt() * 2**0.5, k / size.sqrt() * 2**0.5  # sqrt F = 2


def propagation_case(rank: int, length: int, symmetric: bool, quick: bool) -> dict[str, Any]:
    """One head and one length: errors of both forms against simulation, with the simulation's own standard error."""
    q, k = head_maps(rank, symmetric)
    m, scale = moments(q, k), rank**-0.5
    per_walk = length * q.shape[1]
    walks = max(200, min(MOST_WALKS[quick], NUMBERS[quick] // per_walk))
    seen = simulate(q, k, scale, length, walks, seed=rank + length, chunk=max(1, NUMBERS_AT_ONCE // per_walk))
    closed = signal_propagation(*unit_moments(m, scale), length=length)
    exact = mixture_propagation(m, scale, length, draws=DRAWS)
    error, off = (closed - seen.propagated).abs(), (exact - seen.propagated).abs()
    binomial = exact * (1 - exact)
    joint = (binomial / walks + binomial / DRAWS).sqrt()
    often_enough = binomial * walks >= EXPECTED
    worst = int((closed - exact).abs().argmax())  # chosen without the simulation, whose noise would choose itself
    return {
        "rank": rank, "length": length, "map": "symmetric" if symmetric else "general", "walks": walks,
        "closed_error": float(error[worst]), "standard_error": float((binomial / walks).sqrt()[worst]), "position": worst + 1,
        "mixture_error": float(off.max()), "mixture_sigmas": float((off / joint)[often_enough].max()), "skew": float(m.skew),
        "profile": _shown_points(seen.propagated), "closed": _shown_points(closed), "mixture": _shown_points(exact),
    }  # fmt: skip


def opposite_maps(quick: bool, rank: int = 16, length: int = 64) -> Measurement:
    """W with one eigenvalue up and all others down by as much in sum, and -W: equal in trace, tr W^2 and norm."""
    values = torch.full((rank,), -1.0 / (rank - 1), dtype=torch.float64)
    values[0] = 1.0
    values = values * 2 * rank**0.5 / values.norm()  # sqrt F = 2
    eye = torch.eye(rank, dtype=torch.float64)
    seen = [
        simulate(eye, torch.diag(sign * values), rank**-0.5, length, MOST_WALKS[quick], seed=3) for sign in (1.0, -1.0)
    ]
    gap = (seen[0].propagated - seen[1].propagated).abs()
    worst = int(gap.argmax())
    error = math.hypot(*(float(x.error[worst]) for x in seen))
    numbers = {
        "position": worst + 1,
        "length": length,
        "W": float(seen[0].propagated[worst]),
        "minus_W": float(seen[1].propagated[worst]),
    }
    return Measurement(float(gap[worst]), 2 * error, "2 standard errors", numbers)


def error_over_skewness(
    length: int = 64, ranks: tuple[int, ...] = RANKS, seeds: int = 8
) -> tuple[Measurement, dict[str, float]]:
    """Error of the closed form over |g1| for projectors, with the mixture as the truth; and the same by rank. Seeds are
    draws of the mixture.
    """
    ratios = torch.zeros(seeds, len(ranks))
    for column, rank in enumerate(ranks):
        q, k = head_maps(rank, symmetric=True)
        m, scale = moments(q, k), rank**-0.5
        closed = signal_propagation(*unit_moments(m, scale), length=length)
        exact = torch.stack([mixture_propagation(m, scale, length, draws=1 << 15, seed=seed) for seed in range(seeds)])
        worst = int((closed - exact.mean(0)).abs().argmax())
        ratios[:, column] = (closed - exact)[:, worst].abs() / m.skew.abs()
    by_rank = {f"rank {rank}": float(x) for rank, x in zip(ranks, ratios.mean(0), strict=True)}
    return by_seed(ratios.median(1).values.tolist(), of="draws of the mixture"), by_rank


def measure_propagation(setting: Setting) -> Results:
    """All cases, then the four numbers."""
    grid = [(r, t, s) for s in (True, False) for t in LENGTHS for r in RANKS if r * t <= LARGEST or r == 4]
    cases = [propagation_case(rank, length, symmetric, setting.quick) for rank, length, symmetric in setting.each(grid)]
    many = max((c for c in cases if c["rank"] >= MANY), key=lambda c: c["closed_error"])
    far = max(cases, key=lambda c: c["mixture_sigmas"])
    plain = [{k: v for k, v in c.items() if k not in PROFILES} for c in cases]
    shown = {c["rank"]: {k: c[k] for k in PROFILES} for c in cases if c["length"] == 64 and c["map"] == "symmetric"}
    farthest = {k: far[k] for k in ("rank", "length", "map", "mixture_error")}
    where = {k: many[k] for k in ("rank", "length", "map", "walks")}
    law, by_rank = error_over_skewness()
    measured = {
        "a1": Measurement(many["closed_error"], 2 * many["standard_error"], "2 standard errors", where),
        "a2": opposite_maps(setting.quick),
        "a3": Measurement(far["mixture_sigmas"], 0.0, "none: in standard errors", farthest),
        "a4": law,
    }
    return Results(measured, {"walks": plain, "profiles": shown, "error_over_skew": by_rank})


def _shown_points(profile: Tensor, points: int = 32) -> list[float]:
    return [float(x) for x in profile[torch.linspace(0, len(profile) - 1, points).long()]]


PROPAGATION_STUDY = Study("propagation probability", PROPAGATION_CLAIMS, measure_propagation)


# ---- b: the true softmax ----


HEAD, LENGTH = 64, 128  # directions of the map; tokens
SCALE = HEAD**-0.5
MEANS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # M, the mean self-logit
VARIATIONS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # standard deviation of the eigenvalues over their mean
SIZES = tuple(2.0 ** (k / 4) for k in range(-8, 37))  # M of a concentrated map, sqrt F of one with mean zero
WALKS, ROWS_OF = {True: 2000, False: 16_000}, {True: 24, False: 200}  # walks per seed: last query alone; every query
WALKS_AT_ONCE = 1000  # walks in memory at a time
SEEDS = 12  # correlations of exactly 1 with every seed are judged by signs, which takes so many on a page of this size
NEAR = 8  # the nearest eighth

SOFTMAX_CLAIMS = (
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


def eigenvalues(mean: float, variation: float, size: float = 0.0) -> Tensor:
    """HEAD eigenvalues: M = `mean` with this coefficient of variation, or mean zero with sqrt F = `size`; normal
    quantiles in shape.

    >>> values = eigenvalues(4.0, 0.5)
    >>> round(float(SCALE * values.sum()), 6), round(float(values.std(correction=0) / values.mean()), 6)
    (4.0, 0.5)
    """
    shape = torch.special.ndtri((torch.arange(HEAD, dtype=torch.float64) + 0.5) / HEAD)
    shape = shape / shape.square().mean().sqrt()
    return (mean * (1 + variation * shape) / HEAD + size * shape / HEAD**0.5) / SCALE


def walk_tokens(count: int, seed: int, unit: bool = False) -> Tensor:
    """(count, LENGTH, HEAD) tokens of random walks with steps I/T; `unit` gives each token |x|^2 = d, as a norm
    does.
    """
    x = torch.randn(count, LENGTH, HEAD, generator=torch.Generator().manual_seed(seed)).cumsum(1) / LENGTH**0.5
    return x * HEAD**0.5 / x.norm(dim=-1, keepdim=True) if unit else x


@dataclass(frozen=True)
class LastQuery:
    """The true softmax of the last query, averaged over walks."""

    centre: float  # mean position of the weight, -1 farthest to 1 nearest
    near: float  # weight on the nearest eighth
    entropy_ratio: float
    participation: float  # 1 / (T sum p^2)


def attend_last_query(x: Tensor, values: Tensor) -> LastQuery:
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
    return LastQuery(*(float(each.mean()) for each in measures))


def layer_collapse(x: Tensor, values: Tensor) -> tuple[float, float]:
    """Residual that a layer of attention (values and output the identity) keeps, as a share of its input's; mean
    entropy ratio.
    """
    p = (SCALE * (x * values.float()) @ x.mT).softmax(-1)
    kept = rank_residual(p @ x, norm="frobenius") / rank_residual(x, norm="frobenius")
    return float(kept.mean()), float(torch.special.entr(p).sum(-1).mean()) / math.log(LENGTH)


def sweep_spectra(seed: int, quick: bool) -> list[list[LastQuery]]:
    """Last-query measures over MEANS x VARIATIONS."""
    parts = [_grid(walk_tokens(WALKS_AT_ONCE, 1000 * seed + part)) for part in range(WALKS[quick] // WALKS_AT_ONCE)]
    return [[_mean_row([part[i][j] for part in parts]) for j in range(len(VARIATIONS))] for i in range(len(MEANS))]


def _grid(x: Tensor) -> list[list[LastQuery]]:
    return [[attend_last_query(x, eigenvalues(mean, variation)) for variation in VARIATIONS] for mean in MEANS]


def _mean_row(rows: list[LastQuery]) -> LastQuery:
    return LastQuery(*(sum(values) / len(rows) for values in zip(*(astuple(row) for row in rows), strict=True)))


def collapse_frontier(seed: int, quick: bool, unit: bool) -> dict[str, list[tuple[float, float]]]:
    """(residual kept, entropy ratio) over SIZES of a concentrated map and of one with mean zero."""
    x = walk_tokens(ROWS_OF[quick], seed, unit)
    return {
        "concentrated": [layer_collapse(x, eigenvalues(size, 0.0)) for size in SIZES],
        "mean zero": [layer_collapse(x, eigenvalues(0.0, 0.0, size)) for size in SIZES],
    }


def rank_and_concentration(seed: int, each: int = 40) -> tuple[float, list[tuple[float, float]]]:
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


def measure_softmax(setting: Setting) -> Results:
    """Both sweeps for every seed, and the spectra."""
    grids, unit, raw, ranks = [], [], [], []
    for seed in setting.each(list(range(SEEDS))):
        grids.append(sweep_spectra(seed, setting.quick))
        unit.append(collapse_frontier(seed, setting.quick, unit=True))
        raw.append(collapse_frontier(seed, setting.quick, unit=False))
        ranks.append(rank_and_concentration(seed))
    gains = [[_best_of_both(f["concentrated"]) - _best_of_both(f["mean zero"]) for f in each] for each in (unit, raw)]
    measured = {
        "b1": by_seed([_worst_correlation(grid, "centre") for grid in grids]),
        "b2": by_seed([_worst_correlation(grid, "near") for grid in grids]),
        "b3": by_seed([_index_agreement(grid) for grid in grids]),
        "b4": by_seed([_best_of_both(points["concentrated"]) for points in unit]),
        "b5": by_seed(gains[0]),
        "b6": by_seed(gains[1]),
        "b7": by_seed([correlation for correlation, _ in ranks]),
    }
    tables = {
        "phase": _phase_table(grids),
        "near_by_mean": _by_mean(grids, "near"),
        "collapse": {"tokens of equal norm": _mean_frontier(unit), "raw walk": _mean_frontier(raw)},
        "stable_rank": _rank_table([pair for _, pairs in ranks for pair in pairs]),
    }
    return Results(measured, tables)


def _best_of_both(points: Sequence[Sequence[float]]) -> float:
    return max(min(point) for point in points)


def _mean_frontier(frontiers: Sequence[Mapping[str, list[tuple[float, float]]]]) -> dict[str, dict[str, Any]]:
    """Of each family of maps: the curve averaged over seeds, and the smaller of its two numbers at its best."""
    curves = {name: torch.tensor([each[name] for each in frontiers]).mean(0).tolist() for name in frontiers[0]}
    return {name: {"curve": points, "best": _best_of_both(points)} for name, points in curves.items()}


def _correlations(grid: list[list[LastQuery]], name: str) -> list[float]:
    order = torch.tensor(VARIATIONS)
    return [spearman(order, torch.tensor([getattr(cell, name) for cell in row])) or 0.0 for row in grid]


def _worst_correlation(grid: list[list[LastQuery]], name: str) -> float:
    return max(_correlations(grid, name))


def _by_mean(grids: list[list[list[LastQuery]]], name: str) -> dict[str, float]:
    each = torch.tensor([_correlations(grid, name) for grid in grids]).mean(0).tolist()
    return {f"M = {mean:g}": value for mean, value in zip(MEANS, each, strict=True)}


def _localization_index() -> Tensor:
    """Lambda (MEANS, VARIATIONS) from the two moments."""
    values = torch.stack([torch.stack([eigenvalues(mean, variation) for variation in VARIATIONS]) for mean in MEANS])
    F = SCALE**2 * values.square().sum(-1)
    return localization(SCALE * values.sum(-1), F, F)


def _index_agreement(grid: list[list[LastQuery]]) -> float:
    return spearman(_localization_index().flatten(), torch.tensor([cell.centre for row in grid for cell in row])) or 0.0


def _phase_table(grids: list[list[list[LastQuery]]]) -> dict[str, Any]:
    names = ("centre", "near", "entropy_ratio", "participation")
    means = {
        n: torch.tensor([[[getattr(c, n) for c in row] for row in grid] for grid in grids]).mean(0).tolist()
        for n in names
    }
    return {"M": list(MEANS), "variation": list(VARIATIONS), "Lambda": _localization_index().tolist(), **means}


def _rank_table(pairs: list[tuple[float, float]]) -> dict[str, float]:
    kappa, rank = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    edges = (0.0, 0.1, 0.5, 0.9, 0.99, 1.001)
    bins = {f"kappa {a:g} to {min(b, 1):g}": rank[(kappa >= a) & (kappa < b)] for a, b in pairwise(edges)}
    return {name: float(ranks.median()) for name, ranks in bins.items() if len(ranks)}


SOFTMAX_STUDY = Study("concentration and the true softmax", SOFTMAX_CLAIMS, measure_softmax)
