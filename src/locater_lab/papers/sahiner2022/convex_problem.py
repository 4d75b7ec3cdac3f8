"""Attention without softmax as a convex problem, its solver, and the same problem in heads; and study a, that the
lifted problem has the outputs and, at best, the penalty of the heads.

Heads j with a query-key map W1_j (d x d) and a value-output map W2_j (d x c), on sequences X_i (s x d):

    heads     min  1/2 sum_i |sum_j (B_ij * X_i W1_j X_i^T) X_i W2_j - Y_i|^2 + b/2 sum_j (|W1_j|^2 + |W2_j|^2)
    lifted    min  1/2 sum_i |sum_g Phi_ig Z_g - Y_i|^2 + b sum_g |Z_g|_*        Z_g = sum_j vec(W1_j) vec(W2_j)^T

B is 1 for linear attention. With gates it is 1[X_i H_g X_i^T >= 0] for fixed matrices H_g, and head j belongs to the
gate g. Row t of Phi_ig has x_t[a] sum_u B_ig[t, u] x_u[k] x_u[l] for every a, k, l; Z_g has rows (a, k) and columns (l,
c). |.|_* is the nuclear norm, the sum of singular values. Everything is float64.

**Study a.** For any heads, Z = sum_j vec(W1_j) vec(W2_j)^T has their output. Its nuclear norm is at most their penalty,
|Z|_* <= sum_j (|W1_j|^2 + |W2_j|^2) / 2, with equality for the heads that its singular value decomposition gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.devices_and_processes import draw_normal, relative_difference
from locater_lab.engine.reproduction import Results, Setting, Study

# ---- the problem and its solvers ----


Sequences = Float[Tensor, "n s d"]
Design = Float[Tensor, "rows gates pairs d"]  # Phi; rows are tokens of all sequences, pairs are (a, k)
Lifted = Float[Tensor, "gates pairs d c"]  # Z; the last two axes are its columns


def gate_maps(x: Sequences, gates: Float[Tensor, "gates d d"]) -> Float[Tensor, "n gates s s"]:
    """B_ig = 1[X_i H_g X_i^T >= 0]."""
    return (torch.einsum("nsa,gab,nub->ngsu", x, gates, x) >= 0).to(x.dtype)


def design(x: Sequences, gates: Float[Tensor, "gates d d"] | None = None) -> Design:
    """Phi of every token. Without gates there is one, which is open.

    >>> design(torch.ones(1, 2, 1)).flatten().tolist()  # x_t sum_u x_u x_u
    [2.0, 2.0]
    """
    n, s, d = x.shape
    open_to = torch.ones(n, 1, s, s, dtype=x.dtype) if gates is None else gate_maps(x, gates)
    seen = torch.einsum("ngtu,nuk,nul->ntgkl", open_to, x, x)
    return torch.einsum("nta,ntgkl->ntgakl", x, seen).reshape(n * s, -1, d * d, d)


def heads_output(
    x: Sequences,
    maps: Float[Tensor, "m d d"],
    values: Float[Tensor, "m d c"],
    gates: Float[Tensor, "m d d"] | None = None,
) -> Float[Tensor, "n s c"]:
    """What the heads give, as an attention layer computes it: a map of s x s, then values. One gate for each head."""
    scores = torch.einsum("nsa,mab,nub->nmsu", x, maps, x)
    weights = scores if gates is None else scores * gate_maps(x, gates)
    return torch.einsum("nmsu,nul,mlc->nsc", weights, x, values)


def lifted_output(phi: Design, Z: Lifted) -> Float[Tensor, "rows c"]:
    return torch.einsum("rgpl,gplc->rc", phi, Z)


def lift(maps: Float[Tensor, "m d d"], values: Float[Tensor, "m d c"]) -> Lifted:
    """Z of heads that share a gate."""
    return torch.einsum("mp,mlc->plc", maps.flatten(1), values)[None]


def recover_heads(Z: Float[Tensor, "pairs d c"], least: float = 1e-9) -> tuple[Tensor, Tensor]:
    """Heads of one Z: with Z = U S V^T they are W1_j = sqrt(s_j) mat(u_j) and W2_j = sqrt(s_j) mat(v_j). Singular
    values below `least` of the largest make no head.

    >>> Z = torch.tensor([[3.0]]).reshape(1, 1, 1)
    >>> maps, values = recover_heads(Z)
    >>> round((maps * values).item(), 6), round(maps.square().item(), 6)
    (3.0, 3.0)
    """
    pairs, d, c = Z.shape
    U, S, Vh = torch.linalg.svd(Z.reshape(pairs, d * c), full_matrices=False)
    root = S[S > least * S.amax()].sqrt()
    m = len(root)
    return (U[:, :m] * root).mT.reshape(m, d, d), (root[:, None] * Vh[:m]).reshape(m, d, c)


def nuclear_norm(Z: Lifted) -> Tensor:
    return torch.linalg.svdvals(Z.flatten(2)).sum()


def numerical_rank(Z: Float[Tensor, "pairs d c"], least: float = 1e-6) -> int:
    """Singular values above `least` of the largest."""
    values = torch.linalg.svdvals(Z.flatten(1))
    return int((values > least * values.amax().clamp_min(1e-300)).sum())


# --- the convex problem ---


@dataclass(frozen=True)
class Solutions:
    """The optima of P problems, up to `gap`: no Z has an objective below `objective - gap` (weak duality)."""

    Z: Float[Tensor, "P gates pairs d c"]
    objective: Float[Tensor, " P"]
    gap: Float[Tensor, " P"]
    steps: int


def lower_singular_values(Z: Float[Tensor, "*n pairs d c"], by: Float[Tensor, "*#n"]) -> Float[Tensor, "*n pairs d c"]:
    """Singular values of every Z lowered by a number, those below it to 0: the proximal map of the nuclear norm.

    >>> Z = torch.diag(torch.tensor([3.0, 1.0])).reshape(2, 2, 1)
    >>> lower_singular_values(Z, torch.tensor(2.0)).flatten().abs().tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    U, S, Vh = torch.linalg.svd(Z.flatten(-2), full_matrices=False)
    return (U * (S - by[..., None]).clamp_min(0).unsqueeze(-2) @ Vh).reshape(Z.shape)


def solve(
    phi: Float[Tensor, "P rows gates pairs d"],
    y: Float[Tensor, "P rows c"],
    b: float | Float[Tensor, " P"],
    steps: int = 5000,
    tolerance: float = 1e-9,
) -> Solutions:
    """FISTA with singular-value thresholding, P problems at once. A problem restarts its momentum where a step goes back;
    all stop when every duality gap is below `tolerance` of its objective.
    """
    P, rows, gates, pairs, d = phi.shape
    c = y.shape[2]
    b = torch.as_tensor(b, dtype=y.dtype).expand(P)
    F = phi.reshape(P, rows, -1)
    wide = F.shape[2] > rows
    gram = F @ F.mT if wide else F.mT @ F
    target = F.mT @ y
    rate = 1 / torch.linalg.eigvalsh(gram)[:, -1]
    Z = torch.zeros(P, gates, pairs, d, c, dtype=y.dtype)
    ahead, momentum = Z, torch.ones(P, dtype=y.dtype)
    best, gap, step = value_and_gap(phi, y, Z, b)[0], torch.full((P,), torch.inf, dtype=y.dtype), 0
    for step in range(1, steps + 1):
        flat = ahead.reshape(P, -1, c)
        slope = (F.mT @ (F @ flat) if wide else gram @ flat) - target
        after = lower_singular_values(ahead - (rate[:, None, None] * slope).reshape(Z.shape), (rate * b)[:, None])
        back = ((ahead - after) * (after - Z)).flatten(1).sum(1) > 0
        momentum = torch.where(back, 1.0, momentum)
        following = (1 + (1 + 4 * momentum**2).sqrt()) / 2
        ahead = after + ((momentum - 1) / following).reshape(P, 1, 1, 1, 1) * (after - Z)
        Z, momentum = after, following
        if step % 25 == 0 or step == steps:
            best, gap = value_and_gap(phi, y, Z, b)
            if bool((gap <= tolerance * best).all()):
                break
    return Solutions(Z, best, gap, step)


def value_and_gap(phi: Tensor, y: Tensor, Z: Tensor, b: Tensor) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """The objective at Z, and how much lower the optimum can be.

    For every r with |Phi_g^T r| <= b in the spectral norm for all g, |y|^2/2 - |y - r|^2/2 is at most the optimum. The
    residual y - Phi Z, scaled to satisfy this, is such an r.
    """
    P, rows = phi.shape[:2]
    F = phi.reshape(P, rows, -1)
    left = y - F @ Z.reshape(P, -1, y.shape[2])
    norms = torch.linalg.svdvals(Z.flatten(3)).flatten(1).sum(1)
    objective = left.square().flatten(1).sum(1) / 2 + b * norms
    back = (F.mT @ left).reshape(Z.shape).flatten(3)
    most = b / torch.linalg.matrix_norm(back, 2).amax(1).clamp_min(1e-300)
    best = (left * y).flatten(1).sum(1) / left.square().flatten(1).sum(1).clamp_min(1e-300)
    r = left * torch.minimum(torch.maximum(best, -most), most)[:, None, None]
    return objective, objective - (y.square() - (y - r).square()).flatten(1).sum(1) / 2


def split_solve(
    phi: Float[Tensor, "rows gates pairs d"], y: Float[Tensor, "rows c"], penalties: tuple[float, ...], steps: int
) -> list[Solutions]:
    """The same for several penalties by alternating directions: least squares and thresholding in turn, tied by
    a price.

    It takes far fewer steps than FISTA where features are nearly dependent, as those of images are, and is less exact.
    """
    rows, gates, pairs, d = phi.shape
    c = y.shape[1]
    F, shape = phi.reshape(rows, -1), (1, gates, pairs, d, c)
    _, S, Vh = torch.linalg.svd(F, full_matrices=False)
    target = F.mT @ y
    top = float(torch.linalg.matrix_norm(target.reshape(shape).flatten(3), 2).amax())
    solutions = []
    for b in penalties:
        weight = b / top * float(S[0] ** 2)
        kept = (S**2 / (S**2 + weight))[:, None]
        Z = price = torch.zeros(shape, dtype=y.dtype)
        for _ in range(steps):
            right = target + weight * (Z - price).reshape(-1, c)
            free = ((right - Vh.mT @ (kept * (Vh @ right))) / weight).reshape(shape)
            Z = lower_singular_values(free + price, torch.full((1, 1), b / weight, dtype=y.dtype))
            price = price + free - Z
        best, gap = value_and_gap(phi[None], y[None], Z, torch.tensor([b], dtype=y.dtype))
        solutions.append(Solutions(Z, best, gap, steps))
    return solutions


# ---- a: the lifted problem ----


CASE_SIZES = (
    (6, 4, 3, 2, 2),
    (6, 4, 3, 2, 9),
    (4, 7, 5, 3, 4),
    (3, 2, 6, 1, 8),
)  # sequences, tokens, width, outputs, heads
EXACT = 1e-10

LIFTING_CLAIMS = (
    Claim(
        "a1", "Heads of linear attention have the output of one matrix Z",
        "largest difference over the largest output, float64", "at most", EXACT, by="ours",
    ),
    Claim(
        "a2", "So have heads of gated ReLU attention, one Z for each gate",
        "largest difference over the largest output, float64", "at most", EXACT, by="ours",
    ),
    Claim(
        "a3", "Heads from the singular value decomposition of Z have its output, and its nuclear norm as their penalty",
        "largest relative difference of the two, float64", "at most", EXACT, by="ours",
    ),
    Claim(
        "a4", "No heads with this output have a lower penalty",
        "least of penalty over nuclear norm, heads as drawn and as mixed by random matrices", "at least", 1.0, by="ours",
    ),
)  # fmt: skip


class HeadsCase(NamedTuple):
    """Tokens and heads, drawn."""

    x: Tensor
    maps: Tensor
    values: Tensor
    gates: Tensor


def draw_case(number: int) -> HeadsCase:
    n, s, d, c, m = CASE_SIZES[number]
    return HeadsCase(
        draw_normal(n, s, d, seed=number),
        draw_normal(m, d, d, seed=100 + number),
        draw_normal(m, d, c, seed=200 + number),
        draw_normal(2, d, d, seed=300 + number),
    )


def linear_difference(case: HeadsCase) -> float:
    """Between heads and their Z, linear attention."""
    direct = heads_output(case.x, case.maps, case.values).flatten(0, 1)
    return relative_difference(lifted_output(design(case.x), lift(case.maps, case.values)), direct)


def gated_difference(case: HeadsCase) -> float:
    """The same with two gates; heads take them in turn."""
    turn = torch.arange(len(case.maps)) % 2
    direct = heads_output(case.x, case.maps, case.values, case.gates[turn]).flatten(0, 1)
    Z = torch.cat([lift(case.maps[turn == g], case.values[turn == g]) for g in range(2)])
    return relative_difference(lifted_output(design(case.x, case.gates), Z), direct)


def penalty_of_heads(maps: Tensor, values: Tensor) -> float:
    return float((maps.square().sum() + values.square().sum()) / 2)


def recovery_difference(case: HeadsCase) -> float:
    """Of the recovered heads' output and penalty."""
    Z = lift(case.maps, case.values)
    maps, values = recover_heads(Z[0], 1e-14)
    output = relative_difference(heads_output(case.x, maps, values), heads_output(case.x, case.maps, case.values))
    return max(output, abs(penalty_of_heads(maps, values) / float(nuclear_norm(Z)) - 1))


def least_penalty(case: HeadsCase, draws: int = 20) -> float:
    """Penalty over nuclear norm: maps mixed by a matrix R and values by its inverse have the same Z."""
    m, norm = len(case.maps), float(nuclear_norm(lift(case.maps, case.values)))
    ratios = [penalty_of_heads(case.maps, case.values) / norm]
    for seed in range(draws):
        R = draw_normal(m, m, seed=seed) + 2 * torch.eye(m, dtype=torch.float64)
        maps = torch.einsum("jm,mab->jab", R, case.maps)
        values = torch.einsum("mj,mlc->jlc", torch.linalg.inv(R), case.values)
        ratios.append(penalty_of_heads(maps, values) / norm)
    return min(ratios)


def measure_lifting(setting: Setting) -> Results:
    cases = [draw_case(number) for number in range(len(CASE_SIZES))]
    of = f"none: largest of {len(cases)} layers"
    measured = {
        "a1": Measurement(max(map(linear_difference, cases)), 0.0, of),
        "a2": Measurement(max(map(gated_difference, cases)), 0.0, of),
        "a3": Measurement(max(map(recovery_difference, cases)), 0.0, of),
        "a4": Measurement(min(map(least_penalty, cases)), 0.0, f"none: least of {21 * len(cases)} sets of heads"),
    }
    return Results(measured)


LIFTING_STUDY = Study("the lifted problem", LIFTING_CLAIMS, measure_lifting)
