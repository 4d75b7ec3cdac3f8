"""Which mechanisms take a sink away, where softmax has one. Study f."""

from __future__ import annotations

from locater_lab.engine.arms import difference, judging_values, mean_of_arm, study_of_arms
from locater_lab.engine.claims import Claim, Measurement, Relation, by_seed
from locater_lab.engine.mechanism_runs import (
    COPY_SINK,
    HERE,
    NEARLY_GONE,
    PLAIN,
    SHARE,
    SPIKE,
    UNIFORM,
    VALUE,
    WEIGHT,
    sink_arm,
    sink_tables,
    weight_left,
)
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Runs
from locater_lab.mechanisms import mechanisms

SMALL = 0.01  # nats that count as nothing
ARMS = {m.name: PLAIN if m.name == "softmax" else sink_arm(m.name) for m in mechanisms() if m.is_causal_safe}
ROTARY = sink_arm(positions="rotary")
SUMS = ("linear", "delta", "gated_delta")
AWAY = {"f2": "gated", "f3": "sigmoid", "f4": "softmax_plus_one", "f5": "learned_sink"}


def _claim(id: str, says: str, quantity: str, relation: Relation, stated: float) -> Claim:
    return Claim(id, says, f"{quantity}, {HERE}", relation, stated, by="ours")


def _weight_claim(id: str, says: str, relation: Relation, stated: float) -> Claim:
    return _claim(id, says, "weight on the first token", relation, stated)


def _left_claim(id: str, says: str) -> Claim:
    return _claim(id, says, "weight on the first token over that under softmax", "at most", NEARLY_GONE)


CLAIMS = (
    _weight_claim("f1", "A softmax head that has nothing to add forms a sink", "at least", COPY_SINK),
    _left_claim("f2", "A gate takes its effect away, which its map may keep"),
    _left_claim("f3", "So does sigmoid attention"),
    _left_claim("f4", "So does a sink in the softmax, fixed at zero"),
    _left_claim("f5", "So does a learned sink"),
    _claim(
        "f6",
        "What has no softmax forms none",
        f"largest weight on the first token of {', '.join(SUMS)}",
        "at most",
        COPY_SINK,
    ),
    _weight_claim("f7", "QK-norm, which bounds logits, has it still", "at least", COPY_SINK),
    _claim(
        "f8",
        "A sink adds nothing: its value is small",
        "length of the first token's value over others', softmax",
        "at most",
        0.5,
    ),
    _claim("f9", "Behind a gate it is not", "the same with a gate less without", "at least", 0.0),
    _claim("f10", "To take the sink away by a gate costs nothing", "change of report loss", "at most", SMALL),
    _claim("f11", "Nor by sigmoids", "change of report loss", "at most", SMALL),
    _claim(
        "f12",
        "A sink needs no massive activation",
        "largest entry of the stream over the median, softmax",
        "at most",
        1000.0,
    ),
    _claim(
        "f13",
        "Without the sink activations are smaller",
        "change of the largest entry over the median by a gate",
        "at most",
        0.0,
    ),
    _claim(
        "f14",
        "Rotary positions make less of a sink than learned ones",
        "change of the weight on the first token",
        "at most",
        0.0,
    ),
    _claim(
        "f15",
        "The map behind the gate has no sink either",
        "first token's share of rows made to sum to 1, gated",
        "at most",
        UNIFORM,
    ),
    _claim(
        "f16",
        "Nor has that of sigmoids",
        "first token's share of rows made to sum to 1, sigmoid",
        "at most",
        UNIFORM,
    ),
)


def judge(runs: Runs) -> Results:
    measured = {
        "f1": mean_of_arm(runs, PLAIN, WEIGHT),
        **{id: weight_left(runs, ARMS[name]) for id, name in AWAY.items()},
        "f6": largest_weight(runs),
        "f7": mean_of_arm(runs, ARMS["qk_norm"], WEIGHT),
        "f8": mean_of_arm(runs, PLAIN, VALUE),
        "f9": difference(runs, ARMS["gated"], PLAIN, VALUE),
        "f10": difference(runs, ARMS["gated"], PLAIN, "report_loss"),
        "f11": difference(runs, ARMS["sigmoid"], PLAIN, "report_loss"),
        "f12": mean_of_arm(runs, PLAIN, SPIKE),
        "f13": difference(runs, ARMS["gated"], PLAIN, SPIKE),
        "f14": difference(runs, ROTARY, PLAIN, WEIGHT),
        "f15": mean_of_arm(runs, ARMS["gated"], SHARE),
        "f16": mean_of_arm(runs, ARMS["sigmoid"], SHARE),
    }
    return Results(measured, sink_tables(runs, (*ARMS.values(), ROTARY)))


def largest_weight(runs: Runs) -> Measurement | None:
    """Of the mechanisms without a softmax, seed by seed; None where one was not measured."""
    values = judging_values(runs, [ARMS[name] for name in SUMS], WEIGHT)
    return None if values is None else by_seed([max(each) for each in values])


STUDY = study_of_arms("sinks where a head has nothing to add", CLAIMS, (*ARMS.values(), ROTARY), judge)
