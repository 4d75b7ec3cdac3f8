"""Study b: tokens taken away in the order of relevance, in models of self-attention alone (section 4)."""

from __future__ import annotations

from locater_lab.engine.claims import Claim
from locater_lab.engine.explanations import MISSING, MODELS, WORDS, measure_areas
from locater_lab.engine.reproduction import Results, Setting, Study

ADAPTED = ("rollout", "raw_attention")  # of the rivals that the paper names, those that this project has
OTHERS = ("attention_norms", "gradient_input", "integrated_gradients", "operator logit")
HERE = "area of relevance less that of the better of rollout and raw attention"

CLAIMS = (
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


def measure(setting: Setting) -> Results:
    areas = measure_areas(setting, ("relevance", *ADAPTED), OTHERS)
    measured = {key: areas.less_rivals(model, "relevance", ADAPTED) for key, model in MODELS.items()}
    measured["b5"] = areas.less_rivals("text", "relevance", ("integrated_gradients",))
    return Results(measured, {"areas": areas.table()})


STUDY = Study("tokens taken away", CLAIMS, measure, needs=MISSING, on_models=True)
