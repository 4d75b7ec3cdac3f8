"""The gap in the spectrum of attention maps: of random maps (study a), of trained models' maps, and training without
the outlier (studies e and f).

**Random maps.** One value is at 1, the rest in a disk that shrinks as 1 / sqrt(T). A map is the softmax of independent
normal logits with variance log(1 + sigma^2), so that its entries before the row sum is taken are log-normal, with
standard deviation sigma over mean. `mechanism(...)` makes it, from queries that are the logits and keys that tell
positions apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.arms import Line, difference, study_of_arms, table_of_arms
from locater_lab.engine.claims import Claim, Measurement, by_seed, half_range
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.mechanism_runs import MASKED, SOFTMAX, SOFTMAX_MASKED, arm
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Arm, Runs
from locater_lab.engine.trained_models import HALVES, LENGTH, trained_layers
from locater_lab.mechanisms import mechanism

# ---- a: random maps ----


Map = Float[Tensor, "T T"]

MAP_TOKENS = {True: 512, False: 1024}
MAP_SEEDS = {True: 8, False: 8}
SIGMAS = (0.5, 1.0, 2.0)
MAP_LENGTHS = (64, 128, 256, 512)
LAMBDAS = (0.0, 0.2, 0.5, 0.8, 1.0)
HEAD = 64  # channels of a head whose queries and keys are independent
EDGE = 10  # the singular value that stands for the edge of the bulk: the first few are those of its largest entries
OFF_DIAGONAL = 0.1

RANDOM_CLAIMS = (
    Claim(
        "a1", "The largest eigenvalue of an attention map is 1",
        "largest distance of the largest eigenvalue from 1, random maps", "at most", 1e-10,
    ),
    Claim(
        "a2", "The second eigenvalue of a random map shrinks with the number of tokens as σ / sqrt(T)",
        "size of λ_2 times sqrt(T) / σ, σ = 1", "about", 1.0, OFF_DIAGONAL, where="by the law of Bordenave, Caputo and Chafaï", bound="ours",
    ),
    Claim(
        "a3", "Its second singular value shrinks as 2 σ / sqrt(T), while the first stays at 1: a gap opens",
        "s_2 sqrt(T) / (2 σ), σ = 1", "about", 1.0, OFF_DIAGONAL, where="abstract", bound="ours",
    ),
    Claim(
        "a4", "The same holds for less even maps at this number of tokens",
        "s_2 sqrt(T) / (2 σ), σ = 2", "about", 1.0, OFF_DIAGONAL, by="ours",
    ),
    Claim(
        "a5", "The stable rank of the map itself tends to 1 + σ^2, not to 1",
        "sum of s_i^2 over s_1^2, σ = 1", "about", 2.0, 0.05, by="ours",
    ),
    Claim(
        "a6", "Logits of keys and queries open a smaller gap than 2 σ says",
        "s_2 sqrt(T) / (2 σ) of key-query logits of variance 1, σ^2 = e - 1", "at least", 1.05, by="ours",
    ),
    Claim(
        "a7", "It is not the tail of the log-normal alone: their whole bulk is wider than that of independent logits of the same variance",
        f"singular value {EDGE} over that of independent logits", "at least", 1.05, by="ours",
    ),
    Claim(
        "a8", "Weights drawn after Xavier on orthonormal tokens make attention uniform: no bulk is left to speak of",
        "s_2 sqrt(T) of such a map", "at most", 0.05, by="ours",
    ),
    Claim(
        "a9", "Differential attention closes the gap as λ grows: s_1 / s_2 = (1 - λ) sqrt(T) / (2 σ sqrt(1 + λ^2)) while that is above 1",
        "largest relative distance of s_1 / s_2 from it, λ = 0 to 0.8", "at most", 0.15, by="ours",
    ),
)  # fmt: skip


def random_map(T: int, seed: int, sigma: float = 1.0, name: str = "softmax", causal: bool = False) -> Map:
    """The map of a mechanism for independent normal logits of variance log(1 + sigma^2).

    >>> A = random_map(3, 0, causal=True)
    >>> bool((A.sum(-1) - 1).abs().max() < 1e-12), A.triu(1).abs().max().item()
    (True, 0.0)
    """
    logits = math.sqrt(math.log1p(sigma**2)) * draw_normal(T, T, seed=seed)
    places = torch.eye(T, dtype=torch.float64)
    return mechanism(name).map(logits[None, None], places[None, None], scale=1.0, causal=causal)[0, 0]


def orthonormal(T: int, seed: int) -> Float[Tensor, "T T"]:
    """T tokens of T channels, of length 1 and at right angles."""
    return torch.linalg.qr(draw_normal(T, T, seed=seed))[0]


def key_query_map(T: int, seed: int, deviation: float) -> tuple[Map, float]:
    """softmax(X W_Q W_K^T X^T / sqrt(d)) of orthonormal tokens, weights N(0, deviation^2); and the variance of its
    logits.
    """
    x = orthonormal(T, seed)
    q, k = (x @ draw_normal(T, T, seed=seed + n) * deviation for n in (101, 102))
    return mechanism("softmax").map(q[None, None], k[None, None])[0, 0], float((q @ k.mT / math.sqrt(T)).var())


def leading_values(A: Map) -> dict[str, float]:
    """Sizes of the first two eigenvalues and singular values, and the stable rank."""
    values = torch.linalg.eigvals(A).abs().sort(descending=True).values
    s = torch.linalg.svdvals(A)
    rank = float(s.square().sum() / s[0] ** 2)
    return {
        "lambda_1": float(values[0]),
        "lambda_2": float(values[1]),
        "s_1": float(s[0]),
        "s_2": float(s[1]),
        "stable_rank": rank,
    }


def differential_ratio(T: int, lam: float, seed: int, independent: bool = True) -> float:
    """s_1 / s_2 of the difference of two maps: of independent logits with sigma = 1, or of independent queries and
    keys.
    """
    if independent:
        q = math.sqrt(math.log(2)) * torch.cat([draw_normal(T, T, seed=seed), draw_normal(T, T, seed=seed + 1)], -1)
        k, scale = torch.eye(T, dtype=torch.float64).repeat(1, 2), 1.0
    else:
        q, k, scale = draw_normal(T, 2 * HEAD, seed=seed), draw_normal(T, 2 * HEAD, seed=seed + 1), HEAD**-0.5
    s = torch.linalg.svdvals(mechanism("differential").map(q[None, None], k[None, None], scale=scale, lam=lam)[0, 0])
    return float(s[0] / s[1])


def expected_ratio(T: int, lam: float, sigma: float = 1.0) -> float:
    """(1 - lam) sqrt(T) / (2 sigma sqrt(1 + lam^2)): the outlier over the edge of the bulk of two independent maps."""
    return (1 - lam) * math.sqrt(T) / (2 * sigma * math.sqrt(1 + lam**2))


def measure_random(setting: Setting) -> Results:
    """Random maps of growing length and of three sizes; the other kinds at the largest length."""
    T, seeds = MAP_TOKENS[setting.quick], range(MAP_SEEDS[setting.quick])
    parts = _independent_draws(T, seeds), _key_query_draws(T, seeds), _differential_draws(T, seeds)
    return Results(
        {key: value for part in parts for key, value in part.measured.items()},
        {name: table for part in parts for name, table in part.tables.items()},
    )


def _independent_draws(T: int, seeds: Sequence[int]) -> Results:
    """Maps of independent logits."""
    draws = {sigma: [leading_values(random_map(T, seed, sigma)) for seed in seeds] for sigma in SIGMAS}
    root = math.sqrt(T)
    first = max(abs(draw["lambda_1"] - 1) for some in draws.values() for draw in some)
    measured = {
        "a1": Measurement(first, 0.0, f"none: largest of {len(SIGMAS) * len(seeds)} maps"),
        "a2": by_seed([draw["lambda_2"] * root for draw in draws[1.0]]),
        "a3": by_seed([draw["s_2"] * root / 2 for draw in draws[1.0]]),
        "a4": by_seed([draw["s_2"] * root / 4 for draw in draws[2.0]]),
        "a5": by_seed([draw["stable_rank"] for draw in draws[1.0]]),
    }
    rows = []
    for sigma, some in draws.items():
        means = _mean_draws(some)
        scaled = {"lambda_2": means["lambda_2"] * root / sigma, "s_2": means["s_2"] * root / (2 * sigma)}
        rows.append({"sigma": sigma, **means, **scaled, "limit": 1 + sigma**2})
    shorter = {n: [leading_values(random_map(n, seed)) for seed in seeds] for n in MAP_LENGTHS if n < T}
    growth = [
        {"tokens": n, **_mean_draws(some), "s_2_limit": 2 * n**-0.5, "lambda_2_limit": n**-0.5}
        for n, some in {**shorter, T: draws[1.0]}.items()
    ]
    return Results(
        measured, {"random_maps": {"tokens": T, "rows": rows, "growth": growth}, "eigenvalues": _eigenvalue_cloud()}
    )


def _eigenvalue_cloud(T: int = MAP_LENGTHS[1]) -> dict[str, Any]:
    """Eigenvalues of one map in the plane, and the circle of radius 1 / sqrt(T)."""
    values = torch.linalg.eigvals(random_map(T, 0))
    angles = [math.pi * n / 30 for n in range(61)]
    return {
        "tokens": T,
        "values": [[float(z.real), float(z.imag)] for z in values],
        "circle": [[math.cos(angle) / math.sqrt(T), math.sin(angle) / math.sqrt(T)] for angle in angles],
    }


def _key_query_draws(T: int, seeds: Sequence[int]) -> Results:
    """Maps of queries and keys: weights N(0, 1), and weights drawn after Xavier."""
    unit = [_beside_independent(T, seed) for seed in seeds]
    xavier = [torch.linalg.svdvals(key_query_map(T, seed, T**-0.5)[0])[1].item() * math.sqrt(T) for seed in seeds]
    measured = {
        "a6": by_seed([draw["s_2"] / draw["limit"] for draw in unit]),
        "a7": by_seed([draw["edge"] / draw["independent_edge"] for draw in unit]),
        "a8": by_seed(xavier),
    }
    return Results(measured, {"key_query_maps": {"tokens": T, **_mean_draws(unit)}})


def _beside_independent(T: int, seed: int) -> dict[str, float]:
    """sqrt(T) times singular values of a key-query map with weights N(0, 1), and of independent logits of the same
    variance.
    """
    key_query, variance = key_query_map(T, seed, 1.0)
    sigma = math.sqrt(math.expm1(variance))
    own, plain = (torch.linalg.svdvals(A) * math.sqrt(T) for A in (key_query, random_map(T, seed + 500, sigma)))
    return {
        "limit": 2 * sigma,
        "s_2": float(own[1]),
        "edge": float(own[EDGE - 1]),
        "independent_s_2": float(plain[1]),
        "independent_edge": float(plain[EDGE - 1]),
    }


def _differential_draws(T: int, seeds: Sequence[int]) -> Results:
    """Differences of two maps, by λ."""
    ratios = {lam: [differential_ratio(T, lam, 10 * seed) for seed in seeds] for lam in LAMBDAS}
    heads = {lam: [differential_ratio(T, lam, 10 * seed, independent=False) for seed in seeds] for lam in LAMBDAS}
    off = [max(abs(ratios[lam][n] / expected_ratio(T, lam) - 1) for lam in LAMBDAS if lam < 0.9) for n in seeds]
    rows = [
        {
            "lambda": lam,
            "independent": fmean(ratios[lam]),
            "formula": max(1.0, expected_ratio(T, lam)),
            "heads": fmean(heads[lam]),
        }
        for lam in LAMBDAS
    ]
    return Results({"a9": by_seed(off)}, {"differential_maps": {"tokens": T, "head": HEAD, "rows": rows}})


def _mean_draws(draws: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(draw[name] for draw in draws) for name in draws[0]}


RANDOM_STUDY = Study("the gap of random maps", RANDOM_CLAIMS, measure_random)


# ---- e and f: trained maps, and training without the outlier ----


TRAINED_CLAIMS = (
    Claim(
        "e1", "A trained map without a mask has the gap of a random one: s_2 = 2 σ / sqrt(T), with the σ of its own entries",
        f"s_2 sqrt(T) / (2 σ), σ^2 = sum of A_ij^2 less 1, median over heads, encoders on {LENGTH} tokens", "about", 1.0, 0.25, by="ours",
    ),
    Claim(
        "e2", "It has a gap at all: the second singular value is less than half of the first",
        "s_2 / s_1, median over heads, encoders", "at most", 0.5, by="ours",
    ),
    Claim(
        "e3", "Causal trained maps have none",
        "s_2 / s_1, median over heads, causal models", "at least", 0.5, by="ours",
    ),
)  # fmt: skip


def gaps(A: Float[Tensor, "*n T T"]) -> dict[str, list[float]]:
    """s_2 / s_1; s_2 sqrt(T) / (2 sigma) with sigma^2 = |A|_F^2 - 1, which is the variance of T A_ij where rows sum to
    1; stable rank.

    >>> {name: [round(x, 6) for x in values] for name, values in gaps(torch.eye(4)[None]).items()}
    {'ratio': [1.0], 'random': [0.57735], 'stable_rank': [4.0]}
    """
    s = torch.linalg.svdvals(A.flatten(0, -3).double())
    size = s.square().sum(-1)
    sigma = (size - 1).clamp_min(1e-12).sqrt()
    random = s[:, 1] * math.sqrt(A.shape[-1]) / (2 * sigma)
    return {
        "ratio": (s[:, 1] / s[:, 0]).tolist(),
        "random": random.tolist(),
        "stable_rank": (size / s[:, 0] ** 2).tolist(),
    }


TRAINED_CLAIM_KINDS = {  # claims: the number that decides, and whether models are causal
    "e1": ("random", False),
    "e2": ("ratio", False),
    "e3": ("ratio", True),
}


def measure_trained(setting: Setting) -> Results:
    """Every head of every model, on two halves of a text."""
    by_half: dict[tuple[str, int], dict[str, list[float]]] = {}  # by model and half
    causal: dict[str, bool] = {}
    for part in trained_layers(setting):
        causal[part.model] = part.causal
        heads = by_half.setdefault((part.model, part.half), {})
        for name, values in gaps(part.maps()).items():
            heads.setdefault(name, []).extend(values)

    def medians(name: str, masked: bool) -> list[float]:
        """Over heads of all models of a kind, for each half; none where there is no such model."""
        models = [model for model in causal if causal[model] is masked]
        return [median([x for model in models for x in by_half[model, half][name]]) for half in range(2) if models]

    halves = {key: medians(*which) for key, which in TRAINED_CLAIM_KINDS.items()}
    measured = {key: half_range(values, HALVES) for key, values in halves.items() if values}
    rows = [_model_row(model, causal[model], by_half[model, 0]) for model in causal]
    return Results(measured, {"trained_maps": {"tokens": LENGTH, "rows": rows}} if rows else {})


def _model_row(model: str, causal: bool, heads: dict[str, list[float]]) -> dict[str, Any]:
    low, high = (_tenth_value(heads["ratio"], at) for at in (0.1, 0.9))
    medians = {name: median(values) for name, values in heads.items()}
    return {"model": model, "mask": "causal" if causal else "none", **medians, "low": low, "high": high}


def _tenth_value(values: list[float], at: float) -> float:
    return sorted(values)[int(at * (len(values) - 1))]


TRAINED_STUDY = Study(
    "the gap in trained models",
    TRAINED_CLAIMS,
    measure_trained,
    needs="a trained model with the mask that the claim names",
    on_models=True,
)


# --- training ---

CENTRED, CENTRED_MASKED = arm("centred"), arm("centred", MASKED)
ARMS = (SOFTMAX, CENTRED, SOFTMAX_MASKED, CENTRED_MASKED)

TRAINING_CLAIMS = (
    Claim(
        "f1", "Without the outlier a model that sees both ways learns better, as seen at this size",
        "change of report loss by the centred mechanism, masked language model", "at most", 0.0, by="ours",
    ),
    Claim(
        "f2", "A causal one, with the prefix mean taken off, learns better, as seen at this size",
        "change of report loss by the centred mechanism, causal language model", "at most", 0.0, by="ours",
    ),
    Claim(
        "f3", "After training, too, the map that acts has less of a gap once the outlier is off",
        "1 - s_2 / s_1 of A less the uniform map, less that of A in the softmax model; mean over heads, masked language model",
        "at most", 0.0, by="ours",
    ),
    Claim(
        "f4", "Its tokens stay further apart, as seen at this size",
        "change of the residual's share after the last block, masked language model", "at least", 0.0, by="ours",
    ),
    Claim(
        "f5", "So do those of a causal one, as seen at this size",
        "change of the residual's share after the last block, causal language model", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def residuals_of_line(line: Line) -> list[float]:
    """The residual's share after every half-block, the embedding first; none where it was not measured."""
    return [float(half["residual"]) for half in (line.get("measures") or {}).get("halves") or ()]


def last_residual(line: Line) -> float:
    return (residuals_of_line(line) or [math.nan])[-1]


def residuals_by_depth(runs: Runs, one: Arm) -> list[list[float]]:
    """Layer and residual's share, mean over seeds; none where no run measured it."""
    curves = [curve for line in one.lines_so_far(runs) if (curve := residuals_of_line(line))]
    return [[n / 2, fmean(values)] for n, values in enumerate(zip(*curves, strict=True))]


def judge_training(runs: Runs) -> Results:
    measured = {
        "f1": difference(runs, CENTRED_MASKED, SOFTMAX_MASKED, "report_loss"),
        "f2": difference(runs, CENTRED, SOFTMAX, "report_loss"),
        "f3": difference(runs, CENTRED_MASKED, SOFTMAX_MASKED, "measures.gap"),
        "f4": difference(runs, CENTRED_MASKED, SOFTMAX_MASKED, last_residual),
        "f5": difference(runs, CENTRED, SOFTMAX, last_residual),
    }
    curves = {one.name: curve for one in ARMS if (curve := residuals_by_depth(runs, one))}
    return Results(measured, {"training_ends": table_of_arms(runs, ARMS), "residual_by_depth": curves})


TRAINING_STUDY = study_of_arms("training without the outlier", TRAINING_CLAIMS, ARMS, judge_training)
