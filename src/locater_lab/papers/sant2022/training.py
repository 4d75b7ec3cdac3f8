"""Mixed heads against heads of one kind in training, and whether even relevance goes with a lower loss: study e. The
paper's own scores, of speech translation, are claims f, which nothing here can measure.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch

from locater_lab.engine.arms import Line, difference, end_of, ends_table, rank_correlation, study_of_arms
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.mechanism_runs import MASKED, SOFTMAX_MASKED, arm
from locater_lab.engine.reproduction import Results, Study
from locater_lab.engine.runs import Arm, Runs
from locater_lab.papers.sant2022.models import variation

FULL_MIX = arm("multiformer", MASKED)
KINDS = {kinds: arm(f"multiformer(kinds={kinds})", MASKED) for kinds in ("llcc", "llll", "cccc")}
MIX, LOCAL, COMPRESSED = KINDS.values()
ARMS = (SOFTMAX_MASKED, FULL_MIX, MIX, LOCAL, COMPRESSED)
SIZE = "masked language model of this size"

CLAIMS = (
    Claim(
        "e1",
        "Local and compressed heads in one layer do better than local heads alone, as seen at this size",
        f"report loss of llcc less that of llll, {SIZE}",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "e2",
        "They do better than compressed heads alone, as seen at this size",
        f"report loss of llcc less that of cccc, {SIZE}",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "e3",
        "A mix does better than full attention, as seen at this size",
        f"report loss of the mix with the lower select loss, less that of softmax, {SIZE}",
        "at most",
        0.0,
        where="abstract",
        bound="ours",
    ),
    Claim(
        "e4",
        "A mix makes heads count more evenly, as seen at this size",
        f"variation of relevance of llcc less that of softmax attention, mean over layers, {SIZE}, llcc at one rate",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "e5",
        "The more evenly heads count, the better the model, as seen at this size",
        f"rank correlation of variation of relevance with report loss over {len(ARMS)} arms, {SIZE}",
        "at least",
        0.5,
        where="abstract",
        bound="ours",
    ),
)

TRANSLATION = (
    Claim(
        "f1",
        "In speech translation mixed heads score up to 0.7 BLEU above the baseline",
        "BLEU of the best mixed layout less that of the baseline",
        "about",
        0.7,
        0.05,
        where="abstract",
    ),
    Claim(
        "f2",
        "In speech translation, models whose heads count evenly score higher",
        "rank correlation of variation of relevance with BLEU over layouts",
        "at most",
        0.0,
        where="abstract",
        bound="ours",
    ),
)
SPEECH = (
    "speech translation, which this project does not train: MuST-C's recordings, a model first trained to transcribe, "
    "50,000 updates for each layout"
)


def unevenness(line: Line) -> float:
    """Standard deviation over mean of heads' relevance, mean over layers; NaN where it was not measured."""
    layers = (line.get("measures") or {}).get("relevance") or []
    return fmean(variation(torch.tensor(layer, dtype=torch.float64)) for layer in layers) if layers else math.nan


def correlation(runs: Runs) -> Measurement | None:
    """Over arms, seed by seed; None until all arms are whole and measured."""
    if any(math.isnan(unevenness(line)) for each in ARMS for line in each.ends(runs) or ()):
        return None
    return rank_correlation(runs, ARMS, unevenness, "report_loss")


def better(runs: Runs) -> Arm | None:
    """The mix with the lower loss on the select split, over the seeds that both have; None while one is not whole."""
    full, mix = FULL_MIX.ends(runs), MIX.ends(runs)
    if full is None or mix is None:
        return None
    return FULL_MIX if sum(a["select_loss"] - b["select_loss"] for a, b in zip(full, mix, strict=False)) < 0 else MIX


def judge(runs: Runs) -> Results:
    best = better(runs)
    measured = {
        "e1": difference(runs, MIX, LOCAL, "report_loss"),
        "e2": difference(runs, MIX, COMPRESSED, "report_loss"),
        "e3": None if best is None else difference(runs, best, SOFTMAX_MASKED, "report_loss", {"best": best.name}),
        "e4": difference(runs, MIX, SOFTMAX_MASKED, unevenness),
        "e5": correlation(runs),
    }
    arms = ends_table(runs, ARMS, _end)
    table = {"arms": arms, "layers": MASKED.layers, "heads": MASKED.heads}
    return Results(measured, {"mixed_heads": table} if arms else {})


def _end(line: Line) -> dict[str, Any]:
    uneven = unevenness(line)
    return {**end_of(line), "unevenness": None if math.isnan(uneven) else uneven}


STUDY = study_of_arms("mixed heads in training", CLAIMS, ARMS, judge)
SCORES = Study("translation scores", TRANSLATION, needs=SPEECH)
