"""Mixed heads against heads of one kind in training, and whether even relevance goes with a lower loss: study e."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from locater.papers.arms_page import carried
from locater.papers.claim import Claim, Measured, seeds_range
from locater.papers.judging import Line, change, ends_table, trained
from locater.papers.mechanism_runs import MASKED, SOFTMAX_MASKED, arm
from locater.papers.runs import Arm, Runs
from locater.papers.sant2022.models import variation
from locater.probe import spearman

FULL_MIX = arm("multiformer", MASKED)
KINDS = {kinds: arm(f"multiformer(kinds={kinds})", MASKED) for kinds in ("llcc", "llll", "cccc")}
MIX, LOCAL, COMPRESSED = KINDS.values()
ARMS = (SOFTMAX_MASKED, FULL_MIX, MIX, LOCAL, COMPRESSED)
SIZE = "masked language model of this size"

CLAIMS = (
    Claim("e1", "Local and compressed heads in one layer do better than local heads alone",
        f"report loss of llcc less that of llll, {SIZE}", "at most", 0.0),
    Claim("e2", "They do better than compressed heads alone", f"report loss of llcc less that of cccc, {SIZE}", "at most", 0.0),
    Claim("e3", "A mix does better than full attention", f"report loss of the mix with the lower select loss, less that of softmax, {SIZE}",
        "at most", 0.0),
    Claim(
        "e4", "A mix makes heads count more evenly",
        f"variation of relevance of llcc less that of softmax attention, mean over layers, {SIZE}", "at most", 0.0, by="notes",
    ),
    Claim(
        "e5", "The more evenly heads count, the better the model",
        f"rank correlation of variation of relevance with report loss over {len(ARMS)} arms, {SIZE}",
        "at least", 0.5,
    ),
)  # fmt: skip


def unevenness(line: Line) -> float:
    """Standard deviation over mean of heads' relevance, mean over layers; NaN where it was not measured."""
    layers = (line.get("measures") or {}).get("relevance") or []
    return sum(variation(torch.tensor(layer, dtype=torch.float64)) for layer in layers) / len(layers) if layers else math.nan


def correlation(runs: Runs) -> Measured | None:
    """Over arms, seed by seed; None until all arms are whole."""
    ends = [each.ends(runs) for each in ARMS]
    whole = [lines for lines in ends if lines is not None]
    if len(whole) < len(ARMS):
        return None
    found = []
    for lines in zip(*whole, strict=False):
        uneven, loss = (
            torch.tensor([read(line) for line in lines], dtype=torch.float64) for read in (unevenness, lambda x: x["report_loss"])
        )
        if not uneven.isfinite().all():
            return None
        found.append(spearman(uneven, loss) or 0.0)
    return seeds_range(found)


def better(runs: Runs) -> Arm | None:
    """The mix with the lower loss on the select split."""
    held = [
        (sum(line["select_loss"] for line in lines) / len(lines), n) for n, each in enumerate((FULL_MIX, MIX)) if (lines := each.ends(runs))
    ]
    return (FULL_MIX, MIX)[min(held)[1]] if len(held) == 2 else None


def judge(runs: Runs) -> Mapping[str, Measured | None]:
    best = better(runs)
    found = {
        "e1": change(runs, MIX, LOCAL, "report_loss"),
        "e2": change(runs, MIX, COMPRESSED, "report_loss"),
        "e3": None if best is None else change(runs, best, SOFTMAX_MASKED, "report_loss", {"best": best.name}),
        "e4": change(runs, MIX, SOFTMAX_MASKED, unevenness),
        "e5": correlation(runs),
    }
    table: list[dict[str, Any]] = ends_table(runs, ARMS)
    for row, held in zip(table, [each for each in ARMS if each.so_far(runs)], strict=True):
        for end, line in zip(row["ends"], held.so_far(runs), strict=True):
            end["unevenness"] = unevenness(line)
    return carried(found, {"arms": table})


STUDY = trained("mixed heads in training", CLAIMS, ARMS, judge)
