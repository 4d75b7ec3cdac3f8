"""The convex optimum beside what descent finds: how many heads that takes (study b), with fixed gates and ReLU (study
c).

**Descent.** The problem in heads goes to a local minimum in two ways, many starts and many problems at once. Newton's
method goes to the bottom of the valley it starts in, so that a distance from the convex optimum is that of a stationary
point. Adam is how such a layer is trained.

**Optima (study b).** Tokens of length sqrt(d) and normal targets, eight sets. Each problem is solved in the lifted
form, with a duality gap that certifies the optimum, and in heads from several random starts.

**Gates (study c).** ReLU attention max(X W1 X^T, 0) is gated attention whose gates are its own heads, H_j = W1_j. With
these gates fixed, the convex problem can only be lower: its optimum is a lower bound that ReLU heads could reach only
by keeping their signs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.spectrum import moments
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.sahiner2022.convex_problem import (
    Design,
    Solutions,
    design,
    numerical_rank,
    recover_heads,
    solve,
)

# ---- the problem in heads, descended to a local minimum ----


@dataclass(frozen=True)
class Problems:
    """P problems of one shape."""

    phi: Float[Tensor, "P rows gates pairs d"]
    y: Float[Tensor, "P rows c"]
    b: float

    @classmethod
    def of(cls, parts: list[tuple[Design, Tensor]], b: float) -> Problems:
        return cls(torch.stack([phi for phi, _ in parts]), torch.stack([y for _, y in parts]), b)

    def repeat_starts(self, starts: int) -> Problems:
        return Problems(self.phi.repeat_interleave(starts, 0), self.y.repeat_interleave(starts, 0), self.b)

    def per_head(self, heads: int) -> Float[Tensor, "P rows m pairs d"]:
        """Phi of each head's gate; heads take the gates in turn."""
        return self.phi[:, :, torch.arange(heads) % self.phi.shape[2]]


@dataclass(frozen=True)
class DescendedHeads:
    """Maps (P, m, pairs) and values (P, m, d, c) of every problem, and their objectives."""

    maps: Float[Tensor, "P m pairs"]
    values: Float[Tensor, "P m d c"]
    objective: Float[Tensor, " P"]


def first_heads(problems: Problems, heads: int, seed: int, scale: float = 0.3) -> tuple[Tensor, Tensor]:
    P, _, _, pairs, d = problems.phi.shape
    g = torch.Generator().manual_seed(seed)
    shape = (P, heads, d, problems.y.shape[2])
    maps = scale * torch.randn(P, heads, pairs, generator=g, dtype=torch.float64)
    return maps, scale * torch.randn(*shape, generator=g, dtype=torch.float64)


def lift_heads(problems: Problems, maps: Tensor, values: Tensor) -> Float[Tensor, "P gates pairs d c"]:
    """Z of every problem's heads."""
    gates = problems.phi.shape[2]
    each = torch.einsum("zmp,zmlc->zmplc", maps, values)
    empty = torch.zeros(len(each), gates, *each.shape[2:], dtype=each.dtype)
    return empty.index_add(1, torch.arange(each.shape[1]) % gates, each)


def output_errors(problems: Problems, maps: Tensor, values: Tensor) -> Float[Tensor, "P rows c"]:
    """Errors of the heads' output."""
    P, rows = problems.phi.shape[:2]
    Z = lift_heads(problems, maps, values)
    return problems.phi.reshape(P, rows, -1) @ Z.reshape(P, -1, Z.shape[-1]) - problems.y


def objectives(problems: Problems, maps: Tensor, values: Tensor) -> Float[Tensor, " P"]:
    squares = maps.square().flatten(1).sum(1) + values.square().flatten(1).sum(1)
    return (output_errors(problems, maps, values).square().flatten(1).sum(1) + problems.b * squares) / 2


def descend_by_adam(problems: Problems, heads: int, seed: int, steps: int, rate: float = 0.03) -> DescendedHeads:
    """Adam on whole problems; the rate falls to 0 in a straight line."""
    maps, values = (x.requires_grad_() for x in first_heads(problems, heads, seed))
    optimizer = torch.optim.Adam([maps, values], lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        objectives(problems, maps, values).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return DescendedHeads(maps.detach(), values.detach(), objectives(problems, maps, values))


def jacobian(phi: Tensor, maps: Tensor, values: Tensor) -> Float[Tensor, "P outputs parameters"]:
    """Of every output (rows, c) by every entry of maps (m, pairs), then of values (m, d, c)."""
    P, rows, m, pairs, d = phi.shape
    c = values.shape[3]
    by_maps = torch.einsum("zrmpl,zmlc->zrcmp", phi, values).reshape(P, rows * c, m * pairs)
    one = torch.einsum("zrmpl,zmp->zrml", phi, maps)
    eye = torch.eye(c, dtype=phi.dtype)
    by_values = torch.einsum("zrml,ce->zrcmle", one, eye).reshape(P, rows * c, m * d * c)
    return torch.cat([by_maps, by_values], 2)


def hessian(
    phi: Tensor, maps: Tensor, values: Tensor, left: Tensor, b: float
) -> Float[Tensor, "P parameters parameters"]:
    """Of the objective; `left` are the errors. The output is linear in maps and in values, so that their mixed part alone
    is added to J^T J + b: Phi^T left, within a head.
    """
    P, _, m, pairs, d = phi.shape
    c = values.shape[3]
    J = jacobian(phi, maps, values)
    mixed = torch.einsum("zrmpl,zrc,mk->zmpklc", phi, left, torch.eye(m, dtype=phi.dtype)).reshape(
        P, m * pairs, m * d * c
    )
    size = m * pairs
    total = J.mT @ J
    total[:, :size, size:] += mixed
    total[:, size:, :size] += mixed.mT
    return total + b * torch.eye(total.shape[1], dtype=phi.dtype)


def descend_by_newton(problems: Problems, heads: int, seed: int, steps: int) -> DescendedHeads:
    """Newton's method, damped. Where the damped Hessian is not positive or the objective would rise, a problem stays
    where it is and is damped more.
    """
    phi = problems.per_head(heads)
    maps, values = first_heads(problems, heads, seed)
    P, b = len(maps), problems.b
    size = maps[0].numel()
    damping = torch.ones(P, dtype=torch.float64)
    now = objectives(problems, maps, values)
    for _ in range(steps):
        left = output_errors(problems, maps, values)
        flat = torch.cat([maps.flatten(1), values.flatten(1)], 1)
        slope = torch.einsum("zor,zo->zr", jacobian(phi, maps, values), left.flatten(1)) + b * flat
        if float(slope.abs().amax()) < 1e-9:
            break
        curve = hessian(phi, maps, values, left, b) + torch.diag_embed(damping[:, None].expand_as(flat))
        root, wrong = torch.linalg.cholesky_ex(curve)
        moved = flat - torch.cholesky_solve(slope[..., None], root)[..., 0]
        new = moved[:, :size].reshape(maps.shape), moved[:, size:].reshape(values.shape)
        then = objectives(problems, *new)
        better = (wrong == 0) & (then < now)
        maps = torch.where(better[:, None, None], new[0], maps)
        values = torch.where(better[:, None, None, None], new[1], values)
        now = torch.where(better, then, now)
        damping = torch.where(better, damping / 4, damping * 3).clamp(1e-9, 1e6)
    return DescendedHeads(maps, values, now)


# ---- b: optima, and the heads they take ----


SEQUENCES, TOKENS, WIDTH, OUTPUTS, PENALTY = 12, 4, 3, 2, 0.5
SETS = 8
STARTS = {True: 4, False: 16}
HEAD_COUNTS = {True: (1, 2, 3, 4, 5, 6, 8), False: tuple(range(1, 13))}
ADAM_STEPS = {True: 800, False: 6000}
NEWTON_STEPS = 120
SOLVER_STEPS = 3000
GAP = 1e-9  # of the objective
REACHED, NEAR = 1e-6, 1e-3  # relative distances from the optimum
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
MOST = min(WIDTH * WIDTH, WIDTH * OUTPUTS)  # rank of Z

OPTIMA_CLAIMS = (
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


def draw_problem(seed: int) -> tuple[Design, Tensor]:
    """A problem: Phi and targets."""
    x = draw_normal(SEQUENCES, TOKENS, WIDTH, seed=seed)
    x = math.sqrt(WIDTH) * x / x.norm(dim=-1, keepdim=True)
    return design(x), draw_normal(SEQUENCES * TOKENS, OUTPUTS, seed=1000 + seed)


def solve_problems() -> tuple[list[tuple[Design, Tensor]], Solutions]:
    parts = [draw_problem(seed) for seed in range(SETS)]
    return parts, solve(*_stack_solutions(parts), PENALTY, SOLVER_STEPS, GAP)


def distances_from_optimum(heads: DescendedHeads, optima: Solutions) -> Tensor:
    """Relative distance of every start from its problem's optimum (sets, starts)."""
    return heads.objective.reshape(SETS, -1) / optima.objective[:, None] - 1


def gram_difference(heads: DescendedHeads, optima: Solutions, number: int) -> float:
    """Between the W1's of a problem's best start and the recovered ones."""
    one = best_maps(heads, optima, number)
    own = recover_heads(optima.Z[number, 0])[0].flatten(1)
    return float((one.mT @ one - own.mT @ own).norm() / (own.mT @ own).norm())


def best_maps(heads: DescendedHeads, optima: Solutions, number: int) -> Tensor:
    """W1's of a problem's best start (heads, pairs)."""
    return heads.maps.unflatten(0, (SETS, -1))[number, int(distances_from_optimum(heads, optima)[number].argmin())]


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
    phi, y = (x.repeat(len(PENALTIES), *[1] * (x.ndim - 1)) for x in _stack_solutions(parts))
    b = torch.tensor(PENALTIES, dtype=torch.float64).repeat_interleave(SETS)
    Z = solve(phi, y, b, SOLVER_STEPS // 3, 1e-7).Z[:, 0]
    return [[numerical_rank(one, 1e-4) for one in some] for some in Z.unflatten(0, (len(PENALTIES), SETS))]


def _stack_solutions(parts: list[tuple[Design, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([phi for phi, _ in parts]), torch.stack([y for _, y in parts])


def measure_optima(setting: Setting) -> Results:
    parts, optima = solve_problems()
    ranks = [numerical_rank(Z[0]) for Z in optima.Z]
    starts = STARTS[setting.quick]
    problems = Problems.of(parts, PENALTY).repeat_starts(starts)
    newton = {
        m: descend_by_newton(problems, m, m, NEWTON_STEPS) for m in setting.each(list(HEAD_COUNTS[setting.quick]))
    }
    adam = {
        m: descend_by_adam(problems, m, m, ADAM_STEPS[setting.quick])
        for m in setting.each(list(HEAD_COUNTS[setting.quick]))
    }
    far = {m: distances_from_optimum(heads, optima) for m, heads in newton.items()}
    near = {m: distances_from_optimum(heads, optima).clamp_min(1e-16) for m, heads in adam.items()}
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
        "b4": by_seed(_shares_within(far[MOST], REACHED)),
        "b5": by_seed(_shares_within(at_rank, REACHED)),
        "b6": by_seed(steps),
        "b7": by_seed([float(last - first) for first, last in zip(by_penalty[0], by_penalty[-1], strict=True)]),
        "b8": Measurement(max(same), 0.0, of),
    }  # fmt: skip
    tables = {
        "heads_needed": {"rows": _head_count_rows(far, near), "starts": starts, "sets": SETS, "ranks": ranks, "reached": REACHED, "near": NEAR,
                         "steps": ADAM_STEPS[setting.quick], "seeds": _reached_by_set(far)},
        "optima": [{"set": n, "optimum": best, "gap": gap, "rank": r}
                   for n, (best, gap, r) in enumerate(zip(optima.objective.tolist(), gaps, ranks, strict=True))],
        "rank_by_penalty": [{"penalty": b, "mean": fmean(some), "least": min(some), "most": max(some)}
                            for b, some in zip(PENALTIES, by_penalty, strict=True)],
        "head_maps": head_rows(recover_heads(optima.Z[0, 0])[0], "recovered")
        + head_rows(best_maps(newton[MOST], optima, 0).reshape(-1, WIDTH, WIDTH), "trained"),
    }  # fmt: skip
    return Results(measured, tables)


def _shares_within(far: Tensor, within: float) -> list[float]:
    """By set of data."""
    return (far <= within).double().mean(1).tolist()


def _head_count_rows(far: dict[int, Tensor], near: dict[int, Tensor]) -> list[dict[str, Any]]:
    return [
        {"heads": m, "best": max(float(far[m].min(1).values.median()), 0.0), "reached": float((far[m] <= REACHED).double().mean()),
         "adam": float(near[m].median()), "adam_near": float((near[m] <= NEAR).double().mean())}
        for m in far
    ]  # fmt: skip


def _reached_by_set(far: dict[int, Tensor]) -> list[dict[str, Any]]:
    """Starts that reached the optimum: a row for every set, a column for every number of heads."""
    sets = len(next(iter(far.values())))
    return [{"set": n, **{str(m): int((x[n] <= REACHED).sum()) for m, x in far.items()}} for n in range(sets)]


OPTIMA_STUDY = Study("optima, and the heads they take", OPTIMA_CLAIMS, measure_optima)


# ---- c: gated attention ----


GATED_SEQUENCES, GATED_TOKENS, GATED_WIDTH, GATED_OUTPUTS, GATED_PENALTY, GATES = 16, 4, 2, 2, 0.5, 3
GATED_STARTS = {True: 2, False: 8}
GATED_STEPS = 80
RELU_HEADS, RELU_STEPS = 4, {True: 600, False: 4000}
GATED_MOST = min(GATED_WIDTH * GATED_WIDTH, GATED_WIDTH * GATED_OUTPUTS)

GATED_CLAIMS = (
    Claim(
        "c1", "With fixed gates, heads and the convex problem have the same optimum",
        f"largest relative distance of the best start, {GATED_MOST} heads for each gate, eight sets of data", "at most", 1e-6, by="ours",
    ),
    Claim(
        "c2", "With the gates of trained ReLU heads the convex problem is no worse than these heads",
        "least relative lead of the convex optimum, eight sets of data", "at least", 0.0, by="ours",
    ),
    Claim(
        "c3", "ReLU heads leave something on the table: the convex optimum with their own gates is lower by a hundredth",
        "relative lead of the convex optimum", "at least", 0.01, by="ours",
    ),
)  # fmt: skip
RELU_CLAIMS = (
    Claim(
        "c4", "ReLU dot-product attention has an equivalent convex problem of finite size",
        "difference of the two optima", "at most", 0.0, where="abstract",
    ),
)  # fmt: skip


def draw_gated_problem(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens of length sqrt(d) and normal targets."""
    x = draw_normal(GATED_SEQUENCES, GATED_TOKENS, GATED_WIDTH, seed=50 + seed)
    return math.sqrt(GATED_WIDTH) * x / x.norm(dim=-1, keepdim=True), draw_normal(
        GATED_SEQUENCES * GATED_TOKENS, GATED_OUTPUTS, seed=1050 + seed
    )


def fixed_gates(starts: int) -> tuple[Solutions, Tensor]:
    """Convex optima, and relative distances of the best starts in heads."""
    gates = draw_normal(GATES, GATED_WIDTH, GATED_WIDTH, seed=7)
    problems = Problems.of([(design(x, gates), y) for x, y in map(draw_gated_problem, range(SETS))], GATED_PENALTY)
    optima = solve(problems.phi, problems.y, GATED_PENALTY, SOLVER_STEPS, 1e-9)
    objectives = descend_by_newton(problems.repeat_starts(starts), GATES * GATED_MOST, 1, GATED_STEPS).objective
    return optima, objectives.reshape(SETS, starts).min(1).values / optima.objective - 1


def train_relu_heads(x: Tensor, y: Tensor, steps: int, rate: float = 0.03) -> tuple[Tensor, Tensor]:
    """ReLU attention on P problems by Adam: objectives, and query-key maps (P, heads, d, d)."""
    P = len(x)
    maps = (0.3 * draw_normal(P, RELU_HEADS, GATED_WIDTH, GATED_WIDTH, seed=1)).requires_grad_()
    values = (0.3 * draw_normal(P, RELU_HEADS, GATED_WIDTH, GATED_OUTPUTS, seed=2)).requires_grad_()

    def objectives() -> Tensor:
        weights = torch.einsum("znsa,zmab,znub->znmsu", x, maps, x).clamp_min(0)
        out = torch.einsum("znmsu,znul,zmlc->znsc", weights, x, values).flatten(1, 2)
        squares = maps.square().flatten(1).sum(1) + values.square().flatten(1).sum(1)
        return ((out - y).square().flatten(1).sum(1) + GATED_PENALTY * squares) / 2

    optimizer = torch.optim.Adam([maps, values], lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        objectives().sum().backward()
        optimizer.step()
    with torch.no_grad():
        return objectives(), maps.detach()


def measure_gated(setting: Setting) -> Results:
    optima, far = fixed_gates(GATED_STARTS[setting.quick])
    sets = [draw_gated_problem(seed) for seed in range(SETS)]
    x, y = torch.stack([x for x, _ in sets]), torch.stack([y for _, y in sets])
    relu, maps = train_relu_heads(x, y, RELU_STEPS[setting.quick])
    own = solve(torch.stack([design(*one) for one in zip(x, maps, strict=True)]), y, GATED_PENALTY, SOLVER_STEPS, 1e-6)
    leads = (1 - own.objective / relu).tolist()
    rows = [
        {"set": n, "gated": float(optima.objective[n]), "ranks": " ".join(str(numerical_rank(Z, 1e-4)) for Z in optima.Z[n]),
         "relu": float(relu[n]), "own_gates": float(own.objective[n])}
        for n in range(SETS)
    ]  # fmt: skip
    measured = {
        "c1": Measurement(float(far.max()), 0.0, f"none: largest of {SETS} sets"),
        "c2": Measurement(min(leads), 0.0, f"none: least of {SETS} sets"),
        "c3": by_seed(leads),
    }
    return Results(measured, {"gated": {"rows": rows, "gates": GATES, "heads": RELU_HEADS}})


GATED_STUDY = Study("gated attention", GATED_CLAIMS, measure_gated)
RELU_STUDY = Study(
    "ReLU attention itself",
    RELU_CLAIMS,
    needs="the paper's cone for ReLU, which takes all sign patterns of (X kron X) vec W as gates",
)
