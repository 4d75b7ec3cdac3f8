"""Gates where softmax has a sink: which take it away, and which leave it. Study f; the models of study d have none."""

from __future__ import annotations

from collections.abc import Mapping

from locater.papers.arms_page import carried
from locater.papers.claim import Claim, Measured
from locater.papers.judging import change, level, rank_correlation, trained
from locater.papers.runs import Runs
from locater.papers.sink_runs import HERE, PLAIN, SHARE, SINK, SPIKE, UNIFORM, WEIGHT, sink_arm, sinks_table

HEAD, ELEMENT, VALUES = sink_arm("gated"), sink_arm("gated(per=element)"), sink_arm("gated(position=value, per=element)")
KEY, QUERY = sink_arm("gated(position=key)"), sink_arm("gated(position=query)")
CONSTANT, NS = sink_arm("gated(from_input=False)"), sink_arm("gated(score=ns_sigmoid, per=element)")
ARMS = (PLAIN, HEAD, ELEMENT, VALUES, KEY, QUERY, CONSTANT, NS)
VARIANTS = (ELEMENT, HEAD, VALUES, CONSTANT, NS)  # of the paper's six; with one head there is none to share a gate with
ON_FIRST = f"weight on the first token, {HERE}"

CLAIMS = (
    Claim("f1", "Softmax has a sink to take away", ON_FIRST, "at least", SINK, by="notes"),
    Claim("f2", "A gate per element takes it away: no more than even attention gives", ON_FIRST, "at most", UNIFORM),
    Claim("f3", "So does one gate per head", ON_FIRST, "at most", UNIFORM),
    Claim("f4", "Gates on values leave more of it", f"{ON_FIRST}, with gates on values less after attention", "at least", 0.0),
    Claim("f5", "A gate on keys leaves it", ON_FIRST, "at least", SINK, by="notes"),
    Claim("f6", "A gate on queries leaves it", ON_FIRST, "at least", SINK, by="notes"),
    Claim("f7", "A gate that ignores the input leaves it", f"share of rows made to sum to 1, {HERE}", "at least", SINK),
    Claim("f8", "A gate that cannot close leaves more of it", f"{ON_FIRST}, with NS-sigmoid less with the sigmoid", "at least", 0.0),
    Claim("f9", "The more the gates close, the smaller the sink", "rank correlation of mean gate with the first token's share over "
          f"{len(VARIANTS)} variants, seed by seed, {HERE}", "at least", 0.8),
    Claim("f10", "The gate lowers the largest activation", f"change of the largest entry over the median by a gate per element, {HERE}",
          "at most", 0.0),
)  # fmt: skip


def judge(runs: Runs) -> Mapping[str, Measured | None]:
    found = {
        "f1": level(runs, PLAIN, WEIGHT),
        "f2": level(runs, ELEMENT, WEIGHT),
        "f3": level(runs, HEAD, WEIGHT),
        "f4": change(runs, VALUES, ELEMENT, WEIGHT),
        "f5": level(runs, KEY, WEIGHT),
        "f6": level(runs, QUERY, WEIGHT),
        "f7": level(runs, CONSTANT, SHARE),
        "f8": change(runs, NS, ELEMENT, WEIGHT),
        "f9": rank_correlation(runs, VARIANTS, "measures.gate", SHARE),
        "f10": change(runs, ELEMENT, PLAIN, SPIKE),
    }
    return carried(found, sinks_table(runs, ARMS))


STUDY = trained("gates where there is a sink", CLAIMS, ARMS, judge)
