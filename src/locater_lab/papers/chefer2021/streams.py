"""Study c: an encoder and a decoder, where one token of the encoder decides (section 3, encoder-decoder); and checks
that any explanation has to pass.
"""

from __future__ import annotations

from statistics import fmean

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.explanations import (
    COSTLY,
    areas,
    cost,
    hits_by_method,
    mean_curves,
    planted_model,
    redrawn_likeness,
    train_by_seed,
    two_stream_model,
)
from locater_lab.engine.reproduction import Results, Setting, Study

METHODS = ("relevance", "rollout", "raw_attention", "attention_norms", "gradient_input")

CLAIMS = (
    Claim(
        "c1", "In an encoder-decoder, relevance is superior to rollout, as seen here by how often the token that decides has the largest score",
        "share of inputs whose largest score it has, relevance less rollout", "at least", 0.0, where="abstract", bound="ours",
    ),
    Claim(
        "c2", "It is superior to rollout, as seen here by the order of the encoder's tokens", "area of relevance less that of rollout, means by seed",
        "at least", 0.0, where="abstract", bound="ours",
    ),
    Claim("c3", "It finds the token that decides", "share of inputs", "at least", 0.95, by="ours"),
    Claim("c4", "It finds one in a model of self-attention alone", "share of inputs, planted token", "at least", 0.95, by="ours"),
    Claim(
        "c5", "With all blocks drawn anew the scores are others", "rank correlation of scores before and after", "at most", 0.5, by="ours",
    ),
    Claim("c6", "Scores cost a few forward passes", "seconds over those of a forward pass, encoder-decoder", "at most", COSTLY, by="ours"),
)  # fmt: skip


def measure(setting: Setting) -> Results:
    subjects = train_by_seed(setting, two_stream_model)
    shares = hits_by_method(subjects, METHODS)
    orders = {name: [fmean(areas(subject, name)) for subject in subjects] for name in METHODS}
    alone = train_by_seed(setting, planted_model)
    alone_shares = hits_by_method(alone, METHODS)
    likeness = redrawn_likeness(alone, ("relevance", "rollout"))
    taken = cost(subjects[0], METHODS)
    measured = {
        "c1": by_seed([a - b for a, b in zip(shares["relevance"], shares["rollout"], strict=True)]),
        "c2": by_seed([a - b for a, b in zip(orders["relevance"], orders["rollout"], strict=True)]),
        "c3": by_seed(shares["relevance"]),
        "c4": by_seed(alone_shares["relevance"]),
        "c5": by_seed([values[-1] for values in likeness["relevance"]]),
        "c6": Measurement(taken["relevance"], 0.0, "none: the median of five turns on this machine"),
    }
    rows = [
        {
            "method": name,
            "found": fmean(shares[name]),
            "area": fmean(orders[name]),
            "alone": fmean(alone_shares[name]),
            "cost": taken[name],
        }
        for name in METHODS
    ]
    return Results(measured, {"known": {"rows": rows, "redrawn": mean_curves(likeness)}})


STUDY = Study("one token of the other stream decides", CLAIMS, measure)
