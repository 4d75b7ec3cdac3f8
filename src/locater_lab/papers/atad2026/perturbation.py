"""Study b: tokens taken away in the order of the operator's scores, beside maps of attention put together."""

from __future__ import annotations

from locater_lab.engine.claims import Claim
from locater_lab.engine.explanations import GRADIENT_METHODS, MISSING, MODELS, OPERATORS, RIVALS, WORDS, measure_areas
from locater_lab.engine.reproduction import Results, Setting, Study

HERE = "area of the operator (along the target) less that of the best of rollout, raw attention and attention with value norms"

CLAIMS = (
    *(
        Claim(
            key, f"The operator is richer than maps of attention put together, as seen here by its order of tokens in {WORDS[model]}",
            f"{HERE}, {model}", "at least", 0.0, where="abstract", bound="ours",
        )
        for key, model in MODELS.items()
    ),
    Claim(
        "b5", "Weighing it by input and output is better than its norm alone", "area of the collapse with input and output less that of the norm, text",
        "at least", 0.0, by="summary",
    ),
    Claim(
        "b6", "Weighing it by input and output is better than its norm alone, for images",
        "area of the collapse with input and output less that of the norm, images", "at least", 0.0, by="summary",
    ),
    Claim(
        "b7", "It is better than gradient times input", "area of the operator less that of gradient times input, text", "at least", 0.0, by="ours",
    ),
    Claim(
        "b8", "It is better than relevance", "area of the operator less that of relevance, text", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def measure(setting: Setting) -> Results:
    areas = measure_areas(setting, (OPERATORS[0], *RIVALS), (*OPERATORS[1:], *GRADIENT_METHODS))
    measured = {key: areas.less_rivals(model, "operator logit") for key, model in MODELS.items()}
    measured |= {
        "b5": areas.less_rivals("text", "operator input_output", ("operator norm",)),
        "b6": areas.less_rivals("images", "operator input_output", ("operator norm",)),
        "b7": areas.less_rivals("text", "operator logit", ("gradient_input",)),
        "b8": areas.less_rivals("text", "operator logit", ("relevance",)),
    }
    return Results(measured, {"areas": areas.table()})


STUDY = Study(
    "tokens taken away", CLAIMS, measure,
    needs=MISSING,
    on_models=True,
)  # fmt: skip
