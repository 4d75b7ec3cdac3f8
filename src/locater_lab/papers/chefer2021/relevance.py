"""Relevance of tokens through attention maps and their gradients: the rules without gradients (study a), tokens taken
away in the order of relevance (study b), an encoder and a decoder (study c), and what needs large models (study d).

    R <- R + Abar R,  Abar = mean over heads of max(0, dy/dA * A)             self-attention, equations 5 and 6

With Abar the mean map itself, whose rows sum to 1, R = prod (I + A_l) = 2^L times rollout.
"""

from __future__ import annotations

from statistics import fmean

import torch

from locater.explain import relevance, rollout
from locater.explain.attention_flow import RelevanceMatrices
from locater.explain.recorded_run import Run
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.explanation_tests import (
    COSTLY,
    MISSING,
    MODELS,
    WORDS,
    deletion_areas,
    hit_rates_by_method,
    mean_curves,
    measure_areas,
    planted_model,
    redraw_similarities,
    relative_cost,
    train_by_seed,
    two_stream_model,
)
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.train import Shape, Transformer

# ---- a: the rules of section 3, and what they are without gradients ----


LAYERS = (1, 2, 4)
ROUNDING = 1e-10

RULE_CLAIMS = (
    Claim(
        "a1", "Without gradients the rule for self-attention is rollout times 2 to the number of layers",
        "largest |R - 2^L rollout| / |R|, in float64", "at most", ROUNDING, by="ours",
    ),
    Claim(
        "a2", "Gradients make it another matrix", "least |R / |R| - rollout / |rollout||, matrices of unit norm", "at least", 0.1, by="ours",
    ),
)  # fmt: skip


def random_model(layers: int) -> Transformer:
    torch.manual_seed(layers)
    shape = Shape(vocabulary=32, layers=layers, width=32, heads=4, kv_heads=4, hidden=48, length=16, causal=False)
    return Transformer(shape, scale=0.3).double().eval()


def measure_rules(setting: Setting) -> Results:
    rows = []
    for layers in LAYERS:
        net, ids = random_model(layers), torch.arange(12)[None]
        matrices = RelevanceMatrices({"input": 12}, like=torch.zeros((), dtype=torch.float64))
        for event in Run(net, ids).events:
            matrices.self_attention("input", event.mean_map())
        R, plain = matrices["input", "input"], rollout(net, ids, (0, 1)).matrix
        with_gradients = relevance(net, ids, (0, 1)).matrix
        assert plain is not None
        assert with_gradients is not None
        unit, other = (x / x.norm() for x in (with_gradients, plain))
        rows.append({
            "layers": layers,
            "gap": float((R - 2**layers * plain).norm() / R.norm()),
            "apart": float((unit - other).norm()),
        })  # fmt: skip
    of = f"none: models of {', '.join(map(str, LAYERS))} layers"
    measured = {
        "a1": Measurement(max(row["gap"] for row in rows), 0.0, of),
        "a2": Measurement(min(row["apart"] for row in rows), 0.0, of),
    }
    return Results(measured, {"rules": rows})


RULE_STUDY = Study("the rules without gradients", RULE_CLAIMS, measure_rules)


# ---- b: tokens taken away, in models of self-attention alone (section 4) ----


ADAPTED = ("rollout", "raw_attention")  # of the rivals that the paper names, those that this project has
OTHERS = ("attention_norms", "gradient_input", "integrated_gradients", "operator logit")
HERE = "area of relevance less that of the better of rollout and raw attention"

PERTURBATION_CLAIMS = (
    *(
        Claim(
            key, f"Relevance is superior to methods that were made for self-attention alone, in {WORDS[model]}", f"{HERE}, {model}",
            "at least", 0.0, where="abstract", bound="ours",
        )
        for key, model in MODELS.items()
    ),
    Claim(
        "b5", "It is better than integrated gradients", "area of relevance less that of integrated gradients, text", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def measure_perturbation(setting: Setting) -> Results:
    areas = measure_areas(setting, ("relevance", *ADAPTED), OTHERS)
    measured = {key: areas.gain_over_rivals(model, "relevance", ADAPTED) for key, model in MODELS.items()}
    measured["b5"] = areas.gain_over_rivals("text", "relevance", ("integrated_gradients",))
    return Results(measured, {"areas": areas.table()})


PERTURBATION_STUDY = Study(
    "tokens taken away", PERTURBATION_CLAIMS, measure_perturbation, needs=MISSING, on_models=True
)


# ---- c: one token of the encoder decides (section 3, encoder-decoder); checks that any explanation has to pass ----


METHODS = ("relevance", "rollout", "raw_attention", "attention_norms", "gradient_input")

STREAM_CLAIMS = (
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


def measure_streams(setting: Setting) -> Results:
    subjects = train_by_seed(setting, two_stream_model)
    shares = hit_rates_by_method(subjects, METHODS)
    orders = {name: [fmean(deletion_areas(subject, name)) for subject in subjects] for name in METHODS}
    alone = train_by_seed(setting, planted_model)
    alone_shares = hit_rates_by_method(alone, METHODS)
    likeness = redraw_similarities(alone, ("relevance", "rollout"))
    taken = relative_cost(subjects[0], METHODS)
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


STREAM_STUDY = Study("one token of the other stream decides", STREAM_CLAIMS, measure_streams)


# ---- d: what the paper measured on large models and data sets, which are not available here ----


LARGE_CLAIMS = (
    Claim(
        "d1", "Weakly supervised segmentation from DETR is better than by methods made for self-attention alone",
        "average precision on COCO less that of the best such method", "at least", 0.0, where="abstract", bound="ours",
    ),
    Claim(
        "d2", "On LXMERT and VisualBERT relevance orders tokens better than such methods", "area under the perturbation curves less that of the best such method",
        "at least", 0.0, where="abstract", bound="ours",
    ),
)  # fmt: skip

LARGE_STUDY = Study(
    "DETR, LXMERT, VisualBERT",
    LARGE_CLAIMS,
    needs="pretrained DETR, LXMERT and VisualBERT, with COCO and VQA; none is at hand",
)
