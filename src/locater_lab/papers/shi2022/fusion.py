"""Does fusing all layers help a masked language model, and does the place of the norm matter? Study f, judged by
training runs.
"""

from __future__ import annotations

import math
from statistics import fmean

import torch

from locater.numerics import spearman
from locater_lab.engine.arms import Line, difference, ends_table, mean_of_arm, study_of_arms
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.mechanism_runs import MASKED, SOFTMAX_MASKED, arm, at_lower_rates
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Arm, Runs

FUSIONS = {kind: arm(base=MASKED, fusion=kind) for kind in ("concat", "max", "gate")}
POST = at_lower_rates(arm(base=MASKED, norm="post"))
ARMS = (SOFTMAX_MASKED, *FUSIONS.values(), POST)
SIZE = "masked language model of this size"
VARIED = f"{SIZE}, variations at one rate"
COOL = f"{SIZE}, norms after the sums at the better of two lower rates"

CLAIMS = (
    *(
        Claim(
            f"f{n}", f"Fusing all layers ({kind}) improves the model, as seen at this size",
            f"change of report loss by fusion, {VARIED}", "at most", 0.0, where="abstract",
        )
        for n, kind in enumerate(FUSIONS, 1)
    ),
    *(
        Claim(
            f"f{n}", f"Fusing all layers ({kind}) keeps tokens of the last layer apart, as seen at this size",
            f"change of their mean cosine, in front of fusion, {VARIED}", "at most", 0.0, by="ours",
        )
        for n, kind in enumerate(FUSIONS, 4)
    ),
    Claim(
        "f7", "With norms in front, too, tokens grow alike with depth, as seen at this size",
        f"rank correlation of depth with mean cosine, half-blocks of a {SIZE}", "at least", 0.8, by="ours",
    ),
    Claim(
        "f8", "With norms after the sums tokens of the last layer are more alike, as seen at this size",
        f"change of their mean cosine, {COOL}", "at least", 0.0, by="ours",
    ),
    Claim(
        "f9", "With norms after the sums it trains as well, as seen at this size",
        f"change of report loss, {COOL}", "at most", 0.02, by="ours",
    ),
)  # fmt: skip


def halves(line: Line, name: str) -> list[float]:
    """A measure of every half-block's states, embeddings first; empty where it was not taken."""
    states = (line.get("measures") or {}).get("halves") or []
    return [float(half[name]) for half in states if half.get(name) is not None]


def last_cosine(line: Line) -> float:
    return (halves(line, "cosine") or [math.nan])[-1]


def with_depth(line: Line) -> float:
    """Rank correlation of depth with mean cosine."""
    curve = torch.tensor(halves(line, "cosine"), dtype=torch.float64)
    correlation = spearman(torch.arange(len(curve)).double(), curve) if len(curve) > 2 else None
    return math.nan if correlation is None else correlation


def curve_of(runs: Runs, one: Arm, name: str) -> list[float]:
    """Means over seeds, by half-block; empty where it was not measured."""
    lines = [states for line in one.so_far(runs) if (states := halves(line, name))]
    return [fmean(values) for values in zip(*lines, strict=True)]


def judge(runs: Runs) -> Results:
    """Seed by seed against the same model without fusion."""
    measured: dict[str, Measurement | None] = {}
    for n, one in enumerate(FUSIONS.values(), 1):
        measured[f"f{n}"] = difference(runs, one, SOFTMAX_MASKED, "report_loss")
    for n, one in enumerate(FUSIONS.values(), 4):
        measured[f"f{n}"] = difference(runs, one, SOFTMAX_MASKED, last_cosine)
    measured["f7"] = mean_of_arm(runs, SOFTMAX_MASKED, with_depth)
    measured["f8"] = difference(runs, POST, SOFTMAX_MASKED, last_cosine)
    measured["f9"] = difference(runs, POST, SOFTMAX_MASKED, "report_loss")
    curves = {
        name: {one.name: curve for one in ARMS if (curve := curve_of(runs, one, name))}
        for name in ("cosine", "centred_cosine")
    }
    return Results(
        measured, {"fusion_ends": ends_table(runs, ARMS), "fusion_curves": curves, "fusion_layers": MASKED.layers}
    )


STUDY = study_of_arms("fusion in training", CLAIMS, ARMS, judge)
