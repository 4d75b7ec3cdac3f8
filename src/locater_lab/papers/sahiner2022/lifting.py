"""The lifted problem has the outputs and, at best, the penalty of the heads: study a.

For any heads, Z = sum_j vec(W1_j) vec(W2_j)^T has their output. Its nuclear norm is at most their penalty,
|Z|_* <= sum_j (|W1_j|^2 + |W2_j|^2) / 2, with equality for the heads that its singular value decomposition gives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.sahiner2022.convex import design, heads_output, lift, lifted_output, nuclear, recovered

CASES = ((6, 4, 3, 2, 2), (6, 4, 3, 2, 9), (4, 7, 5, 3, 4), (3, 2, 6, 1, 8))  # sequences, tokens, width, outputs, heads
EXACT = 1e-10

CLAIMS = (
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


class Case(NamedTuple):
    """Tokens and heads, drawn."""

    x: Tensor
    maps: Tensor
    values: Tensor
    gates: Tensor


def drawn(number: int) -> Case:
    n, s, d, c, m = CASES[number]
    return Case(
        normal(n, s, d, seed=number),
        normal(m, d, d, seed=100 + number),
        normal(m, d, c, seed=200 + number),
        normal(2, d, d, seed=300 + number),
    )


def linear_difference(case: Case) -> float:
    """Between heads and their Z, linear attention."""
    direct = heads_output(case.x, case.maps, case.values).flatten(0, 1)
    return _relative(lifted_output(design(case.x), lift(case.maps, case.values)), direct)


def gated_difference(case: Case) -> float:
    """The same with two gates; heads take them in turn."""
    turn = torch.arange(len(case.maps)) % 2
    direct = heads_output(case.x, case.maps, case.values, case.gates[turn]).flatten(0, 1)
    Z = torch.cat([lift(case.maps[turn == g], case.values[turn == g]) for g in range(2)])
    return _relative(lifted_output(design(case.x, case.gates), Z), direct)


def penalty(maps: Tensor, values: Tensor) -> float:
    return float((maps.square().sum() + values.square().sum()) / 2)


def recovery_difference(case: Case) -> float:
    """Of the recovered heads' output and penalty."""
    Z = lift(case.maps, case.values)
    maps, values = recovered(Z[0], 1e-14)
    output = _relative(heads_output(case.x, maps, values), heads_output(case.x, case.maps, case.values))
    return max(output, abs(penalty(maps, values) / float(nuclear(Z)) - 1))


def least_penalty(case: Case, draws: int = 20) -> float:
    """Penalty over nuclear norm: maps mixed by a matrix R and values by its inverse have the same Z."""
    m, norm = len(case.maps), float(nuclear(lift(case.maps, case.values)))
    ratios = [penalty(case.maps, case.values) / norm]
    for seed in range(draws):
        R = normal(m, m, seed=seed) + 2 * torch.eye(m, dtype=torch.float64)
        maps = torch.einsum("jm,mab->jab", R, case.maps)
        values = torch.einsum("mj,mlc->jlc", torch.linalg.inv(R), case.values)
        ratios.append(penalty(maps, values) / norm)
    return min(ratios)


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def measure(setting: Setting) -> Results:
    cases = [drawn(number) for number in range(len(CASES))]
    of = f"none: largest of {len(cases)} layers"
    measured = {
        "a1": Measurement(max(map(linear_difference, cases)), 0.0, of),
        "a2": Measurement(max(map(gated_difference, cases)), 0.0, of),
        "a3": Measurement(max(map(recovery_difference, cases)), 0.0, of),
        "a4": Measurement(min(map(least_penalty, cases)), 0.0, f"none: least of {21 * len(cases)} sets of heads"),
    }
    return Results(measured)


STUDY = Study("the lifted problem", CLAIMS, measure)
