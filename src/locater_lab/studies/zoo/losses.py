"""The arms of the zoo, and what each costs: report losses on the same footing. Study a.

Every mechanism stands once, with its default settings; a stack of two kinds and differential heads without their norm
come on top. Mechanisms that look ahead are trained as masked language models, against softmax trained so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from locater_lab.engine.arms import difference, study_of_arms, table_of_arms, uniform_first
from locater_lab.engine.claims import Claim, Relation
from locater_lab.engine.mechanism_runs import AT_THIS_SIZE, BASE, MASKED, RATES, SOFTMAX, SOFTMAX_MASKED, arm
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Arm, Runs
from locater_lab.mechanisms import mechanisms

STACK = replace(arm("hybrid(layout=3:1)", name="hybrid 3:1"), rates=RATES, seeds=3)
BARE = arm("differential(norm=False)", name="differential, no norm")
CAUSAL: dict[str, Arm] = {
    m.name: SOFTMAX if m.name == "softmax" else arm(m.name) for m in mechanisms() if m.is_causal_safe
}
CAUSAL |= {STACK.name: STACK, BARE.name: BARE}
BOTH_WAYS: dict[str, Arm] = {"softmax": SOFTMAX_MASKED} | {
    m.name: arm(m.name, MASKED) for m in mechanisms() if not m.is_causal_safe
}
ARMS: tuple[Arm, ...] = (*CAUSAL.values(), *BOTH_WAYS.values())

SMALL = 0.01  # nats that count as nothing
MEASURES = ("entropy", "row_mass", "first_mass", "sink_rate", "spike_ratio", "residual", "gap", "M", "F")


def own_claim(id: str, says: str, quantity: str, relation: Relation, stated: float) -> Claim:
    """A claim of this project about this size: papers speak of larger models."""
    return Claim(id, says, f"{quantity}, {AT_THIS_SIZE}", relation, stated, by="ours")


def _loss_claim(id: str, says: str, at_most: float) -> Claim:
    return own_claim(id, says, "report loss against softmax, each at the better of two rates", "at most", at_most)


CLAIMS = (
    _loss_claim("a1", "A gate behind attention lowers the loss", 0.0),
    _loss_claim("a2", "Differential attention lowers the loss", 0.0),
    own_claim(
        "a17",
        "Without the norm of its heads differential attention is worse",
        "report loss without it, at one rate, less that with it",
        "at least",
        0.0,
    ),
    _loss_claim("a3", "QK-norm costs nothing", SMALL),
    _loss_claim("a4", "A cap of 50 on logits costs nothing", SMALL),
    _loss_claim("a5", "A sink in the softmax, fixed at zero, costs nothing", SMALL),
    _loss_claim("a6", "A learned sink costs nothing", SMALL),
    _loss_claim("a7", "Sigmoid attention is as good", SMALL),
    _loss_claim("a8", "Taking the uniform part off costs nothing", SMALL),
    _loss_claim("a9", "One bit per channel of queries and keys costs little", 2 * SMALL),
    own_claim(
        "a10",
        "Attention that cannot localise is worse",
        "report loss of fastmax, order 2, less that of softmax",
        "at least",
        SMALL,
    ),
    own_claim(
        "a11",
        "The delta rule does better than sums of features",
        "report loss of delta less that of linear",
        "at most",
        0.0,
    ),
    own_claim(
        "a12", "Forgetting improves on the delta rule", "report loss of gated_delta less that of delta", "at most", 0.0
    ),
    _loss_claim("a13", "Three layers of four without softmax cost little", 2 * SMALL),
    _loss_claim("a14", "Encoders: normalising twice lowers the loss", 0.0),
    _loss_claim("a15", "Encoders: a learned mix of one and two normalisations lowers the loss", 0.0),
    _loss_claim("a16", "Encoders: heads of several kinds cost nothing", SMALL),
)

# of each claim: the arm, and the one it is compared with
PAIRS: dict[str, tuple[Arm, Arm]] = {
    "a1": (CAUSAL["gated"], SOFTMAX),
    "a2": (CAUSAL["differential"], SOFTMAX),
    "a17": (BARE, CAUSAL["differential"]),
    "a3": (CAUSAL["qk_norm"], SOFTMAX),
    "a4": (CAUSAL["softcap"], SOFTMAX),
    "a5": (CAUSAL["softmax_plus_one"], SOFTMAX),
    "a6": (CAUSAL["learned_sink"], SOFTMAX),
    "a7": (CAUSAL["sigmoid"], SOFTMAX),
    "a8": (CAUSAL["centred"], SOFTMAX),
    "a9": (CAUSAL["binary"], SOFTMAX),
    "a10": (CAUSAL["fastmax"], SOFTMAX),
    "a11": (CAUSAL["delta"], CAUSAL["linear"]),
    "a12": (CAUSAL["gated_delta"], CAUSAL["delta"]),
    "a13": (STACK, SOFTMAX),
    "a14": (BOTH_WAYS["doubly_normalized"], SOFTMAX_MASKED),
    "a15": (BOTH_WAYS["hybrid_normalized"], SOFTMAX_MASKED),
    "a16": (BOTH_WAYS["multiformer"], SOFTMAX_MASKED),
}


def judge(runs: Runs) -> Results:
    measured = {id: difference(runs, of, against, "report_loss") for id, (of, against) in PAIRS.items()}
    causal, masked = arm_rows(runs, tuple(CAUSAL.values())), arm_rows(runs, tuple(BOTH_WAYS.values()))
    if not causal:
        return Results(measured)
    about = {"layers": BASE.layers, "width": BASE.width, "even_first": uniform_first(BASE.length)}
    return Results(measured, {"mechanisms": {"causal": causal, "masked": masked, **about}})


def arm_rows(runs: Runs, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """What the page shows of each arm: means over seeds, the change of loss against the first arm by the seeds that
    both have, and measures that every seed has. Nothing while the first arm was not trained.
    """
    rows: list[dict[str, Any]] = table_of_arms(runs, arms) if arms[0].lines_so_far(runs) else []
    for row in rows:
        loss = fmean(end["loss"] for end in row["ends"])
        changes = [end["loss"] - base["loss"] for end, base in zip(row["ends"], rows[0]["ends"], strict=False)]
        row |= {
            "arm": row["arm"].removesuffix(", masked"),
            "loss": loss,
            "perplexity": math.exp(loss),
            "change": None if row is rows[0] else [fmean(changes), min(changes), max(changes)],
            "means": {name: _mean(row["ends"], name) for name in MEASURES},
            "is_whole": len(row["ends"]) == row["seeds"],
        }
    return rows


def _mean(ends: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [end.get(name) for end in ends]
    return None if None in values else fmean(x for x in values if x is not None)


STUDY = study_of_arms("losses", CLAIMS, ARMS, judge)
