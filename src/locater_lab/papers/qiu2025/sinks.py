"""Gates where softmax has a sink: which take it away, and which leave it. Study f; the models of study d have none."""

from __future__ import annotations

from locater_lab.engine.arms import difference, mean_of_arm, rank_correlation, study_of_arms
from locater_lab.engine.claims import Claim
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Runs
from locater_lab.engine.sink_runs import (
    COPY_SINK,
    HERE,
    LEFT,
    PLAIN,
    SHARE,
    UNIFORM,
    WEIGHT,
    sink_arm,
    sink_tables,
    weight_left,
)

HEAD, ELEMENT, VALUES = (
    sink_arm("gated"),
    sink_arm("gated(per=element)"),
    sink_arm("gated(position=value, per=element)"),
)
KEY, QUERY = sink_arm("gated(position=key)"), sink_arm("gated(position=query)")
CONSTANT, NS = sink_arm("gated(from_input=False)"), sink_arm("gated(score=ns_sigmoid, per=element)")
ARMS = (PLAIN, HEAD, ELEMENT, VALUES, KEY, QUERY, CONSTANT, NS)
VARIANTS = (ELEMENT, HEAD, VALUES, CONSTANT, NS)  # of the paper's six; with one head there is none to share a gate with
ON_FIRST = f"weight on the first token, as it acts, {HERE}"
OF_ROWS = f"first token's share of rows made to sum to 1, {HERE}"  # what the paper's table has

CLAIMS = (
    Claim("f1", "Softmax has a sink to take away", ON_FIRST, "at least", COPY_SINK, by="ours"),
    Claim("f2", "A gate per element takes weight off it", f"change of the {OF_ROWS}", "at most", 0.0, where="Table 4"),
    Claim("f3", "So does one gate per head", f"change of the {OF_ROWS}", "at most", 0.0, where="Table 4"),
    Claim("f4", "Gates on values leave more of it", f"{OF_ROWS}, with gates on values less after attention", "at least", 0.0,
          where="Table 4"),
    Claim("f5", "A gate on keys leaves it", ON_FIRST, "at least", COPY_SINK, by="ours"),
    Claim("f6", "A gate on queries leaves it", ON_FIRST, "at least", COPY_SINK, by="ours"),
    Claim("f7", "Gates that ignore the input leave more of it", f"{OF_ROWS}, without input less with it, per head", "at least", 0.0,
          where="Table 4"),
    Claim("f8", "Gates that cannot close leave more of it", f"{OF_ROWS}, with NS-sigmoid less with the sigmoid", "at least", 0.0,
          where="Table 4"),
    Claim("f9", "The more the gates close, the smaller the sink", "rank correlation of mean gate with the first token's share over "
          f"{len(VARIANTS)} variants, seed by seed, {HERE}", "at least", 0.8, where="Table 4", bound="ours"),
    Claim("f10", "As it acts, the gate per element leaves a tenth at most", f"weight on the first token over that under softmax, {HERE}",
          "at most", LEFT, by="ours"),
    Claim("f11", "So does the gate per head", f"weight on the first token over that under softmax, {HERE}", "at most", LEFT, by="ours"),
    Claim("f12", "The map behind a gate per head has no sink either: no more than even attention gives", OF_ROWS, "at most", UNIFORM,
          by="ours"),
)  # fmt: skip


def judge(runs: Runs) -> Results:
    measured = {
        "f1": mean_of_arm(runs, PLAIN, WEIGHT),
        "f2": difference(runs, ELEMENT, PLAIN, SHARE),
        "f3": difference(runs, HEAD, PLAIN, SHARE),
        "f4": difference(runs, VALUES, ELEMENT, SHARE),
        "f5": mean_of_arm(runs, KEY, WEIGHT),
        "f6": mean_of_arm(runs, QUERY, WEIGHT),
        "f7": difference(runs, CONSTANT, HEAD, SHARE),
        "f8": difference(runs, NS, ELEMENT, SHARE),
        "f9": rank_correlation(runs, VARIANTS, "measures.gate", SHARE),
        "f10": weight_left(runs, ELEMENT),
        "f11": weight_left(runs, HEAD),
        "f12": mean_of_arm(runs, HEAD, SHARE),
    }
    return Results(measured, sink_tables(runs, ARMS))


STUDY = study_of_arms("gates where there is a sink", CLAIMS, ARMS, judge)
