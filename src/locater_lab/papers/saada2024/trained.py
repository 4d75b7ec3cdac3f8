"""The gap in trained models' maps, and training without the outlier. Studies e and f."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.arms import Line, difference, ends_table, study_of_arms
from locater_lab.engine.claims import Claim, half_range
from locater_lab.engine.mechanism_runs import MASKED, SOFTMAX, SOFTMAX_MASKED, arm
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Arm, Runs
from locater_lab.engine.trained_models import HALVES, LENGTH, trained_layers

CLAIMS = (
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


DECIDING = {  # claims: the number that decides, and whether models are causal
    "e1": ("random", False),
    "e2": ("ratio", False),
    "e3": ("ratio", True),
}


def measure(setting: Setting) -> Results:
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

    halves = {key: medians(*which) for key, which in DECIDING.items()}
    measured = {key: half_range(values, HALVES) for key, values in halves.items() if values}
    rows = [_row(model, causal[model], by_half[model, 0]) for model in causal]
    return Results(measured, {"trained_maps": {"tokens": LENGTH, "rows": rows}} if rows else {})


def _row(model: str, causal: bool, heads: dict[str, list[float]]) -> dict[str, Any]:
    low, high = (_tenth(heads["ratio"], at) for at in (0.1, 0.9))
    medians = {name: median(values) for name, values in heads.items()}
    return {"model": model, "mask": "causal" if causal else "none", **medians, "low": low, "high": high}


def _tenth(values: list[float], at: float) -> float:
    return sorted(values)[int(at * (len(values) - 1))]


STUDY = Study(
    "the gap in trained models",
    CLAIMS,
    measure,
    needs="a trained model with the mask that the claim names",
    on_models=True,
)


# --- training ---

CENTRED, CENTRED_MASKED = arm("centred"), arm("centred", MASKED)
ARMS = (SOFTMAX, CENTRED, SOFTMAX_MASKED, CENTRED_MASKED)

TRAINING = (
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


def residuals(line: Line) -> list[float]:
    """The residual's share after every half-block, the embedding first; none where it was not measured."""
    return [float(half["residual"]) for half in (line.get("measures") or {}).get("halves") or ()]


def last_residual(line: Line) -> float:
    return (residuals(line) or [math.nan])[-1]


def by_depth(runs: Runs, one: Arm) -> list[list[float]]:
    """Layer and residual's share, mean over seeds; none where no run measured it."""
    curves = [curve for line in one.so_far(runs) if (curve := residuals(line))]
    return [[n / 2, fmean(values)] for n, values in enumerate(zip(*curves, strict=True))]


def judge(runs: Runs) -> Results:
    measured = {
        "f1": difference(runs, CENTRED_MASKED, SOFTMAX_MASKED, "report_loss"),
        "f2": difference(runs, CENTRED, SOFTMAX, "report_loss"),
        "f3": difference(runs, CENTRED_MASKED, SOFTMAX_MASKED, "measures.gap"),
        "f4": difference(runs, CENTRED_MASKED, SOFTMAX_MASKED, last_residual),
        "f5": difference(runs, CENTRED, SOFTMAX, last_residual),
    }
    curves = {one.name: curve for one in ARMS if (curve := by_depth(runs, one))}
    return Results(measured, {"training_ends": ends_table(runs, ARMS), "residual_by_depth": curves})


RUNS = study_of_arms("training without the outlier", TRAINING, ARMS, judge)
