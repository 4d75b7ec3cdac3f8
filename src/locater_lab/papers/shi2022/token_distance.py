"""How alike tokens are, and what each part of a block does to that: what their mean cosine sees (study a), and bounds
part by part (study b).

**Cosine (study a).** U are the tokens at unit length, n of them, and d(X) = ||X - 1 mean^T||_F is how far tokens are
from all being equal. Then

    CosSim(H) = (|sum u|^2 - n) / (n (n - 1)) = 1 - d(U)^2 / (n - 1)

so the paper's measure is its distance, taken after lengths are gone. After a LayerNorm without gain all tokens have one
length.

**Bounds (study b)** of what each part of a block does to d(H) = ||H - 1 mean^T||_F, over random draws:

    attention   d(A H) <= sqrt(lambda) d(H), lambda = largest eigenvalue of A^T (I - J) A, J = 1 1^T / n, rows of A sum to 1
    weights     d(H W) <= ||W|| d(H)
    activation  d(f(H)) <= L d(H), L its steepest slope: 1 for ReLU
    LayerNorm   d(LN(H)) <= max|gain| d(H) / sigma, sigma the least standard deviation of a token

All follow from d^2 = sum over pairs |h_i - h_j|^2 / (2 n). A shared bias is no part of d.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from locater.measures import ranks, token_cosine, token_residual
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study

# ---- a: what the cosine of tokens sees ----


COSINE_DRAWS = {True: 60, False: 600}
SEEDS = {True: 16, False: 64}
TOKENS, WIDTH = 64, 32
SHARED = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # a vector that all tokens have, in units of a token's own part
DIRECTIONS = (1, 2, 4, 8, 16, 32)
Tokens = Float[torch.Tensor, "tokens width"]

COSINE_CLAIMS = (
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


def distance_from_equal(x: Tokens) -> float:
    """d(X) = ||X - 1 mean^T||_F, the paper's distance to the tokens that are all equal.

    >>> distance_from_equal(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) ** 2
    2.0000000000000004
    """
    return token_residual(x).norm().item()


def mean_cosine_by_pairs(x: Tokens) -> float:
    """Mean cosine, pair by pair.

    >>> mean_cosine_by_pairs(torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]))
    0.3333333333333333
    """
    return fmean(float(a @ b / (a.norm() * b.norm())) for a, b in combinations(x, 2))


def identity_errors(seed: int) -> tuple[float, float]:
    """Errors of a1 and a2 on one draw; lengths of tokens differ by up to a thousand."""
    n, width = (2, 5, 12)[seed % 3], (3, 16)[seed % 2]
    x = (draw_normal(n, width, seed=seed) + (seed % 4) * draw_normal(1, width, seed=seed + 1)) * (
        3 * draw_normal(n, 1, seed=seed + 2)
    ).exp()
    cosine = token_cosine(x[None]).item()
    units = x / x.norm(dim=1, keepdim=True)
    return abs(cosine - mean_cosine_by_pairs(x)), abs(1 - cosine - distance_from_equal(units) ** 2 / (n - 1))


def token_readings(x: Tokens) -> dict[str, float]:
    """Cosine and effective rank, as the tokens are and around their mean."""
    batch = x[None]
    return {
        "cosine": token_cosine(batch).item(),
        "centred_cosine": token_cosine(batch, centred=True).item(),
        "rank": ranks(batch).effective.item(),
        "centred_rank": ranks(batch, centred=True).effective.item(),
    }


def _mean_reading(draws: Sequence[dict[str, float]], name: str) -> float:
    return fmean(draw[name] for draw in draws)


def measure_cosine(setting: Setting) -> Results:
    """Identities on draws; then a shared vector that grows, and tokens in ever more directions."""
    errors = [identity_errors(seed) for seed in range(COSINE_DRAWS[setting.quick])]
    seeds = range(SEEDS[setting.quick])
    own = {seed: draw_normal(TOKENS, WIDTH, seed=seed) for seed in seeds}
    shifted = {c: [token_readings(own[s] + c * draw_normal(1, WIDTH, seed=s + 1000)) for s in seeds] for c in SHARED}
    few = {r: [token_readings(own[s][:, :r] @ draw_normal(r, WIDTH, seed=s + 2000)) for s in seeds] for r in DIRECTIONS}
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
    rows = [{"set": name, **{key: _mean_reading(draws, key) for key in draws[0]}} for name, draws in sets.items()]
    return Results(measured, {"cosine_and_rank": {"tokens": TOKENS, "width": WIDTH, "rows": rows}})


def centred_range(sets: Sequence[Sequence[dict[str, float]]]) -> list[float]:
    """Cosine around the mean, by seed: the set with the largest mean less the one with the least."""
    ordered = sorted(sets, key=lambda draws: _mean_reading(draws, "centred_cosine"))
    pairs = zip(ordered[-1], ordered[0], strict=True)
    return [high["centred_cosine"] - low["centred_cosine"] for high, low in pairs]


COSINE_STUDY = Study("what the cosine of tokens sees", COSINE_CLAIMS, measure_cosine)


# ---- b: bounds, part by part ----


BOUND_DRAWS = {True: 600, False: 6000}
MAPS = {True: 40, False: 200}
LOGITS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)  # standard deviations
KEYS = 32
STEEPEST = 0.5 + math.erf(1) / 2 + math.exp(-1) / math.sqrt(math.pi)  # slope of GELU at sqrt 2: Phi(x) + x phi(x)

BOUNDS_CLAIMS = (
    Claim(
        "b1", "Attention: d(A H) at most sqrt(λ) d(H)", "largest d(A H) / (sqrt(λ) d(H)), softmax maps, half of them causal", "at most", 1.0, by="ours",
    ),
    Claim(
        "b2", "No smaller factor will do: tokens along one eigenvector attain it",
        "largest shortfall of d(A H) / (sqrt(λ) d(H)) from 1, H the first eigenvector of A^T (I - J) A", "at most", 1e-9, by="ours",
    ),
    Claim(
        "b3", "Attention without a mask brings all tokens closer: λ is at most 1, as on a symmetric graph",
        "mean λ of maps with logits of standard deviation 4", "at most", 1.0, by="ours",
    ),
    Claim(
        "b4", "Under a causal mask too, where logits are small",
        "mean λ of causal maps with logits of standard deviation 0.1", "at most", 1.0, by="ours",
    ),
    Claim("b5", "Weights: d(H W) at most the norm of W times d(H)", "largest share of the bound", "at most", 1.0, by="ours"),
    Claim("b6", "ReLU: d(ReLU H) at most d(H)", "largest d(ReLU H) / d(H)", "at most", 1.0, by="ours"),
    Claim("b7", "The same holds for GELU, which BERT has", "largest d(GELU H) / d(H), channels around 1.5", "at most", 1.0, by="ours"),
    Claim(
        "b8", "LayerNorm: d(LN H) at most the largest gain times d(H) / σ, σ the least standard deviation of a token",
        "largest share of the bound, gains of either sign", "at most", 1.0, by="ours",
    ),
)  # fmt: skip


def attention_map(seed: int, n: int, logits: float, causal: bool) -> Float[Tensor, "n n"]:
    """softmax of independent normal logits."""
    x = logits * draw_normal(n, n, seed=seed)
    return (x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -math.inf) if causal else x).softmax(-1)


def attention_eigenvalue(a: Float[Tensor, "n n"]) -> float:
    """lambda: largest eigenvalue of A^T (I - J) A, the square of ||(I - J) A||.

    >>> n = 4
    >>> round(attention_eigenvalue(torch.full((n, n), 1 / n)), 12), round(attention_eigenvalue(torch.eye(n)), 12)
    (0.0, 1.0)
    """
    return torch.linalg.matrix_norm(a - a.mean(0), 2).item() ** 2


def layer_norm(
    x: Float[Tensor, "tokens width"], gain: Float[Tensor, " width"] | None = None
) -> Float[Tensor, "tokens width"]:
    """Without eps: it would only help the bound."""
    return functional.layer_norm(x, x.shape[-1:], gain, eps=0.0)


def least_deviation(x: Float[Tensor, "tokens width"]) -> float:
    return x.std(-1, correction=0).min().item()


def bound_shares(seed: int) -> dict[str, float]:
    """How much of each bound one draw uses."""
    n, width, size = (4, 16, 48)[seed % 3], (6, 24)[seed % 2], (0.1, 1.0, 4.0)[seed // 3 % 3]
    x = size * draw_normal(n, width, seed=seed) + draw_normal(1, width, seed=seed + 10_000)
    a = attention_map(seed + 20_000, n, (0.3, 1.0, 4.0)[seed // 2 % 3], causal=seed % 4 > 1)
    W, gain = draw_normal(width, width, seed=seed + 30_000), draw_normal(width, seed=seed + 40_000)
    before = distance_from_equal(x)
    near = (0.2 + 0.4 * (seed % 5)) * draw_normal(n, width, seed=seed + 50_000) + 1.5
    direction = torch.linalg.eigh(a.mT @ (a - a.mean(0)))[1][:, -1:]
    return {
        "attention": distance_from_equal(a @ x) / (attention_eigenvalue(a) ** 0.5 * before),
        "attained": distance_from_equal(a @ direction)
        / (attention_eigenvalue(a) ** 0.5 * distance_from_equal(direction)),
        "weights": distance_from_equal(x @ W) / (torch.linalg.matrix_norm(W, 2).item() * before),
        "ReLU": distance_from_equal(x.relu()) / before,
        "GELU": distance_from_equal(functional.gelu(near)) / distance_from_equal(near),
        "LayerNorm": distance_from_equal(layer_norm(x, gain)) * least_deviation(x) / (gain.abs().max().item() * before),
    }


def mean_eigenvalues(setting: Setting, causal: bool) -> dict[float, list[float]]:
    """lambda of random maps, by the standard deviation of their logits."""
    seeds = range(MAPS[setting.quick])
    return {size: [attention_eigenvalue(attention_map(seed, KEYS, size, causal)) for seed in seeds] for size in LOGITS}


def measure_bounds(setting: Setting) -> Results:
    """All draws, and the table of lambda."""
    draws = [bound_shares(seed) for seed in setting.each(list(range(BOUND_DRAWS[setting.quick])))]
    parts = {name: [draw[name] for draw in draws] for name in draws[0]}
    free, causal = mean_eigenvalues(setting, causal=False), mean_eigenvalues(setting, causal=True)
    which = f"none: the largest of {len(draws)} draws"

    def largest(name: str) -> Measurement:
        return Measurement(max(parts[name]), 0.0, which)

    measured = {
        "b1": largest("attention"),
        "b2": Measurement(1 - min(parts["attained"]), 0.0, which),
        "b3": by_seed(free[4.0], of="maps"),
        "b4": by_seed(causal[0.1], of="maps"),
        "b5": largest("weights"),
        "b6": largest("ReLU"),
        "b7": largest("GELU"),
        "b8": largest("LayerNorm"),
    }
    rows = [
        {
            "logits": size,
            "free": fmean(free[size]),
            "free_largest": max(free[size]),
            "causal": fmean(causal[size]),
            "causal_largest": max(causal[size]),
        }
        for size in LOGITS
    ]
    tables: dict[str, Any] = {
        "lambda_of_maps": {"keys": KEYS, "most": KEYS / 2, "rows": rows},
        "median_shares": {name: median(parts[name]) for name in ("attention", "weights", "LayerNorm")},
        "gelu_slope": STEEPEST,
    }
    return Results(measured, tables)


BOUNDS_STUDY = Study("bounds, part by part", BOUNDS_CLAIMS, measure_bounds)
