"""Does fusing all layers help a masked language model, and does the place of the norm matter? Study f, judged by
training runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from locater.numerics import spearman
from locater_papers.engine.arms import Line, change, ends_table, level, trained
from locater_papers.engine.arms_page import carried
from locater_papers.engine.claims import Claim, Measured
from locater_papers.engine.mechanism_runs import MASKED, SOFTMAX_MASKED, arm, cool
from locater_papers.engine.runs import Arm, Runs

FUSIONS = {kind: arm(base=MASKED, fusion=kind) for kind in ("concat", "max", "gate")}
POST = cool(arm(base=MASKED, norm="post"))
ARMS = (SOFTMAX_MASKED, *FUSIONS.values(), POST)
SIZE = "masked language model of this size"
VARIED = f"{SIZE}, variations at one rate"
COOL = f"{SIZE}, norms after the sums at the better of two lower rates"

CLAIMS = (
    *(
        Claim(
            f"f{n}", f"Fusing all layers ({kind}) lowers the loss, as seen at this size",
            f"change of report loss by fusion, {VARIED}", "at most", 0.0,
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
    held = (line.get("measures") or {}).get("halves") or []
    return [float(half[name]) for half in held if half.get(name) is not None]


def last_cosine(line: Line) -> float:
    return (halves(line, "cosine") or [math.nan])[-1]


def with_depth(line: Line) -> float:
    curve = torch.tensor(halves(line, "cosine"), dtype=torch.float64)
    found = spearman(torch.arange(len(curve)).double(), curve) if len(curve) > 2 else None
    return math.nan if found is None else found


def curves(runs: Runs, held: Arm) -> dict[str, list[float]]:
    """Means over seeds, by half-block."""
    found = {}
    for name in ("cosine", "centred_cosine", "residual"):
        lines = [x for line in held.so_far(runs) if (x := halves(line, name))]
        found[name] = [sum(x) / len(x) for x in zip(*lines, strict=True)]
    return found


def judge(runs: Runs) -> Mapping[str, Measured | None]:
    """Seed by seed against the same model without fusion."""
    found: dict[str, Measured | None] = {}
    for n, held in enumerate(FUSIONS.values(), 1):
        found[f"f{n}"] = change(runs, held, SOFTMAX_MASKED, "report_loss")
    for n, held in enumerate(FUSIONS.values(), 4):
        found[f"f{n}"] = change(runs, held, SOFTMAX_MASKED, last_cosine)
    found["f7"] = level(runs, SOFTMAX_MASKED, with_depth)
    found["f8"] = change(runs, POST, SOFTMAX_MASKED, last_cosine)
    found["f9"] = change(runs, POST, SOFTMAX_MASKED, "report_loss")
    numbers: dict[str, Any] = {
        "arms": ends_table(runs, ARMS),
        "curves": {held.name: curves(runs, held) for held in ARMS},
        "layers": MASKED.layers,
    }
    return carried(found, numbers)


STUDY = trained("fusion in training", CLAIMS, ARMS, judge)
