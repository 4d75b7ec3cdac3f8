"""Binary attention trained from the start, which the paper does not do: it fine-tunes trained models, on images. Study
d.
"""

from __future__ import annotations

from locater_lab.engine.arms import difference, ends_table, study_of_arms
from locater_lab.engine.claims import Claim
from locater_lab.engine.mechanism_runs import AT_THIS_SIZE, IMAGE, SOFTMAX, SOFTMAX_IMAGE, TUNED, arm
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Runs

BINARY = arm("binary")
PLAIN = arm("binary(span=0)", name="binary, no bias")  # one bias for all distances, which a softmax does not feel
ON_IMAGES = arm("binary(grid=(7, 7))", IMAGE)  # patches of 4 x 4 of 28 x 28
ARMS = (SOFTMAX, BINARY, PLAIN, SOFTMAX_IMAGE, ON_IMAGES)

CLAIMS = (
    Claim(
        "d1", "Trained from scratch, binary attention comes within 0.05 nats of softmax; the paper fine-tunes and claims nothing of this",
        f"change of report loss by binary attention, {TUNED}", "at most", 0.05, by="ours",
    ),
    Claim(
        "d2", "A learned bias makes up for some of what one bit loses (in the paper: on images, after fine-tuning)",
        f"change of report loss by the bias, at the better of two rates with it and at the higher without, {AT_THIS_SIZE}", "at most", 0.0,
        where="abstract",
    ),
    Claim(
        "d3", "Rows stay flatter than those of softmax after training",
        f"change of mean entropy in nats by binary attention, {TUNED}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d4", "On images, the paper's own ground, it comes within one point of accuracy from scratch too",
        f"change of test accuracy by binary attention with a bias per offset, both at one rate, {AT_THIS_SIZE}", "at least", -0.01, by="ours",
    ),
)  # fmt: skip


def judge(runs: Runs) -> Results:
    measured = {
        "d1": difference(runs, BINARY, SOFTMAX, "report_loss"),
        "d2": difference(runs, BINARY, PLAIN, "report_loss"),
        "d3": difference(runs, BINARY, SOFTMAX, "measures.entropy"),
        "d4": difference(runs, ON_IMAGES, SOFTMAX_IMAGE, "accuracy"),
    }
    return Results(measured, {"arms": ends_table(runs, ARMS)})


STUDY = study_of_arms("training with binary attention", CLAIMS, ARMS, judge)
