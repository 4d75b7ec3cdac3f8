"""What each part of a block does to d(H) = ||H - 1 mean^T||_F, over random draws: study b.

    attention   d(A H) <= sqrt(lambda) d(H), lambda = largest eigenvalue of A^T (I - J) A, J = 1 1^T / n, rows of A sum to 1
    weights     d(H W) <= ||W|| d(H)
    activation  d(f(H)) <= L d(H), L its steepest slope: 1 for ReLU
    LayerNorm   d(LN(H)) <= max|gain| d(H) / sigma, sigma the least standard deviation of a token

All follow from d^2 = sum over pairs |h_i - h_j|^2 / (2 n). A shared bias is no part of d.
"""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.shi2022.cosine import distance

DRAWS = {True: 600, False: 6000}
MAPS = {True: 40, False: 200}
LOGITS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)  # standard deviations
KEYS = 32
STEEPEST = 0.5 + math.erf(1) / 2 + math.exp(-1) / math.sqrt(math.pi)  # slope of GELU at sqrt 2: Phi(x) + x phi(x)

CLAIMS = (
    Claim(
        "b1", "Attention: d(A H) at most sqrt(λ) d(H)", "largest d(A H) / (sqrt(λ) d(H)), softmax maps, half of them causal", "at most", 1.0,
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
    Claim("b5", "Weights: d(H W) at most the norm of W times d(H)", "largest share of the bound", "at most", 1.0),
    Claim("b6", "ReLU: d(ReLU H) at most d(H)", "largest d(ReLU H) / d(H)", "at most", 1.0),
    Claim("b7", "The same holds for GELU, which BERT has", "largest d(GELU H) / d(H), channels around 1.5", "at most", 1.0, by="ours"),
    Claim(
        "b8", "LayerNorm: d(LN H) at most the largest gain times d(H) / σ, σ the least standard deviation of a token",
        "largest share of the bound, gains of either sign", "at most", 1.0, by="ours",
    ),
)  # fmt: skip


def attention_map(seed: int, n: int, logits: float, causal: bool) -> Float[Tensor, "n n"]:
    """softmax of independent normal logits."""
    x = logits * normal(n, n, seed=seed)
    return (x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -math.inf) if causal else x).softmax(-1)


def lam(a: Float[Tensor, "n n"]) -> float:
    """lambda: largest eigenvalue of A^T (I - J) A, the square of ||(I - J) A||.

    >>> n = 4
    >>> round(lam(torch.full((n, n), 1 / n)), 12), round(lam(torch.eye(n)), 12)
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


def shares(seed: int) -> dict[str, float]:
    """How much of each bound one draw uses."""
    n, width, size = (4, 16, 48)[seed % 3], (6, 24)[seed % 2], (0.1, 1.0, 4.0)[seed // 3 % 3]
    x = size * normal(n, width, seed=seed) + normal(1, width, seed=seed + 10_000)
    a = attention_map(seed + 20_000, n, (0.3, 1.0, 4.0)[seed // 2 % 3], causal=seed % 4 > 1)
    W, gain = normal(width, width, seed=seed + 30_000), normal(width, seed=seed + 40_000)
    before = distance(x)
    near = (0.2 + 0.4 * (seed % 5)) * normal(n, width, seed=seed + 50_000) + 1.5
    direction = torch.linalg.eigh(a.mT @ (a - a.mean(0)))[1][:, -1:]
    return {
        "attention": distance(a @ x) / (lam(a) ** 0.5 * before),
        "attained": distance(a @ direction) / (lam(a) ** 0.5 * distance(direction)),
        "weights": distance(x @ W) / (torch.linalg.matrix_norm(W, 2).item() * before),
        "ReLU": distance(x.relu()) / before,
        "GELU": distance(functional.gelu(near)) / distance(near),
        "LayerNorm": distance(layer_norm(x, gain)) * least_deviation(x) / (gain.abs().max().item() * before),
    }


def lambdas(setting: Setting, causal: bool) -> dict[float, list[float]]:
    """lambda of random maps, by the standard deviation of their logits."""
    seeds = range(MAPS[setting.quick])
    return {size: [lam(attention_map(seed, KEYS, size, causal)) for seed in seeds] for size in LOGITS}


def measure(setting: Setting) -> Results:
    """All draws, and the table of lambda."""
    draws = [shares(seed) for seed in setting.each(list(range(DRAWS[setting.quick])))]
    parts = {name: [draw[name] for draw in draws] for name in draws[0]}
    free, causal = lambdas(setting, causal=False), lambdas(setting, causal=True)
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


STUDY = Study("bounds, part by part", CLAIMS, measure)
