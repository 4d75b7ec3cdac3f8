"""The convex optimum, the best that heads find, and how many heads that takes: study b.

Tokens of length sqrt(d) and normal targets, eight sets. Each problem is solved in the lifted form, with a duality gap that
certifies the optimum, and in heads from several random starts.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from locater.spectrum import moments
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.sahiner2022.convex import Design, Solutions, design, rank, recovered, solve
from locater_lab.papers.sahiner2022.descent import Heads, Problems, descended, trained

SEQUENCES, TOKENS, WIDTH, OUTPUTS, PENALTY = 12, 4, 3, 2, 0.5
SETS = 8
STARTS = {True: 4, False: 16}
HEADS = {True: (1, 2, 3, 4, 5, 6, 8), False: tuple(range(1, 13))}
ADAM_STEPS = {True: 800, False: 6000}
NEWTON_STEPS = 120
SOLVER_STEPS = 3000
GAP = 1e-9  # of the objective
REACHED, NEAR = 1e-6, 1e-3  # relative distances from the optimum
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
MOST = min(WIDTH * WIDTH, WIDTH * OUTPUTS)  # rank of Z

CLAIMS = (
    Claim(
        "b1", "The convex problem is solved to global optimality",
        "largest duality gap over the optimum, eight sets of data", "at most", 1e-6, where="abstract", bound="ours",
    ),
    Claim(
        "b2", "Training in heads and the convex problem are equivalent: with as many heads as Z has rank, the best of the starts is at "
        "the convex optimum",
        "largest relative distance from it, eight sets of data", "at most", REACHED, where="abstract", bound="ours",
    ),
    Claim(
        "b3", "With fewer heads than half of the rank it is out of reach",
        "least relative distance of the best start from the convex optimum", "at least", 0.01, by="ours",
    ),
    Claim(
        "b4", f"With min(d^2, d c) = {MOST} heads, enough for every Z, all starts end at the optimum",
        f"share of starts within {REACHED:g} of it after Newton's method", "at least", 0.99, by="ours",
    ),
    Claim(
        "b5", "With as many heads as the rank, most starts end at the optimum",
        f"share of starts within {REACHED:g} of it after Newton's method", "at least", 0.5, by="ours",
    ),
    Claim(
        "b6", f"Trained with Adam, {MOST} heads come closer to the optimum than as many heads as half of that",
        f"log10 of the relative distance with {MOST} heads less that with {MOST // 2}, medians over starts", "at most", 0.0, by="ours",
    ),
    Claim(
        "b7", "The penalty promotes low rank",
        "rank of Z* at the strongest penalty less that at the weakest", "at most", -1.0, where="abstract", bound="ours",
    ),
    Claim(
        "b8", "Heads at the optimum are not unique: they are those of the singular value decomposition, mixed by a rotation",
        "largest relative difference of sum_j vec(W1_j) vec(W1_j)^T between the two", "at most", 1e-3, by="ours",
    ),
)  # fmt: skip


def data(seed: int) -> tuple[Design, Tensor]:
    """A problem: Phi and targets."""
    x = normal(SEQUENCES, TOKENS, WIDTH, seed=seed)
    x = math.sqrt(WIDTH) * x / x.norm(dim=-1, keepdim=True)
    return design(x), normal(SEQUENCES * TOKENS, OUTPUTS, seed=1000 + seed)


def solved() -> tuple[list[tuple[Design, Tensor]], Solutions]:
    parts = [data(seed) for seed in range(SETS)]
    return parts, solve(*_stacked(parts), PENALTY, SOLVER_STEPS, GAP)


def distances(heads: Heads, optima: Solutions) -> Tensor:
    """Relative distance of every start from its problem's optimum (sets, starts)."""
    return heads.objective.reshape(SETS, -1) / optima.objective[:, None] - 1


def gram_difference(heads: Heads, optima: Solutions, number: int) -> float:
    """Between the W1's of a problem's best start and the recovered ones."""
    one = best_maps(heads, optima, number)
    own = recovered(optima.Z[number, 0])[0].flatten(1)
    return float((one.mT @ one - own.mT @ own).norm() / (own.mT @ own).norm())


def best_maps(heads: Heads, optima: Solutions, number: int) -> Tensor:
    """W1's of a problem's best start (heads, pairs)."""
    return heads.maps.unflatten(0, (SETS, -1))[number, int(distances(heads, optima)[number].argmin())]


def head_rows(maps: Tensor, which: str) -> list[dict[str, Any]]:
    """Spectra of query-key maps W1 (m, d, d), largest first: an identity takes the place of the query map.

    Heads (W1, W2) and (-W1, -W2) are the same, so that the mean eigenvalue has no sign.
    """
    eye = torch.eye(maps.shape[1], dtype=maps.dtype).expand_as(maps)
    of = moments(eye, maps)
    order = of.frobenius_sq.argsort(descending=True).tolist()
    return [
        {"which": which, "head": n, "rank": int(torch.linalg.matrix_rank(maps[h], rtol=1e-6)), "stable_rank": float(of.stable_rank[h]),
         "mean": abs(float(of.mean[h])), "scale": float(of.frobenius_sq[h].sqrt()),
         "symmetric": float(of.symmetric_sq[h] / of.frobenius_sq[h])}
        for n, h in enumerate(order, 1)
    ]  # fmt: skip


def ranks_by_penalty(parts: list[tuple[Design, Tensor]]) -> list[list[int]]:
    """Of Z*, for every penalty and every set of data."""
    phi, y = (x.repeat(len(PENALTIES), *[1] * (x.ndim - 1)) for x in _stacked(parts))
    b = torch.tensor(PENALTIES, dtype=torch.float64).repeat_interleave(SETS)
    Z = solve(phi, y, b, SOLVER_STEPS // 3, 1e-7).Z[:, 0]
    return [[rank(one, 1e-4) for one in some] for some in Z.unflatten(0, (len(PENALTIES), SETS))]


def _stacked(parts: list[tuple[Design, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([phi for phi, _ in parts]), torch.stack([y for _, y in parts])


def measure(setting: Setting) -> Results:
    parts, optima = solved()
    ranks = [rank(Z[0]) for Z in optima.Z]
    starts = STARTS[setting.quick]
    problems = Problems.of(parts, PENALTY).repeated(starts)
    newton = {m: descended(problems, m, m, NEWTON_STEPS) for m in setting.each(list(HEADS[setting.quick]))}
    adam = {m: trained(problems, m, m, ADAM_STEPS[setting.quick]) for m in setting.each(list(HEADS[setting.quick]))}
    far = {m: distances(heads, optima) for m, heads in newton.items()}
    near = {m: distances(heads, optima).clamp_min(1e-16) for m, heads in adam.items()}
    at_rank = torch.stack([far[r][n] for n, r in enumerate(ranks)])
    fewer = min(float(far[max(1, (r - 1) // 2)][n].min()) for n, r in enumerate(ranks))
    gaps = (optima.gap / optima.objective).tolist()
    by_penalty = ranks_by_penalty(parts)
    steps = (near[MOST].log10().median(1).values - near[MOST // 2].log10().median(1).values).tolist()
    same = [gram_difference(newton[MOST], optima, n) for n in range(SETS)]
    of = f"none: largest of {SETS} sets"
    measured = {
        "b1": Measurement(max(gaps), 0.0, of),
        "b2": Measurement(float(at_rank.min(1).values.max()), 0.0, of, {"by_set": at_rank.min(1).values.tolist(), "ranks": ranks}),
        "b3": Measurement(fewer, 0.0, f"none: least of {SETS} sets"),
        "b4": by_seed(_shares(far[MOST], REACHED)),
        "b5": by_seed(_shares(at_rank, REACHED)),
        "b6": by_seed(steps),
        "b7": by_seed([float(last - first) for first, last in zip(by_penalty[0], by_penalty[-1], strict=True)]),
        "b8": Measurement(max(same), 0.0, of),
    }  # fmt: skip
    tables = {
        "heads_needed": {"rows": _rows(far, near), "starts": starts, "sets": SETS, "ranks": ranks, "reached": REACHED, "near": NEAR,
                         "steps": ADAM_STEPS[setting.quick], "seeds": _by_set(far)},
        "optima": [{"set": n, "optimum": best, "gap": gap, "rank": r}
                   for n, (best, gap, r) in enumerate(zip(optima.objective.tolist(), gaps, ranks, strict=True))],
        "rank_by_penalty": [{"penalty": b, "mean": fmean(some), "least": min(some), "most": max(some)}
                            for b, some in zip(PENALTIES, by_penalty, strict=True)],
        "head_maps": head_rows(recovered(optima.Z[0, 0])[0], "recovered")
        + head_rows(best_maps(newton[MOST], optima, 0).reshape(-1, WIDTH, WIDTH), "trained"),
    }  # fmt: skip
    return Results(measured, tables)


def _shares(far: Tensor, within: float) -> list[float]:
    """By set of data."""
    return (far <= within).double().mean(1).tolist()


def _rows(far: dict[int, Tensor], near: dict[int, Tensor]) -> list[dict[str, Any]]:
    return [
        {"heads": m, "best": max(float(far[m].min(1).values.median()), 0.0), "reached": float((far[m] <= REACHED).double().mean()),
         "adam": float(near[m].median()), "adam_near": float((near[m] <= NEAR).double().mean())}
        for m in far
    ]  # fmt: skip


def _by_set(far: dict[int, Tensor]) -> list[dict[str, Any]]:
    """Starts that reached the optimum: a row for every set, a column for every number of heads."""
    sets = len(next(iter(far.values())))
    return [{"set": n, **{str(m): int((x[n] <= REACHED).sum()) for m, x in far.items()}} for n in range(sets)]


STUDY = Study("optima, and the heads they take", CLAIMS, measure)
