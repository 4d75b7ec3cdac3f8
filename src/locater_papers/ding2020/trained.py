"""Keys that trained models explain away, what the double normalization makes of the same logits, and training with it:
studies c and d.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_papers.ding2020.guarantee import Logits, prefix_normalized, sinkhorn
from locater_papers.engine.arms import change, ends_table, level, trained
from locater_papers.engine.arms_page import carried
from locater_papers.engine.claims import Claim, Measured, half_range
from locater_papers.engine.mechanism_runs import MASKED, SOFTMAX_MASKED, arm
from locater_papers.engine.papers import Setting, Study
from locater_papers.engine.runs import Runs
from locater_papers.engine.trained_heads import HALVES, LENGTH, TrainedLayer, trained_layers

FAINT = 0.1  # a column sum that is a tenth of the mean
QUANTILES = 41

CLAIMS = (
    Claim(
        "c1", "Trained softmax attention explains keys away",
        f"share of keys with a column sum under 1/S, encoders on {LENGTH} tokens, mean over heads", "at least", 0.01,
    ),
    Claim(
        "c2", "Doubly normalized, the same logits leave none",
        "the same share under double normalization", "at most", 0.0,
    ),
    Claim(
        "c3", "That takes the crowd away from the loudest key",
        "largest column sum under double normalization over that under softmax, median over heads", "at most", 0.5, by="ours",
    ),
    Claim(
        "c4", "It is a small change of the map, so that a trained model could take it over",
        "distance of rows (half the sum of absolute differences), mean over heads", "at most", 0.1, by="ours",
    ),
    Claim(
        "c5", "Causal trained attention explains keys away as well",
        "share of keys with a column sum under 1/S, causal models, mean over heads", "at least", 0.01, by="ours",
    ),
)  # fmt: skip


def both_maps(logits: Logits, causal: bool) -> tuple[Logits, Logits]:
    """Of one head: softmax, and normalized twice."""
    seen = torch.ones_like(logits, dtype=torch.bool)
    plain = logits.masked_fill(~(seen.tril() if causal else seen), -torch.inf).softmax(-1)
    return plain, prefix_normalized(logits) if causal else sinkhorn(logits)


def columns(logits: Logits, causal: bool) -> dict[str, float]:
    """One head on one sequence: shares of keys explained away, largest column sums, and the distance of rows."""
    plain, doubly = both_maps(logits, causal)
    least = 1 / logits.shape[-1]
    return {
        "away": float((plain.sum(0) < least).double().mean()), "away_doubly": float((doubly.sum(0) < least * (1 - 1e-9)).double().mean()),
        "largest": float(plain.sum(0).max()), "largest_doubly": float(doubly.sum(0).max()),
        "least": float(plain.sum(0).min()), "least_doubly": float(doubly.sum(0).min()),
        "faint": float((plain.sum(0) < FAINT).double().mean()), "faint_doubly": float((doubly.sum(0) < FAINT).double().mean()),
        "moved": float((plain - doubly).abs().sum(-1).mean() / 2),
    }  # fmt: skip


def quantiles(logits: Float[Tensor, "n T T"], causal: bool) -> tuple[list[float], list[float]]:
    """Column sums of all heads at evenly spaced quantiles, under softmax and doubly normalized."""
    plain, doubly = (
        torch.cat([A.sum(0) for A in maps]) for maps in zip(*(both_maps(E, causal) for E in logits), strict=True)
    )
    at = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    return plain.quantile(at).tolist(), doubly.quantile(at).tolist()


def of_layer(part: TrainedLayer) -> list[dict[str, float]]:
    """Every head on every sequence."""
    return [columns(E, part.causal) for E in part.logits().flatten(0, 1)]


def measure(setting: Setting) -> Mapping[str, Measured]:
    """Every head of every model, on two halves of a text."""
    held: dict[tuple[str, int], list[dict[str, float]]] = {}
    causal: dict[str, bool] = {}
    logits: dict[str, list[Tensor]] = {}  # of the first sequence
    for part in trained_layers(setting):
        causal[part.model] = part.causal
        if part.half == 0:
            logits.setdefault(part.model, []).append(part.logits()[0])
        held.setdefault((part.model, part.half), []).extend(of_layer(part))
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "causal": causal[name],
            **{key: fmean(x[key] for x in held[name, 0]) for key in held[name, 0][0]},
        }
        for name in causal
    ]
    spread = {name: quantiles(torch.cat(some), causal[name]) for name, some in logits.items()}
    shown = {"rows": rows, "tokens": LENGTH, "faint": FAINT, "quantiles": spread}
    found: dict[str, Measured] = {}
    for masked in (False, True):
        both = [
            [x for (name, half), some in held.items() if half == n and causal[name] is masked for x in some]
            for n in range(2)
        ]
        if not all(both):
            continue
        away = half_range([fmean(x["away"] for x in some) for some in both], HALVES, shown)
        if masked:
            found["c5"] = away
            continue
        found["c1"] = away
        found["c2"] = half_range([fmean(x["away_doubly"] for x in some) for some in both], HALVES)
        found["c3"] = half_range([median(x["largest_doubly"] / x["largest"] for x in some) for some in both], HALVES)
        found["c4"] = half_range([fmean(x["moved"] for x in some) for some in both], HALVES)
    return found


STUDY = Study(
    "keys in trained models",
    CLAIMS,
    measure,
    needs="a trained model with the mask that the claim names",
    on_models=True,
)


# --- training ---------------------------------------------------------------------------------------------------------

DOUBLY, HYBRID = arm("doubly_normalized", MASKED), arm("hybrid_normalized", MASKED)
ARMS = (SOFTMAX_MASKED, DOUBLY, HYBRID)

TRAINING = (
    Claim(
        "d1", "Doubly normalized attention does better than softmax, as seen at this size",
        "change of report loss, masked language model", "at most", 0.0,
    ),
    Claim(
        "d2", "The hybrid does better than softmax, as seen at this size",
        "change of report loss, masked language model", "at most", 0.0,
    ),
    Claim(
        "d3", "Trained with it, no key is explained away: the promise outlives training and rounding",
        "share of keys with a column sum under 1/S, doubly normalized, after training", "at most", 0.0,
    ),
    Claim(
        "d4", "Trained softmax of the same size does explain keys away, as seen at this size",
        "share of keys with a column sum under 1/S, softmax, after training", "at least", 0.01,
    ),
    Claim(
        "d5", "The hybrid raises what the least heard key receives, as seen at this size",
        "change of the least column sum, hybrid against softmax, after training", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def judged(runs: Runs) -> Mapping[str, Measured | None]:
    found = {
        "d1": change(runs, DOUBLY, SOFTMAX_MASKED, "report_loss"),
        "d2": change(runs, HYBRID, SOFTMAX_MASKED, "report_loss"),
        "d3": level(runs, DOUBLY, "measures.explained_away"),
        "d4": level(runs, SOFTMAX_MASKED, "measures.explained_away"),
        "d5": change(runs, HYBRID, SOFTMAX_MASKED, "measures.column_least"),
    }
    return carried(found, {"arms": ends_table(runs, ARMS)})


RUNS = trained("training with it", TRAINING, ARMS, judged)
