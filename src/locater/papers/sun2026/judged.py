"""What drives sinks and what drives spikes, at the size of this project's runs: head size, gates, norms, MLPs, weight decay. Study e.

The paper trains models of 7 billion parameters, whose largest |h| is in the thousands. Here numbers are ratios and shares, and every
verdict is of a model of 6 layers and width 256 alone. Sinks are compared by the first token's share of rows, since the count of heads over
a threshold may be 0 in small models, and 0 cannot fall. "post" is a norm of the sum, not the paper's norm of branches with QK-norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from locater.papers.claim import Claim, Measured, seeds_range
from locater.papers.judging import change, ends_table, level, trained, value_of
from locater.papers.mechanism_runs import SOFTMAX, arm
from locater.papers.qiu2025.judged import ELEMENT, HEAD, ordered
from locater.papers.qiu2025.table import correlation
from locater.papers.runs import Runs

SIZES = {8: arm(heads=32), 16: arm(heads=16), 64: SOFTMAX, 128: arm(heads=2)}  # by head size
SANDWICH, POST = arm(norm="sandwich"), arm(norm="post")
GELU, NONE, NO_DECAY = arm(mlp="gelu"), arm(mlp="none"), arm(decay=0.0)
OTHERS = (SANDWICH, POST, GELU, NONE, NO_DECAY, HEAD, ELEMENT)
ARMS = (*SIZES.values(), *OTHERS)
TUNED = "each at its better rate, as seen at this size"
RATIO, FIRST, SPIKE, SPIKE_RATIO = (f"measures.{name}" for name in ("sink_ratio", "first_mass", "spike", "spike_ratio"))

CLAIMS = (
    Claim("e1", "There are sinks to drive away", "sink ratio of the plain model, as seen at this size", "at least", 0.1, by="notes"),
    Claim("e2", "There are spikes to drive away", "largest entry over the median in the plain model, as seen at this size",
          "at least", 1000.0),
    Claim("e3", "Small heads have less of a sink", f"first token's share with heads of 8 less with heads of 64, equal width, {TUNED}",
          "at most", 0.0),
    Claim("e4", "Sinks grow with head size", "rank correlation of head size (8, 16, 64, 128) with the first token's share, "
          "seed by seed, as seen at this size", "at least", 0.8),
    Claim("e5", "A gate per head takes sinks away", f"change of the first token's share, {TUNED}", "at most", 0.0),
    Claim("e6", "A gate per element takes sinks away", f"change of the first token's share, {TUNED}", "at most", 0.0),
    Claim("e7", "Norms behind branches lower spikes", f"change of the largest entry over the median by sandwich norms, {TUNED}",
          "at most", 0.0),
    Claim("e8", "They leave sinks as they are", f"log of the first token's share with sandwich norms over that without, {TUNED}",
          "about", 0.0, 0.25),
    Claim("e9", "A norm of the sum lowers spikes", f"change of the largest entry over the median, {TUNED}", "at most", 0.0, by="notes"),
    Claim("e10", "GELU in the place of SwiGLU has more of a sink", f"change of the first token's share, {TUNED}", "at least", 0.0),
    Claim("e11", "Without MLPs there is more of a sink", f"change of the first token's share, {TUNED}", "at least", 0.0),
    Claim("e12", "Without MLPs spikes shrink", f"change of the largest entry over the median, {TUNED}", "at most", 0.0),
    Claim("e13", "Without weight decay spikes grow", f"change of the largest entry of the stream, {TUNED}", "at least", 0.0),
    Claim("e14", "Spikes and sinks decouple: which arm has more of one says little of the other",
          "rank correlation of the spike over its median with the first token's share over all arms, seed by seed, as seen at this size",
          "at most", 0.5),
)  # fmt: skip


def judge(runs: Runs) -> Mapping[str, Measured | None]:
    return {
        "e1": level(runs, SOFTMAX, RATIO, {"arms": ends_table(runs, ARMS), "sizes": {SIZES[size].name: size for size in SIZES}}),
        "e2": level(runs, SOFTMAX, SPIKE_RATIO),
        "e3": change(runs, SIZES[8], SOFTMAX, FIRST),
        "e4": by_size(runs),
        "e5": change(runs, HEAD, SOFTMAX, FIRST),
        "e6": change(runs, ELEMENT, SOFTMAX, FIRST),
        "e7": change(runs, SANDWICH, SOFTMAX, SPIKE_RATIO),
        "e8": change(runs, SANDWICH, SOFTMAX, lambda line: math.log(value_of(line, FIRST) or math.nan)),
        "e9": change(runs, POST, SOFTMAX, SPIKE_RATIO),
        "e10": change(runs, GELU, SOFTMAX, FIRST),
        "e11": change(runs, NONE, SOFTMAX, FIRST),
        "e12": change(runs, NONE, SOFTMAX, SPIKE_RATIO),
        "e13": change(runs, NO_DECAY, SOFTMAX, SPIKE),
        "e14": ordered(runs, ARMS, SPIKE_RATIO, FIRST),
    }


def by_size(runs: Runs) -> Measured | None:
    """Rank correlation of head size with the first token's share."""
    ends = [held.ends(runs) for held in SIZES.values()]
    if any(held is None for held in ends):
        return None
    rows = [[value_of(line, FIRST) for line in lines] for lines in zip(*(held or [] for held in ends), strict=False)]
    if any(value is None for row in rows for value in row):
        return None
    return seeds_range([correlation(list(SIZES), [value or 0.0 for value in row]) for row in rows])


STUDY = trained("what drives sinks and spikes", CLAIMS, ARMS, judge)
