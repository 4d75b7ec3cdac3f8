"""What the mean cosine of tokens measures, and what it does not see: study a.

U are the tokens at unit length, n of them, and d(X) = ||X - 1 mean^T||_F is how far tokens are from all being equal.
Then

    CosSim(H) = (|sum u|^2 - n) / (n (n - 1)) = 1 - d(U)^2 / (n - 1)

so the paper's measure is its distance, taken after lengths are gone. After a LayerNorm without gain all tokens have one
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import torch
from jaxtyping import Float

from locater.measures import ranks, token_cosine, token_residual
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study

DRAWS = {True: 60, False: 600}
SEEDS = {True: 16, False: 64}
TOKENS, WIDTH = 64, 32
SHARED = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # a vector that all tokens have, in units of a token's own part
DIRECTIONS = (1, 2, 4, 8, 16, 32)
Tokens = Float[torch.Tensor, "tokens width"]

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
    batch = x[None]
    return {
        "cosine": token_cosine(batch).item(),
        "centred_cosine": token_cosine(batch, centred=True).item(),
        "rank": ranks(batch).effective.item(),
        "centred_rank": ranks(batch, centred=True).effective.item(),
    }


def _mean(draws: Sequence[dict[str, float]], name: str) -> float:
    return fmean(draw[name] for draw in draws)


def measure(setting: Setting) -> Results:
    """Identities on draws; then a shared vector that grows, and tokens in ever more directions."""
    errors = [identities(seed) for seed in range(DRAWS[setting.quick])]
    seeds = range(SEEDS[setting.quick])
    own = {seed: normal(TOKENS, WIDTH, seed=seed) for seed in seeds}
    shifted = {c: [readings(own[s] + c * normal(1, WIDTH, seed=s + 1000)) for s in seeds] for c in SHARED}
    few = {r: [readings(own[s][:, :r] @ normal(r, WIDTH, seed=s + 2000)) for s in seeds] for r in DIRECTIONS}
    plain = [draw["centred_rank"] for draw in shifted[0.0]]
    lost = [
        1 - draw["centred_rank"] / plain[s]
        for draws in shifted.values()
        for s, draw in enumerate(draws)
        if draw["cosine"] >= 0.99
    ]
    low = [draw["rank"] / WIDTH for draws in few.values() for draw in draws if draw["cosine"] < 0.05]
    largest = f"none: the largest of {len(errors)} draws"
    measured = {
        "a1": Measurement(max(e[0] for e in errors), 0.0, largest),
        "a2": Measurement(max(e[1] for e in errors), 0.0, largest),
        "a3": Measurement(max(lost), 0.0, f"none: the largest of {len(lost)} draws", {"draws": len(lost)}),
        "a4": Measurement(min(low), 0.0, f"none: the least of {len(low)} draws", {"draws": len(low)}),
        "a5": by_seed(centred_range(list(few.values())), {"equal": -1 / (TOKENS - 1)}),
    }
    sets = {f"shared vector {c:g}": draws for c, draws in shifted.items()}
    sets |= {f"{r} direction{'s' * (r > 1)}": draws for r, draws in few.items()}
    rows = [{"set": name, **{key: _mean(draws, key) for key in draws[0]}} for name, draws in sets.items()]
    return Results(measured, {"cosine_and_rank": {"tokens": TOKENS, "width": WIDTH, "rows": rows}})


def centred_range(sets: Sequence[Sequence[dict[str, float]]]) -> list[float]:
    """Cosine around the mean, by seed: the set with the largest mean less the one with the least."""
    ordered = sorted(sets, key=lambda draws: _mean(draws, "centred_cosine"))
    pairs = zip(ordered[-1], ordered[0], strict=True)
    return [high["centred_cosine"] - low["centred_cosine"] for high, low in pairs]


STUDY = Study("what the cosine of tokens sees", CLAIMS, measure)
