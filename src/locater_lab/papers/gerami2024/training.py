"""Fastmax against softmax in training, text and images: study e."""

from __future__ import annotations

from locater_lab.engine.arms import difference, ends_table, mean_of_arm, study_of_arms
from locater_lab.engine.claims import Claim
from locater_lab.engine.mechanism_runs import BASE, IMAGE, SOFTMAX, SOFTMAX_IMAGE, arm
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Runs
from locater_lab.train.measured import SINK

SECOND, FIRST, PICTURES = arm("fastmax"), arm("fastmax(order=1)"), arm("fastmax", IMAGE)
ARMS = (SOFTMAX, SECOND, FIRST, SOFTMAX_IMAGE, PICTURES)
TEXT = "causal language model of this size"

CLAIMS = (
    Claim(
        "e1", "Fastmax has a robust performance: it does about as well as softmax on text, as seen at this size",
        f"change of report loss by order 2, {TEXT}", "at most", 0.05, where="abstract", bound="ours",
    ),
    Claim(
        "e2", "Order 1 does about as well as softmax too, as seen at this size",
        f"change of report loss by order 1, which has one rate, {TEXT}", "at most", 0.05, by="ours",
    ),
    Claim(
        "e3", "Order 2 does better than order 1, as seen at this size",
        f"report loss of order 2 less that of order 1, which has one rate, {TEXT}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e4", "Fastmax has a robust performance: it does about as well as softmax on images, as seen at this size",
        "change of test accuracy by order 2, image classifier of this size", "at least", -0.01, where="abstract", bound="ours",
    ),
    Claim(
        "e5", "Trained, it does not localise: entropy stays near that of uniform rows, as seen at this size",
        f"entropy over log of keys in view, order 2, {TEXT}", "at least", 0.95, by="ours",
    ),
    Claim(
        "e6", "Softmax, trained, does localise, as seen at this size",
        "entropy over log of keys in view, softmax, the same model", "at most", 0.8, by="ours",
    ),
)  # fmt: skip


def judge(runs: Runs) -> Results:
    measured = {
        "e1": difference(runs, SECOND, SOFTMAX, "report_loss"),
        "e2": difference(runs, FIRST, SOFTMAX, "report_loss"),
        "e3": difference(runs, SECOND, FIRST, "report_loss"),
        "e4": difference(runs, PICTURES, SOFTMAX_IMAGE, "accuracy"),
        "e5": mean_of_arm(runs, SECOND, "measures.entropy_share"),
        "e6": mean_of_arm(runs, SOFTMAX, "measures.entropy_share"),
    }
    return Results(measured, {"arms": ends_table(runs, ARMS), "training": {"layers": BASE.layers, "sink": SINK}})


STUDY = study_of_arms("Fastmax in training", CLAIMS, ARMS, judge)
