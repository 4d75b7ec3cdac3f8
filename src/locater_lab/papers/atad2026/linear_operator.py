"""The transformer at one input as one linear operator: what it is exact about (study a), tokens taken away in the order
of its scores (study b), and checks that any explanation has to pass (study c).

    y_i = sum_j T_ij x_j + c_i        attention maps, denominators of norms and activation ratios frozen

T is not the Jacobian J, which differentiates what T freezes.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.load_model import load_model
from locater.errors import LocaterError
from locater.explain import decompose
from locater.explain.linear_operator import FrozenOperator
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.explanation_tests import (
    COSTLY,
    GRADIENT_METHODS,
    MISSING,
    MODELS,
    OPERATORS,
    RIVALS,
    WORDS,
    hit_rates_by_method,
    mean_curves,
    measure_areas,
    planted_model,
    redraw_similarities,
    relative_cost,
    train_by_seed,
)
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import model_folders, read_each
from locater_lab.train import Shape, Transformer

# ---- a: one operator ----


TOKENS = {True: 8, False: 16}
ROUNDING = 1e-6  # transformers computes the RMSNorm of some models in float32 whatever their precision
SMALL = Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48, length=32)

OPERATOR_CLAIMS = (
    Claim(
        "a1", "The whole transformer at one input is a single linear operator of its input",
        "largest |T x + c - y| / |y| over models, in float64", "at most", ROUNDING, where="abstract", bound="ours",
    ),
    Claim(
        "a2", "Biases are part of it: some output comes from no token",
        "|c| / |y| of the trained encoder", "at least", 0.1, by="ours",
    ),
    Claim(
        "a3", "It is not the Jacobian", "least |J - T| / |T| over trained models, last token", "at least", 0.1, by="ours",
    ),
    Claim(
        "a4", "The Jacobian does not give the output back",
        "least |J x - y| / |y| over trained models, last token", "at least", 0.1, by="ours",
    ),
    Claim(
        "a5", "Nothing comes from later tokens of a causal model", "largest entry of T_ij, j > i", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


def small_model() -> Transformer:
    """A causal model of our own with every parameter drawn at random."""
    torch.manual_seed(0)
    return Transformer(SMALL, scale=0.3).double()


def operator_rows(T: FrozenOperator, i: int) -> Tensor:
    """T_ij of one output token, (d, T, d): one backward pass per channel."""
    length, width = T.x.shape
    covectors = T.x.new_zeros(width, length, width)
    covectors[:, i] = torch.eye(width).to(T.x)
    return T.pull_back(covectors)


def jacobian_rows(model: nn.Module, ids: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """The Jacobian of the last stream at token i by the stream that enters the first block, (d, T, d); and that
    stream. The first block's input is made a leaf while the model runs.
    """
    streams: list[Tensor] = []

    def leaf(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        streams.append(x)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    first, last = _first_and_last(model)
    outputs: list[Tensor] = []
    hooks = [
        first.register_forward_pre_hook(leaf, with_kwargs=True),
        last.register_forward_hook(lambda m, a, out: outputs.append(out[0] if isinstance(out, tuple) else out)),
    ]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    y = outputs[-1][0, i]
    rows = [torch.autograd.grad(y[c], streams[0], retain_graph=True)[0][0] for c in range(len(y))]
    return torch.stack(rows), streams[0].detach()[0]


def _first_and_last(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The first block, and the last module whose output is the last stream: the final norm, or the last block."""
    inner: Any = getattr(model, "model", model)
    if hasattr(inner, "norm"):
        return inner.layers[0], inner.norm
    layers = getattr(getattr(inner, "encoder", None), "layer", None)
    if layers is None:
        raise LocaterError(f"{type(model).__name__}: where its stream begins and ends is not known to this study")
    return layers[0], layers[-1]


def row_of(name: str, model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """What is measured of one model, all in float64."""
    model = model.double()
    paths = decompose(model, ids, mlp="linear")
    T, at = FrozenOperator(paths), ids.shape[1] - 1
    y, c = paths.output[0], T.constants()
    block, (J, x) = operator_rows(T, at), jacobian_rows(model, ids, at)
    return {
        "model": name,
        "gap": paths.gap,
        "constant": float(c.norm() / y.norm()),
        "jacobian": float((J - block).norm() / block.norm()),
        "jacobian_output": float((torch.einsum("ctd,td->c", J, x) - y[at]).norm() / y[at].norm()),
    }


def from_later(ids: Tensor) -> float:
    """The largest entry of T_0j, j > 0, in the causal model of our own."""
    T = FrozenOperator(decompose(small_model(), ids, mlp="linear"))
    return float(operator_rows(T, 0)[:, 1:].abs().max())


def measure_operator(setting: Setting) -> Results:
    ids = torch.randint(5, 60, (1, TOKENS[setting.quick]), generator=torch.Generator().manual_seed(0))
    by_name, left_out = read_each(
        model_folders(setting.models).items(), lambda name, folder: row_of(name, load_model(str(folder)), ids)
    )
    trained = list(by_name.values())
    rows = [row_of("random, 3 layers", small_model(), ids), *trained]
    encoder = next((row for row in trained if "MiniLM" in row["model"]), None)
    of = f"none: {len(rows)} models"
    measured = {
        "a1": Measurement(max(row["gap"] for row in rows), 0.0, of),
        "a2": None if encoder is None else Measurement(encoder["constant"], 0.0, "none: one model, one input"),
        "a3": Measurement(min(row["jacobian"] for row in trained), 0.0, "none: one input a model"),
        "a4": Measurement(min(row["jacobian_output"] for row in trained), 0.0, "none: one input a model"),
        "a5": Measurement(from_later(ids), 0.0, "none: one model"),
    }
    return Results(measured, {"operators": {"rows": rows, "tokens": TOKENS[setting.quick], "left_out": left_out}})


OPERATOR_STUDY = Study("one operator", OPERATOR_CLAIMS, measure_operator, on_models=True)


# ---- b: tokens taken away ----


HERE = "area of the operator (along the target) less that of the best of rollout, raw attention and attention with value norms"

PERTURBATION_CLAIMS = (
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


def measure_perturbation(setting: Setting) -> Results:
    areas = measure_areas(setting, (OPERATORS[0], *RIVALS), (*OPERATORS[1:], *GRADIENT_METHODS))
    measured = {key: areas.gain_over_rivals(model, "operator logit") for key, model in MODELS.items()}
    measured |= {
        "b5": areas.gain_over_rivals("text", "operator input_output", ("operator norm",)),
        "b6": areas.gain_over_rivals("images", "operator input_output", ("operator norm",)),
        "b7": areas.gain_over_rivals("text", "operator logit", ("gradient_input",)),
        "b8": areas.gain_over_rivals("text", "operator logit", ("relevance",)),
    }
    return Results(measured, {"areas": areas.table()})


PERTURBATION_STUDY = Study(
    "tokens taken away", PERTURBATION_CLAIMS, measure_perturbation,
    needs=MISSING,
    on_models=True,
)  # fmt: skip


# ---- c: checks with a known answer, and what scores cost ----


CHECKED_METHODS = (
    "operator logit",
    "operator input",
    "operator norm",
    "paths",
    "rollout",
    "raw_attention",
    "gradient_input",
)

SANITY_CLAIMS = (
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


def measure_sanity(setting: Setting) -> Results:
    subjects = train_by_seed(setting, planted_model)
    shares = hit_rates_by_method(subjects, CHECKED_METHODS)
    likeness = redraw_similarities(subjects, ("operator logit", "rollout"))
    taken = relative_cost(subjects[0], CHECKED_METHODS)
    measured = {
        "c1": by_seed(shares["operator logit"]),
        "c2": by_seed(shares["operator norm"]),
        "c3": by_seed([values[-1] for values in likeness["operator logit"]]),
        "c4": by_seed([values[-1] for values in likeness["rollout"]]),
        "c5": Measurement(taken["operator logit"], 0.0, "none: the median of five turns on this machine"),
    }
    rows = [{"method": name, "found": fmean(shares[name]), "cost": taken[name]} for name in CHECKED_METHODS]
    return Results(measured, {"known": {"rows": rows, "redrawn": mean_curves(likeness)}})


SANITY_STUDY = Study("checks with a known answer", SANITY_CLAIMS, measure_sanity)
