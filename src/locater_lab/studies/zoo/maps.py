"""What training makes of maps and of the stream: sinks and spikes, entropy, collapse. Studies b, c and d."""

from __future__ import annotations

from collections.abc import Mapping

from locater_lab.engine.arms import (
    Line,
    difference,
    has_sink,
    largest_over_seeds,
    mark_inconclusive,
    mean_of_arm,
    rank_correlation,
    study_of_arms,
    value_of,
)
from locater_lab.engine.claims import Measurement
from locater_lab.engine.mechanism_runs import NO_SINK, SOFTMAX, SOFTMAX_MASKED
from locater_lab.engine.runs import Runs
from locater_lab.studies.zoo.losses import ARMS, BOTH_WAYS, CAUSAL, own_claim

FIRST = "change of its share of rows"
AWAY = {"b2": "gated", "b3": "learned_sink", "b4": "softmax_plus_one", "b5": "sigmoid"}

SINKS = (
    own_claim(
        "b1",
        "Softmax attention forms sinks on the first token",
        "share of heads that give it more than 0.3",
        "at least",
        0.1,
    ),
    own_claim("b2", "A gate takes weight off the first token", FIRST, "at most", 0.0),
    own_claim("b3", "A learned sink takes weight off the first token", FIRST, "at most", 0.0),
    own_claim("b4", "A sink fixed at zero takes weight off the first token", FIRST, "at most", 0.0),
    own_claim("b5", "Sigmoid attention takes weight off the first token", FIRST, "at most", 0.0),
    own_claim(
        "b6",
        "Without normalisation no head has a sink",
        "share of heads of sigmoid attention that have one",
        "at most",
        0.0,
    ),
    own_claim(
        "b7",
        "A gate makes the largest activations smaller",
        "change of the largest entry of the stream over the median",
        "at most",
        0.0,
    ),
    own_claim(
        "b8",
        "Sinks need no massive activations",
        "largest entry of the stream over the median, softmax",
        "at most",
        1000.0,
    ),
)

ENTROPY = (
    own_claim(
        "c1", "Normalised Fastmax stays near uniform", "entropy as a share of the log of keys in view", "at least", 0.95
    ),
    own_claim(
        "c2", "Signs of queries and keys flatten attention", "change of entropy by binary, nats", "at least", 0.0
    ),
    own_claim("c3", "QK-norm raises entropy", "change of entropy, nats", "at least", 0.0),
    own_claim(
        "c4",
        "Mechanisms that attend more sharply do better",
        "rank correlation of entropy with report loss, causal mechanisms that have one",
        "at least",
        0.3,
    ),
)

COLLAPSE = (
    own_claim(
        "d1", "Without the uniform part maps have a smaller gap", "change of 1 - s2/s1 by centred", "at most", 0.0
    ),
    own_claim(
        "d2",
        "Without the uniform part tokens stay further apart",
        "change of the residual after the last block by centred",
        "at least",
        0.0,
    ),
    own_claim(
        "d3", "Normalised twice, no key is explained away", "share of keys that receive less than 1/S", "at most", 0.0
    ),
    own_claim(
        "d4",
        "Normalised once, some are",
        "share of keys that receive less than 1/S, softmax, masked",
        "at least",
        0.01,
    ),
    own_claim("d5", "A learned mix explains fewer away than softmax", "change of the share of keys", "at most", 0.0),
)


def judge_sinks(runs: Runs) -> Mapping[str, Measurement | None]:
    """Where softmax has no sink, that others have none either says nothing, nor that it needs no massive activation for
    one.
    """
    measured = {
        "b1": mean_of_arm(runs, SOFTMAX, "measures.sink_rate"),
        **{id: difference(runs, CAUSAL[name], SOFTMAX, "measures.first_mass") for id, name in AWAY.items()},
        "b6": largest_over_seeds(runs, CAUSAL["sigmoid"], "measures.sink_rate"),
        "b7": difference(runs, CAUSAL["gated"], SOFTMAX, "measures.spike_ratio"),
        "b8": mean_of_arm(runs, SOFTMAX, "measures.spike_ratio"),
    }
    return measured if has_sink(runs, SOFTMAX) else mark_inconclusive(measured, ("b6", "b8"), NO_SINK)


def judge_entropy(runs: Runs) -> Mapping[str, Measurement | None]:
    return {
        "c1": mean_of_arm(runs, CAUSAL["fastmax"], "measures.entropy_share"),
        "c2": difference(runs, CAUSAL["binary"], SOFTMAX, "measures.entropy"),
        "c3": difference(runs, CAUSAL["qk_norm"], SOFTMAX, "measures.entropy"),
        "c4": entropy_loss_correlation(runs),
    }


def judge_collapse(runs: Runs) -> Mapping[str, Measurement | None]:
    away = "measures.explained_away"
    return {
        "d1": difference(runs, CAUSAL["centred"], SOFTMAX, "measures.gap"),
        "d2": difference(runs, CAUSAL["centred"], SOFTMAX, last_residual),
        "d3": largest_over_seeds(runs, BOTH_WAYS["doubly_normalized"], away),
        "d4": mean_of_arm(runs, SOFTMAX_MASKED, away),
        "d5": difference(runs, BOTH_WAYS["hybrid_normalized"], SOFTMAX_MASKED, away),
    }


def last_residual(line: Line) -> float:
    """After the last block."""
    return float(line["measures"]["halves"][-1]["residual"])


def entropy_loss_correlation(runs: Runs) -> Measurement | None:
    """Over the mechanisms whose every layer, or some, has an entropy; None while an arm is not whole."""
    ends = {arm: arm.final_lines(runs) for arm in CAUSAL.values()}
    if any(lines is None for lines in ends.values()):
        return None
    known = [
        arm
        for arm, lines in ends.items()
        if all(value_of(line, "measures.entropy") is not None for line in lines or ())
    ]
    return rank_correlation(runs, known, "measures.entropy", "report_loss", {"mechanisms": len(known)})


STUDIES = (
    study_of_arms("sinks and spikes", SINKS, ARMS, judge_sinks),
    study_of_arms("entropy", ENTROPY, ARMS, judge_entropy),
    study_of_arms("collapse", COLLAPSE, ARMS, judge_collapse),
)
