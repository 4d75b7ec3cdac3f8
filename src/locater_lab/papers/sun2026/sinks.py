"""What drives sinks and spikes where softmax has a sink: head size, norms, MLPs, weight decay. Study f; models of study
e have none.
"""

from __future__ import annotations

import math

from locater_lab.engine.arms import (
    difference,
    mark_inconclusive,
    mean_of_arm,
    rank_correlation,
    study_of_arms,
    value_of,
)
from locater_lab.engine.claims import Claim
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Runs
from locater_lab.engine.sink_runs import COPY, COPY_SINK, HERE, PLAIN, SHORT, SPIKE, WEIGHT, sink_arm, sink_tables
from locater_lab.papers.sun2026.training import unless_massive

SIZES = {
    size: PLAIN if size == COPY.width else sink_arm(heads=COPY.width // size) for size in (8, 16, 32, 64)
}  # heads of equal width in all
SANDWICH, POST = sink_arm(norm="sandwich"), sink_arm(norm="post")
GELU, NONE, NO_DECAY, GATE = sink_arm(mlp="gelu"), sink_arm(mlp="none"), sink_arm(decay=0.0), sink_arm("gated")
ARMS = (*reversed(SIZES.values()), SANDWICH, POST, GELU, NONE, NO_DECAY, GATE)
ON_FIRST, LARGEST = (
    f"change of the weight on the first token, {HERE}",
    f"change of the largest entry over the median, {HERE}",
)

OF_SPIKES = ("f4", "f6", "f9", "f10", "f12")
UNLEARNED = "without an MLP the source is not learned, so that heads have something to add"

CLAIMS = (
    Claim("f1", "There is a sink to drive away", f"weight on the first token, plain model, {HERE}", "at least", COPY_SINK, by="ours"),
    Claim("f2", "Small heads have less of a sink", f"weight on the first token, heads of 8 less one of 64, {HERE}", "at most", 0.0,
          by="summary"),
    Claim("f3", "Sinks grow with head size", "rank correlation of head size (8, 16, 32, 64) with the weight on the first token, seed by "
          f"seed, {HERE}", "at least", 0.8, by="summary", bound="ours"),
    Claim("f4", "Norms behind branches lower spikes", LARGEST, "at most", 0.0, by="summary"),
    Claim("f5", "They leave sinks as they are", f"log of the weight on the first token with sandwich norms over that without, {HERE}",
          "about", 0.0, 0.25, by="summary", bound="ours"),
    Claim("f6", "A norm of the sum lowers spikes", LARGEST, "at most", 0.0, by="ours"),
    Claim("f7", "GELU in the place of SwiGLU has more of a sink", ON_FIRST, "at least", 0.0, by="summary"),
    Claim("f8", "Without MLPs there is more of a sink", ON_FIRST, "at least", 0.0, by="summary"),
    Claim("f9", "Without MLPs spikes shrink", LARGEST, "at most", 0.0, by="summary"),
    Claim("f10", "Without weight decay spikes grow", LARGEST, "at least", 0.0, by="summary"),
    Claim("f11", "A gate takes sinks away", ON_FIRST, "at most", 0.0, by="summary"),
    Claim("f12", "Spikes and sinks decouple: which arm has more of one says little of the other",
          f"rank correlation of the spike with the weight on the first token over all arms, seed by seed, {HERE}", "at most", 0.5,
          by="summary", bound="ours"),
)  # fmt: skip


def judge(runs: Runs) -> Results:
    measured = {
        "f1": mean_of_arm(runs, PLAIN, WEIGHT),
        "f2": difference(runs, SIZES[8], PLAIN, WEIGHT),
        "f3": rank_correlation(runs, SIZES.values(), list(SIZES), WEIGHT),
        "f4": difference(runs, SANDWICH, PLAIN, SPIKE),
        "f5": difference(runs, SANDWICH, PLAIN, lambda line: math.log(value_of(line, WEIGHT) or math.nan)),
        "f6": difference(runs, POST, PLAIN, SPIKE),
        "f7": difference(runs, GELU, PLAIN, WEIGHT),
        "f8": difference(runs, NONE, PLAIN, WEIGHT),
        "f9": difference(runs, NONE, PLAIN, SPIKE),
        "f10": difference(runs, NO_DECAY, PLAIN, SPIKE),
        "f11": difference(runs, GATE, PLAIN, WEIGHT),
        "f12": rank_correlation(runs, ARMS, SPIKE, WEIGHT),
    }
    measured = unless_massive(measured, mean_of_arm(runs, PLAIN, SPIKE), OF_SPIKES)
    unlearned = difference(runs, NONE, PLAIN, "report_loss")
    if unlearned is not None and unlearned.value > SHORT:
        measured = mark_inconclusive(measured, ("f8", "f9"), UNLEARNED)
    return Results(measured, sink_tables(runs, ARMS))


STUDY = study_of_arms("sinks and spikes where there is a sink", CLAIMS, ARMS, judge)
