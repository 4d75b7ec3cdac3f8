"""What drives sinks and what drives spikes, at the size of this project's runs: head size, gates, norms, MLPs, weight
decay. Study e.

The paper trains models of 7 billion parameters, whose largest |h| is in the thousands. Here numbers are ratios and
shares, and every verdict is of a model of 6 layers and width 256 alone. Sinks are compared by the first token's share
of rows, since the count of heads over a threshold may be 0 in small models, and 0 cannot fall; where softmax gives its
first token no more than uniform attention does, nothing is said of sinks, and where the plain model has no massive
entry nothing of spikes. Softmax and the gate per head are at the better of two learning rates, other arms at the higher
of them, and "post" at the better of two lower ones: it is a norm of the sum, not the paper's norm of branches with
QK-norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from locater_papers.engine.arms import (
    change,
    has_sink,
    level,
    mark_inconclusive,
    rank_correlation,
    trained,
    value_of,
)
from locater_papers.engine.claims import Claim, Measured
from locater_papers.engine.mechanism_runs import MASSIVE, NO_SINK, NO_SPIKE, SEEN, SOFTMAX, TUNED, VARIED, arm, cool
from locater_papers.engine.papers import Results
from locater_papers.engine.runs import Runs
from locater_papers.qiu2025.training import ELEMENT, HEAD, training_table

SIZES = {8: arm(heads=32), 16: arm(heads=16), 64: SOFTMAX, 128: arm(heads=2)}  # by head size
SANDWICH, POST = arm(norm="sandwich"), cool(arm(norm="post"))
GELU, NONE, NO_DECAY = arm(mlp="gelu"), arm(mlp="none"), arm(decay=0.0)
OTHERS = (SANDWICH, POST, GELU, NONE, NO_DECAY, HEAD, ELEMENT)
ARMS = (*SIZES.values(), *OTHERS)
OF_SPIKES = ("e7", "e9", "e12", "e13", "e14")
OF_SINKS = ("e3", "e4", "e5", "e6", "e8", "e10", "e11", "e14")
RATIO, FIRST, SPIKE, SPIKE_RATIO = (f"measures.{name}" for name in ("sink_ratio", "first_mass", "spike", "spike_ratio"))

CLAIMS = (
    Claim("e1", "There are sinks to drive away", f"sink ratio of the plain model, {SEEN}", "at least", 0.1, by="ours"),
    Claim("e2", "There are spikes to drive away", f"largest entry over the median in the plain model, {SEEN}", "at least", MASSIVE,
          by="ours"),
    Claim("e3", "Small heads have less of a sink", f"first token's share with heads of 8 less with heads of 64, equal width, {VARIED}",
          "at most", 0.0, by="summary"),
    Claim("e4", "Sinks grow with head size", "rank correlation of head size (8, 16, 64, 128) with the first token's share, "
          f"seed by seed, {SEEN}", "at least", 0.8, by="summary", bound="ours"),
    Claim("e5", "A gate per head takes sinks away", f"change of the first token's share, {TUNED}", "at most", 0.0, by="summary"),
    Claim("e6", "A gate per element takes sinks away", f"change of the first token's share, {VARIED}", "at most", 0.0, by="summary"),
    Claim("e7", "Norms behind branches lower spikes", f"change of the largest entry over the median by sandwich norms, {VARIED}",
          "at most", 0.0, by="summary"),
    Claim("e8", "They leave sinks as they are", f"log of the first token's share with sandwich norms over that without, {VARIED}",
          "about", 0.0, 0.25, by="summary", bound="ours"),
    Claim("e9", "A norm of the sum lowers spikes", f"change of the largest entry over the median, at the better of two lower "
          f"rates, {SEEN}", "at most", 0.0, by="ours"),
    Claim("e10", "GELU in the place of SwiGLU has more of a sink", f"change of the first token's share, {VARIED}", "at least", 0.0,
          by="summary"),
    Claim("e11", "Without MLPs there is more of a sink", f"change of the first token's share, {VARIED}", "at least", 0.0, by="summary"),
    Claim("e12", "Without MLPs spikes shrink", f"change of the largest entry over the median, {VARIED}", "at most", 0.0, by="summary"),
    Claim("e13", "Without weight decay spikes grow", f"change of the largest entry of the stream, {VARIED}", "at least", 0.0,
          by="summary"),
    Claim("e14", "Spikes and sinks decouple: which arm has more of one says little of the other",
          f"rank correlation of the spike over its median with the first token's share over all arms, seed by seed, {SEEN}",
          "at most", 0.5, by="summary", bound="ours"),
)  # fmt: skip


def unless_massive(
    measured: Mapping[str, Measured | None], plain: Measured | None, ids: tuple[str, ...]
) -> dict[str, Measured | None]:
    """The same measurements, those of `ids`, on spikes, left open where the plain model has none."""
    return mark_inconclusive(measured, ids if plain is not None and plain.value < MASSIVE else (), NO_SPIKE)


def judge(runs: Runs) -> Results:
    measured = {
        "e1": level(runs, SOFTMAX, RATIO),
        "e2": level(runs, SOFTMAX, SPIKE_RATIO),
        "e3": change(runs, SIZES[8], SOFTMAX, FIRST),
        "e4": rank_correlation(runs, SIZES.values(), list(SIZES), FIRST),
        "e5": change(runs, HEAD, SOFTMAX, FIRST),
        "e6": change(runs, ELEMENT, SOFTMAX, FIRST),
        "e7": change(runs, SANDWICH, SOFTMAX, SPIKE_RATIO),
        "e8": change(runs, SANDWICH, SOFTMAX, lambda line: math.log(value_of(line, FIRST) or math.nan)),
        "e9": change(runs, POST, SOFTMAX, SPIKE_RATIO),
        "e10": change(runs, GELU, SOFTMAX, FIRST),
        "e11": change(runs, NONE, SOFTMAX, FIRST),
        "e12": change(runs, NONE, SOFTMAX, SPIKE_RATIO),
        "e13": change(runs, NO_DECAY, SOFTMAX, SPIKE),
        "e14": rank_correlation(runs, ARMS, SPIKE_RATIO, FIRST),
    }
    measured = unless_massive(measured, measured["e2"], OF_SPIKES)
    if not has_sink(runs, SOFTMAX):
        measured = mark_inconclusive(measured, OF_SINKS, NO_SINK)
    table = training_table(runs, ARMS)
    return Results(measured, {} if table is None else {"drivers": table})


STUDY = trained("what drives sinks and spikes", CLAIMS, ARMS, judge)
