"""What the paper states of residuals against depth: the curves of its figures, and the claims made of them.

Curves of the paper were read off its figures. Each is of one draw of weights: where our draws differ from each other,
so may theirs.
"""

from __future__ import annotations

from locater_papers.engine.claims import Claim

LAYERS = 12
COLLAPSED = 0.05  # a residual below this counts as collapse


def _to_zero(*head: float) -> dict[int, float]:
    return dict(enumerate((*head, *[0.0] * (LAYERS + 1 - len(head)))))


STATED: dict[str, dict[str, dict[int, float]]] = {  # by model and variant, the mean residual after so many layers
    "BERT": {
        "full": dict(
            enumerate((0.597, 0.563, 0.535, 0.565, 0.537, 0.529, 0.493, 0.464, 0.439, 0.414, 0.406, 0.365, 0.345))
        ),
        "no MLP": dict(
            enumerate((0.607, 0.565, 0.559, 0.565, 0.562, 0.552, 0.529, 0.503, 0.496, 0.487, 0.472, 0.463, 0.449))
        ),
        "no skip": _to_zero(0.597, 0.017),
        "neither": _to_zero(0.612, 0.018),
    },
    "ALBERT": {
        "full": dict(
            enumerate((0.626, 0.670, 0.610, 0.561, 0.525, 0.463, 0.418, 0.385, 0.359, 0.337, 0.318, 0.289, 0.260))
        ),
        "no MLP": dict(
            enumerate((0.642, 0.642, 0.613, 0.546, 0.493, 0.449, 0.412, 0.379, 0.348, 0.321, 0.296, 0.275, 0.255))
        ),
        "no skip": _to_zero(0.566, 0.001),
        "neither": _to_zero(0.669, 0.002),
    },
    "XLNet": {
        "full": dict(
            enumerate((0.992, 0.972, 0.990, 0.977, 0.958, 0.891, 0.844, 0.860, 0.849, 0.822, 0.832, 0.830, 0.738))
        ),
        "no MLP": {0: 0.998, 12: 0.927},
        "no skip": _to_zero(1.02, 0.002),
        "neither": _to_zero(1.0, 0.001),
    },
}


def _end(number: int, model: str, variant: str) -> Claim:
    words = {"full": "the whole of", "no MLP": "with skips and without MLPs,"}
    return Claim(
        f"c{number}", f"At initialisation, {words[variant]} {model} keeps tokens apart at depth 12",
        f"relative residual after layer 12, {model}, {variant}", "about", STATED[model][variant][LAYERS], 0.1,
    )  # fmt: skip


CLAIMS = (
    *(
        Claim(
            f"c{number}", f"Tokens of {model} at initialisation are as alike at every depth as the figure shows, in all four variants",
            "largest distance of the mean relative residual from the figure's, layers 0 to 12, four variants", "at most", 0.1,
        )
        for number, model in enumerate(STATED, 1)
    ),
    Claim(
        "c4", "Without the skip around attention, two layers make all tokens equal",
        "relative residual after layer 2 at initialisation, largest of three models, MLPs in or out", "at most", 0.001,
    ),
    Claim(
        "c5", "Without skip and MLP one layer of BERT does nearly all of it",
        "relative residual after layer 1 at initialisation, BERT, neither skip nor MLP", "about", 0.018, 0.01,
    ),
    *(_end(number, model, "full") for number, model in enumerate(STATED, 6)),
    *(_end(number, model, "no MLP") for number, model in enumerate(STATED, 9)),
    Claim(
        "c12", "Skips keep the residual above a quarter through twelve layers at initialisation",
        "relative residual after layer 12 with skips, least of three models, MLPs in or out", "at least", 0.25, by="ours",
    ),
    Claim(
        "c13", "Models with skips are above those without at every depth",
        "least difference of relative residuals, with skip less without, layers 1 to 12 of three models", "at least", 0.1,
    ),
    Claim(
        "c14", "MLPs without skips do not slow the collapse at initialisation",
        "relative residual with MLPs less without them, no skips, largest over layers 1 to 12 of three models", "at most", 0.01,
    ),
    Claim(
        "c15", "With skips, MLPs make tokens of BERT and XLNet more alike by layer 12",
        "relative residual after layer 12, full less no MLP, larger of BERT and XLNet", "at most", 0.0,
    ),
    Claim(
        "c16", "What the paper left of ALBERT's MLP, activation and skip, is part of what keeps tokens apart",
        "relative residual after layer 12, as published less with the whole branch out", "at least", 0.1, by="ours",
    ),
    Claim(
        "c17", "Trained encoders collapse too without skips",
        "relative residual at the end without skips, largest of trained models without a mask, MLPs in or out", "at most", COLLAPSED,
    ),
    Claim(
        "c18", f"Trained encoders without skips take 3 to 7 layers to fall under {COLLAPSED:g}, not one or two",
        f"first layer under {COLLAPSED:g}, mean over trained models without a mask and both no-skip variants", "about", 5.0, 2.0,
    ),
    Claim(
        "c19", "Trained encoders with skips and MLPs do not collapse",
        "relative residual at the end of the whole model, least of trained models without a mask", "at least", 0.25,
    ),
    Claim(
        "c20", "A causal mask stops the collapse of trained models without skips: it is a result on attention in both directions",
        "relative residual at the end without skips, least of trained causal models, MLPs in or out", "at least", COLLAPSED, by="ours",
    ),
)  # fmt: skip
