"""Study c: checks that any explanation has to pass, and what it costs."""

from __future__ import annotations

from statistics import fmean

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.explanations import (
    COSTLY,
    cost,
    hits_by_method,
    mean_curves,
    planted_model,
    redrawn_likeness,
    train_by_seed,
)
from locater_lab.engine.reproduction import Results, Setting, Study

METHODS = ("operator logit", "operator input", "operator norm", "paths", "rollout", "raw_attention", "gradient_input")

CLAIMS = (
    Claim(
        "c1", "A token that decides the class is found", "share of inputs whose largest score it has, operator along the class", "at least", 0.95,
        by="ours",
    ),
    Claim(
        "c2", "Its norm alone, which does not know the input, finds it too", "share of inputs, collapse by norm", "at least", 0.95, by="ours",
    ),
    Claim(
        "c3", "With all blocks drawn anew the scores are others", "rank correlation of scores before and after, operator along the class",
        "at most", 0.5, by="ours",
    ),
    Claim("c4", "Those of rollout are others too", "rank correlation of scores before and after, rollout", "at most", 0.5, by="ours"),
    Claim("c5", "Scores for one target cost a few forward passes", "seconds over those of a forward pass, planted model", "at most", COSTLY, by="ours"),
)  # fmt: skip


def measure(setting: Setting) -> Results:
    subjects = train_by_seed(setting, planted_model)
    shares = hits_by_method(subjects, METHODS)
    likeness = redrawn_likeness(subjects, ("operator logit", "rollout"))
    taken = cost(subjects[0], METHODS)
    measured = {
        "c1": by_seed(shares["operator logit"]),
        "c2": by_seed(shares["operator norm"]),
        "c3": by_seed([values[-1] for values in likeness["operator logit"]]),
        "c4": by_seed([values[-1] for values in likeness["rollout"]]),
        "c5": Measurement(taken["operator logit"], 0.0, "none: the median of five turns on this machine"),
    }
    rows = [{"method": name, "found": fmean(shares[name]), "cost": taken[name]} for name in METHODS]
    return Results(measured, {"known": {"rows": rows, "redrawn": mean_curves(likeness)}})


STUDY = Study("checks with a known answer", CLAIMS, measure)
