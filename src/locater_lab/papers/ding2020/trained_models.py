"""Keys that trained models explain away, the same logits normalized twice, and training with double normalization:
studies c and d.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.arms import difference, largest_over_seeds, mean_of_arm, study_of_arms, table_of_arms
from locater_lab.engine.claims import Claim, Measurement, half_range
from locater_lab.engine.mechanism_runs import MASKED, SOFTMAX_MASKED, arm
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Runs
from locater_lab.engine.trained_models import HALVES, LENGTH, TrainedLayer, trained_layers
from locater_lab.papers.ding2020.guarantee import Logits, prefix_normalized_map, sinkhorn_map

FAINT = 0.1  # a column sum that is a tenth of the mean
QUANTILES = 41

CLAIMS = (
    Claim(
        "c1", "Softmax attention of the trained encoders that are available explains keys away",
        f"share of keys with a column sum under 1/S, encoders on {LENGTH} tokens, mean over heads", "at least", 0.01,
        by="ours",
    ),
    Claim(
        "c2", "Doubly normalized, the same logits leave none",
        "the same share under double normalization", "at most", 0.0, by="ours",
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
    return plain, prefix_normalized_map(logits) if causal else sinkhorn_map(logits)


def column_sums(logits: Logits, causal: bool) -> dict[str, float]:
    """One head on one sequence: shares of keys explained away, largest column sums, and the distance of rows."""
    plain, doubly = both_maps(logits, causal)
    least = 1 / logits.shape[-1]
    entry = {"moved": float((plain - doubly).abs().sum(-1).mean() / 2)}
    for name, sums, rounding in (("", plain.sum(0), 0.0), ("_doubly", doubly.sum(0), 1e-9)):
        entry |= {
            f"away{name}": float((sums < least * (1 - rounding)).double().mean()),
            f"faint{name}": float((sums < FAINT).double().mean()),
            f"least{name}": float(sums.min()),
            f"largest{name}": float(sums.max()),
        }
    return entry


def quantiles(logits: Float[Tensor, "n T T"], causal: bool) -> tuple[list[float], list[float]]:
    """Column sums of all heads at evenly spaced quantiles, under softmax and doubly normalized."""
    plain, doubly = (
        torch.cat([A.sum(0) for A in maps]) for maps in zip(*(both_maps(E, causal) for E in logits), strict=True)
    )
    at = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    return plain.quantile(at).tolist(), doubly.quantile(at).tolist()


def columns_of_layer(part: TrainedLayer) -> list[dict[str, float]]:
    """Every head on every sequence."""
    return [column_sums(E, part.causal) for E in part.logits().flatten(0, 1)]


@dataclass
class ModelHeads:
    """One model: an entry for every head and sequence of each half of the text, and logits of its first sequence."""

    causal: bool
    halves: tuple[list[dict[str, float]], list[dict[str, float]]] = field(default_factory=lambda: ([], []))
    first_logits: list[Tensor] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Means over heads, on the first half."""
        return {"causal": self.causal, **{key: fmean(x[key] for x in self.halves[0]) for key in self.halves[0][0]}}


def measure(setting: Setting) -> Results:
    """Every head of every model, on two halves of a text."""
    models: dict[str, ModelHeads] = {}
    for part in trained_layers(setting):
        model = models.setdefault(part.model, ModelHeads(part.causal))
        model.halves[part.half].extend(columns_of_layer(part))
        if part.half == 0:
            model.first_logits.append(part.logits()[0])
    measured: dict[str, Measurement | None] = {}
    encoders, decoders = ([m for m in models.values() if m.causal is causal] for causal in (False, True))
    if encoders:
        measured |= measure_encoders([[x for m in encoders for x in m.halves[half]] for half in range(2)])
    if decoders:
        halves = [[x for m in decoders for x in m.halves[half]] for half in range(2)]
        measured["c5"] = half_range([fmean(x["away"] for x in half) for half in halves], HALVES)
    table = {
        "rows": [{"model": name, **model.row()} for name, model in models.items()],
        "tokens": LENGTH,
        "faint": FAINT,
        "quantiles": {name: quantiles(torch.cat(m.first_logits), m.causal) for name, m in models.items()},
    }
    return Results(measured, {"trained_columns": table})


def measure_encoders(halves: list[list[dict[str, float]]]) -> dict[str, Measurement]:
    return {
        "c1": half_range([fmean(x["away"] for x in half) for half in halves], HALVES),
        "c2": half_range([fmean(x["away_doubly"] for x in half) for half in halves], HALVES),
        "c3": half_range([median(x["largest_doubly"] / x["largest"] for x in half) for half in halves], HALVES),
        "c4": half_range([fmean(x["moved"] for x in half) for half in halves], HALVES),
    }


MODELS_STUDY = Study(
    "keys in trained models",
    CLAIMS,
    measure,
    needs="a trained model with the mask that the claim names",
    on_models=True,
)


# --- training ---

DOUBLY, HYBRID = arm("doubly_normalized", MASKED), arm("hybrid_normalized", MASKED)
ARMS = (SOFTMAX_MASKED, DOUBLY, HYBRID)

TRAINING_CLAIMS = (
    Claim(
        "d1", "Doubly normalized attention does better than softmax, as seen at this size",
        "change of report loss, masked language model", "at most", 0.0, where="abstract",
    ),
    Claim(
        "d2", "The hybrid does better than softmax, as seen at this size",
        "change of report loss, masked language model", "at most", 0.0, where="abstract",
    ),
    Claim(
        "d3", "Trained with it, no key is explained away: the promise outlives training and rounding",
        "share of keys with a column sum under 1/S, doubly normalized, after training, largest of the seeds", "at most", 0.0, by="ours",
    ),
    Claim(
        "d4", "Trained softmax of the same size does explain keys away, as seen at this size",
        "share of keys with a column sum under 1/S, softmax, after training", "at least", 0.01, where="abstract", bound="ours",
    ),
    Claim(
        "d5", "The hybrid raises what the least heard key receives, as seen at this size",
        "change of the least column sum, hybrid against softmax, after training", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def judge_runs(runs: Runs) -> Results:
    measured = {
        "d1": difference(runs, DOUBLY, SOFTMAX_MASKED, "report_loss"),
        "d2": difference(runs, HYBRID, SOFTMAX_MASKED, "report_loss"),
        # the promise is to every key of every model, so that one seed would break it
        "d3": largest_over_seeds(runs, DOUBLY, "measures.explained_away"),
        "d4": mean_of_arm(runs, SOFTMAX_MASKED, "measures.explained_away"),
        "d5": difference(runs, HYBRID, SOFTMAX_MASKED, "measures.column_least"),
    }
    return Results(measured, {"arms": table_of_arms(runs, ARMS)})


TRAINING_STUDY = study_of_arms("training with it", TRAINING_CLAIMS, ARMS, judge_runs)
