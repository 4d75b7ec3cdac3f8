"""What mechanisms promise, judged by training each on the same footing: losses, sinks, entropy, collapse."""

from __future__ import annotations

from collections.abc import Mapping

from locater_papers.engine.arms import (
    Line,
    change,
    ends_table,
    has_sink,
    level,
    mark_inconclusive,
    rank_correlation,
    trained,
    value_of,
)
from locater_papers.engine.arms_page import carried
from locater_papers.engine.claims import Claim, Measured, Relation
from locater_papers.engine.mechanism_runs import NO_SINK, SEEN
from locater_papers.engine.runs import Runs
from locater_papers.zoo.arms import ARMS, BARE, BOTH_WAYS, CAUSAL, STACK

LOSS = "report loss against softmax, each at the better of two rates"
SMALL = 0.01  # nats that count as nothing


def _claim(id: str, says: str, quantity: str, relation: Relation, stated: float) -> Claim:
    """All of them are this project's: papers speak of larger models."""
    return Claim(id, says, f"{quantity}, {SEEN}", relation, stated, by="ours")


def _loss(id: str, says: str, at_most: float) -> Claim:
    return _claim(id, says, LOSS, "at most", at_most)


CLAIMS = {
    "a": (
        _loss("a1", "A gate behind attention lowers the loss", 0.0),
        _loss("a2", "Differential attention lowers the loss", 0.0),
        _claim("a17", "Without the norm of its heads differential attention is worse", "report loss without it, at one rate, less that "
               "with it", "at least", 0.0),
        _loss("a3", "QK-norm costs nothing", SMALL),
        _loss("a4", "A cap of 50 on logits costs nothing", SMALL),
        _loss("a5", "A sink in the softmax, fixed at zero, costs nothing", SMALL),
        _loss("a6", "A learned sink costs nothing", SMALL),
        _loss("a7", "Sigmoid attention is as good", SMALL),
        _loss("a8", "Taking the uniform part off costs nothing", SMALL),
        _loss("a9", "One bit per channel of queries and keys costs little", 2 * SMALL),
        _claim("a10", "Attention that cannot localise is worse", "report loss of fastmax, order 2, less that of softmax", "at least",
               SMALL),
        _claim("a11", "The delta rule does better than sums of features", "report loss of delta less that of linear", "at most", 0.0),
        _claim("a12", "Forgetting improves on the delta rule", "report loss of gated_delta less that of delta", "at most", 0.0),
        _loss("a13", "Three layers of four without softmax cost little", 2 * SMALL),
        _loss("a14", "Encoders: normalising twice lowers the loss", 0.0),
        _loss("a15", "Encoders: a learned mix of one and two normalisations lowers the loss", 0.0),
        _loss("a16", "Encoders: heads of several kinds cost nothing", SMALL),
    ),
    "b": (
        _claim("b1", "Softmax attention forms sinks on the first token", "share of heads that give it more than 0.3", "at least", 0.1),
        _claim("b2", "A gate takes weight off the first token", "change of its share of rows", "at most", 0.0),
        _claim("b3", "A learned sink takes weight off the first token", "change of its share of rows", "at most", 0.0),
        _claim("b4", "A sink fixed at zero takes weight off the first token", "change of its share of rows", "at most", 0.0),
        _claim("b5", "Sigmoid attention takes weight off the first token", "change of its share of rows", "at most", 0.0),
        _claim("b6", "Without normalisation no head has a sink", "share of heads of sigmoid attention that have one", "at most", 0.0),
        _claim("b7", "A gate makes the largest activations smaller", "change of the largest entry of the stream over the median",
               "at most", 0.0),
        _claim("b8", "Sinks need no massive activations", "largest entry of the stream over the median, softmax", "at most", 1000.0),
    ),
    "c": (
        _claim("c1", "Normalised Fastmax stays near uniform", "entropy as a share of the log of keys in view", "at least", 0.95),
        _claim("c2", "Signs of queries and keys flatten attention", "change of entropy by binary, nats", "at least", 0.0),
        _claim("c3", "QK-norm raises entropy", "change of entropy, nats", "at least", 0.0),
        _claim("c4", "Mechanisms that attend more sharply do better",
               "rank correlation of entropy with report loss, causal mechanisms that have one", "at least", 0.3),
    ),
    "d": (
        _claim("d1", "Without the uniform part maps have a smaller gap", "change of 1 - s2/s1 by centred", "at most", 0.0),
        _claim("d2", "Without the uniform part tokens stay further apart", "change of the residual after the last block by centred",
               "at least", 0.0),
        _claim("d3", "Normalised twice, no key is explained away", "share of keys that receive less than 1/S", "at most", 0.0),
        _claim("d4", "Normalised once, some are", "share of keys that receive less than 1/S, softmax, masked", "at least", 0.01),
        _claim("d5", "A learned mix explains fewer away than softmax", "change of the share of keys", "at most", 0.0),
    ),
}  # fmt: skip


def _residual(line: Line) -> float:
    return float(line["measures"]["halves"][-1]["residual"])


def _losses(runs: Runs) -> Mapping[str, Measured | None]:
    plain = CAUSAL["softmax"]
    against = {
        "a1": "gated", "a2": "differential", "a3": "qk_norm", "a4": "softcap", "a5": "softmax_plus_one", "a6": "learned_sink",
        "a7": "sigmoid", "a8": "centred", "a9": "binary", "a10": "fastmax", "a13": STACK.name,
    }  # fmt: skip
    found = {key: change(runs, CAUSAL[name], plain, "report_loss") for key, name in against.items()}
    found |= {
        "a11": change(runs, CAUSAL["delta"], CAUSAL["linear"], "report_loss"),
        "a12": change(runs, CAUSAL["gated_delta"], CAUSAL["delta"], "report_loss"),
        "a17": change(runs, BARE, CAUSAL["differential"], "report_loss"),
    }
    ways = {"a14": "doubly_normalized", "a15": "hybrid_normalized", "a16": "multiformer"}
    found |= {key: change(runs, BOTH_WAYS[name], BOTH_WAYS["softmax"], "report_loss") for key, name in ways.items()}
    return carried(found, {"causal": ends_table(runs, CAUSAL.values()), "masked": ends_table(runs, BOTH_WAYS.values())})


def _sinks(runs: Runs) -> Mapping[str, Measured | None]:
    """Where softmax has no sink, that others have none either says nothing, nor that it needs no massive activation for
    one.
    """
    plain = CAUSAL["softmax"]
    names = {"b2": "gated", "b3": "learned_sink", "b4": "softmax_plus_one", "b5": "sigmoid"}
    found = {
        "b1": level(runs, plain, "measures.sink_rate"),
        **{key: change(runs, CAUSAL[name], plain, "measures.first_mass") for key, name in names.items()},
        "b6": level(runs, CAUSAL["sigmoid"], "measures.sink_rate"),
        "b7": change(runs, CAUSAL["gated"], plain, "measures.spike_ratio"),
        "b8": level(runs, plain, "measures.spike_ratio"),
    }
    if has_sink(runs, plain):
        return found
    return mark_inconclusive(mark_inconclusive(found, ("b6",), NO_SINK), ("b8",), NO_SINK, room=1000.0)


def _entropy(runs: Runs) -> Mapping[str, Measured | None]:
    plain = CAUSAL["softmax"]
    return {
        "c1": level(runs, CAUSAL["fastmax"], "measures.entropy_share"),
        "c2": change(runs, CAUSAL["binary"], plain, "measures.entropy"),
        "c3": change(runs, CAUSAL["qk_norm"], plain, "measures.entropy"),
        "c4": _sharp(runs),
    }


def _sharp(runs: Runs) -> Measured | None:
    """Over the mechanisms whose every layer, or some, has an entropy; None while an arm is not whole."""
    ends = {arm: arm.ends(runs) for arm in CAUSAL.values()}
    if any(lines is None for lines in ends.values()):
        return None
    known = [
        arm
        for arm, lines in ends.items()
        if all(value_of(line, "measures.entropy") is not None for line in lines or ())
    ]
    return rank_correlation(runs, known, "measures.entropy", "report_loss", {"mechanisms": len(known)})


def _collapse(runs: Runs) -> Mapping[str, Measured | None]:
    plain, once = CAUSAL["softmax"], BOTH_WAYS["softmax"]
    return {
        "d1": change(runs, CAUSAL["centred"], plain, "measures.gap"),
        "d2": change(runs, CAUSAL["centred"], plain, _residual),
        "d3": level(runs, BOTH_WAYS["doubly_normalized"], "measures.explained_away"),
        "d4": level(runs, once, "measures.explained_away"),
        "d5": change(runs, BOTH_WAYS["hybrid_normalized"], once, "measures.explained_away"),
    }


STUDIES = (
    trained("losses", CLAIMS["a"], ARMS, _losses),
    trained("sinks and spikes", CLAIMS["b"], ARMS, _sinks),
    trained("entropy", CLAIMS["c"], ARMS, _entropy),
    trained("collapse", CLAIMS["d"], ARMS, _collapse),
)
