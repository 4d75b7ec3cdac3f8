"""What the mean cosine of tokens measures, and what it does not see: study a.

U are the tokens at unit length, n of them, and d(X) = ||X - 1 mean^T||_F is how far tokens are from all being equal.
Then

    CosSim(H) = (|sum u|^2 - n) / (n (n - 1)) = 1 - d(U)^2 / (n - 1)

so the paper's measure is its distance, taken after lengths are gone. After a LayerNorm without gain all tokens have one
length.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import ranks, token_cosine, token_residual
from locater_papers.engine.claims import Claim, Measured
from locater_papers.engine.draws import normal
from locater_papers.engine.papers import Setting, Study

DRAWS = {True: 60, False: 600}
SEEDS = {True: 16, False: 64}
TOKENS, WIDTH = 64, 32
SHARED = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # a vector that all tokens have, in units of a token's own part
DIRECTIONS = (1, 2, 4, 8, 16, 32)
Tokens = Float[Tensor, "tokens width"]

CLAIMS = (
    Claim(
        "a1", "The mean cosine of all pairs of tokens follows from the sum of unit vectors, without any pair",
        "largest difference from the mean over written-out pairs", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a2", "It is the distance from equal tokens once lengths are gone: 1 - CosSim = d(U)^2 / (n - 1)",
        "largest difference of the two sides", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a3", "Cosine near 1 means that tokens have lost directions",
        f"share of effective rank around the mean that {TOKENS} Gaussian tokens lose to a shared vector that takes their cosine to 0.99",
        "at least", 0.5, by="ours",
    ),
    Claim(
        "a4", "Cosine near 0 means that tokens have many directions",
        f"effective rank of tokens with a cosine under 0.05, least of the draws, over the width {WIDTH}", "at least", 0.5, by="ours",
    ),
    Claim(
        "a5", "Cosine around the mean tells few directions from many",
        f"its mean over tokens in 1, 2, ... {WIDTH} directions: largest less least", "at least", 0.1, by="ours",
    ),
)  # fmt: skip


def distance(x: Tokens) -> float:
    """d(X) = ||X - 1 mean^T||_F, the paper's distance to the tokens that are all equal.

    >>> distance(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) ** 2
    2.0000000000000004
    """
    return token_residual(x).norm().item()


def by_pairs(x: Tokens) -> float:
    """Mean cosine, pair by pair.

    >>> by_pairs(torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]))
    0.3333333333333333
    """
    return fmean(float(a @ b / (a.norm() * b.norm())) for a, b in combinations(x, 2))


def identities(seed: int) -> tuple[float, float]:
    """Errors of a1 and a2 on one draw; lengths of tokens differ by up to a thousand."""
    n, width = (2, 5, 12)[seed % 3], (3, 16)[seed % 2]
    x = (normal(n, width, seed=seed) + (seed % 4) * normal(1, width, seed=seed + 1)) * (
        3 * normal(n, 1, seed=seed + 2)
    ).exp()
    cosine = token_cosine(x[None]).item()
    units = x / x.norm(dim=1, keepdim=True)
    return abs(cosine - by_pairs(x)), abs(1 - cosine - distance(units) ** 2 / (n - 1))


def readings(x: Tokens) -> dict[str, float]:
    """Cosine and effective rank, as the tokens are and around their mean."""
    held = x[None]
    return {
        "cosine": token_cosine(held).item(), "centred_cosine": token_cosine(held, centred=True).item(),
        "rank": ranks(held).effective.item(), "centred_rank": ranks(held, centred=True).effective.item(),
    }  # fmt: skip


def _means(draws: list[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(draw[name] for draw in draws) for name in draws[0]}


def measure(setting: Setting) -> Mapping[str, Measured]:
    """Identities on draws; then a shared vector that grows, and tokens in ever more directions."""
    errors = [identities(seed) for seed in range(DRAWS[setting.quick])]
    seeds = range(SEEDS[setting.quick])
    own = {seed: normal(TOKENS, WIDTH, seed=seed) for seed in seeds}
    shifted = {c: [readings(own[s] + c * normal(1, WIDTH, seed=s + 1000)) for s in seeds] for c in SHARED}
    few = {r: [readings(own[s][:, :r] @ normal(r, WIDTH, seed=s + 2000)) for s in seeds] for r in DIRECTIONS}
    plain = [draw["centred_rank"] for draw in shifted[0.0]]
    lost = [
        1 - d["centred_rank"] / plain[s]
        for draws in shifted.values()
        for s, d in enumerate(draws)
        if d["cosine"] >= 0.99
    ]
    low = [draw["rank"] / WIDTH for draws in few.values() for draw in draws if draw["cosine"] < 0.05]
    means = [fmean(draw["centred_cosine"] for draw in draws) for draws in few.values()]
    tables: dict[str, Any] = {
        "shared": [{"shared": c, **_means(draws)} for c, draws in shifted.items()],
        "directions": [{"directions": r, **_means(draws)} for r, draws in few.items()],
        "tokens": TOKENS, "width": WIDTH,
    }  # fmt: skip
    spread = max(
        2 * torch.tensor([d["centred_cosine"] for d in draws]).std().item() / len(draws) ** 0.5
        for draws in few.values()
    )
    largest = f"none: the largest of {len(errors)} draws"
    return {
        "a1": Measured(max(e[0] for e in errors), 0.0, largest, tables),
        "a2": Measured(max(e[1] for e in errors), 0.0, largest),
        "a3": Measured(max(lost), 0.0, f"none: the largest of {len(lost)} draws", {"draws": len(lost)}),
        "a4": Measured(min(low), 0.0, f"none: the least of {len(low)} draws", {"draws": len(low)}),
        "a5": Measured(
            max(means) - min(means),
            2 * spread,
            "4 standard errors of the least certain mean",
            {"equal": -1 / (TOKENS - 1)},
        ),
    }


STUDY = Study("what the cosine of tokens sees", CLAIMS, measure)
