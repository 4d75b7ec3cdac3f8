"""Gated ReLU attention: the same equality with fixed gates, and what it says of ReLU attention: study c.

ReLU attention max(X W1 X^T, 0) is gated attention whose gates are its own heads, H_j = W1_j. With these gates fixed, the
convex problem can only be lower: its optimum is a lower bound that ReLU heads could reach only by keeping their signs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.sahiner2022.convex import Solutions, design, rank, solve
from locater_lab.papers.sahiner2022.descent import Problems, descended

SEQUENCES, TOKENS, WIDTH, OUTPUTS, PENALTY, GATES = 16, 4, 2, 2, 0.5, 3
SETS = 8
STARTS = {True: 2, False: 8}
STEPS = 80
SOLVER_STEPS = 3000
RELU_HEADS, RELU_STEPS = 4, {True: 600, False: 4000}
MOST = min(WIDTH * WIDTH, WIDTH * OUTPUTS)

CLAIMS = (
    Claim(
        "c1", "With fixed gates, heads and the convex problem have the same optimum",
        f"largest relative distance of the best start, {MOST} heads for each gate, eight sets of data", "at most", 1e-6, by="ours",
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
RELU = (
    Claim(
        "c4", "ReLU dot-product attention has an equivalent convex problem of finite size",
        "difference of the two optima", "at most", 0.0, where="abstract",
    ),
)  # fmt: skip


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens of length sqrt(d) and normal targets."""
    x = normal(SEQUENCES, TOKENS, WIDTH, seed=50 + seed)
    return math.sqrt(WIDTH) * x / x.norm(dim=-1, keepdim=True), normal(SEQUENCES * TOKENS, OUTPUTS, seed=1050 + seed)


def fixed_gates(starts: int) -> tuple[Solutions, Tensor]:
    """Convex optima, and relative distances of the best starts in heads."""
    gates = normal(GATES, WIDTH, WIDTH, seed=7)
    problems = Problems.of([(design(x, gates), y) for x, y in map(data, range(SETS))], PENALTY)
    optima = solve(problems.phi, problems.y, PENALTY, SOLVER_STEPS, 1e-9)
    objectives = descended(problems.repeated(starts), GATES * MOST, 1, STEPS).objective
    return optima, objectives.reshape(SETS, starts).min(1).values / optima.objective - 1


def relu_trained(x: Tensor, y: Tensor, steps: int, rate: float = 0.03) -> tuple[Tensor, Tensor]:
    """ReLU attention on P problems by Adam: objectives, and query-key maps (P, heads, d, d)."""
    P = len(x)
    maps = (0.3 * normal(P, RELU_HEADS, WIDTH, WIDTH, seed=1)).requires_grad_()
    values = (0.3 * normal(P, RELU_HEADS, WIDTH, OUTPUTS, seed=2)).requires_grad_()

    def objectives() -> Tensor:
        weights = torch.einsum("znsa,zmab,znub->znmsu", x, maps, x).clamp_min(0)
        out = torch.einsum("znmsu,znul,zmlc->znsc", weights, x, values).flatten(1, 2)
        squares = maps.square().flatten(1).sum(1) + values.square().flatten(1).sum(1)
        return ((out - y).square().flatten(1).sum(1) + PENALTY * squares) / 2

    optimizer = torch.optim.Adam([maps, values], lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        objectives().sum().backward()
        optimizer.step()
    with torch.no_grad():
        return objectives(), maps.detach()


def measure(setting: Setting) -> Results:
    optima, far = fixed_gates(STARTS[setting.quick])
    sets = [data(seed) for seed in range(SETS)]
    x, y = torch.stack([x for x, _ in sets]), torch.stack([y for _, y in sets])
    relu, maps = relu_trained(x, y, RELU_STEPS[setting.quick])
    own = solve(torch.stack([design(*one) for one in zip(x, maps, strict=True)]), y, PENALTY, SOLVER_STEPS, 1e-6)
    leads = (1 - own.objective / relu).tolist()
    rows = [
        {"set": n, "gated": float(optima.objective[n]), "ranks": " ".join(str(rank(Z, 1e-4)) for Z in optima.Z[n]),
         "relu": float(relu[n]), "own_gates": float(own.objective[n])}
        for n in range(SETS)
    ]  # fmt: skip
    measured = {
        "c1": Measurement(float(far.max()), 0.0, f"none: largest of {SETS} sets"),
        "c2": Measurement(min(leads), 0.0, f"none: least of {SETS} sets"),
        "c3": by_seed(leads),
    }
    return Results(measured, {"gated": {"rows": rows, "gates": GATES, "heads": RELU_HEADS}})


STUDY = Study("gated attention", CLAIMS, measure)
RELU_STUDY = Study(
    "ReLU attention itself",
    RELU,
    needs="the paper's cone for ReLU, which takes all sign patterns of (X kron X) vec W as gates",
)
