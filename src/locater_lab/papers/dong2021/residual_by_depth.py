"""How alike tokens are at each depth, with attention skips and MLPs and without: at initialisation, and in trained
models. Study c.

Curves of the paper were read off its figures. Each is of one draw of weights: where our draws differ from each other,
so may theirs.

**Encoders.** BERT, ALBERT and XLNet at initialisation, available trained models, and what is cut out of both; residuals
of their hidden states.

Models at initialisation have the published configurations and random weights, so what tokens mean does not matter, only
which of them are equal: words are numbered as they appear. The cuts are the paper's:

    no skip    the skip around attention goes; the MLP keeps its own ("SAN+MLP")
    no MLP     BERT and XLNet lose the MLP with its skip and norm ("SAN+skip"). ALBERT loses the two weight matrices alone and keeps
               activation, skip and norm, LN(x + act(x)); "no MLP, branch out" is LN(x)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.load_model import load_model
from locater.control.surgery import Surgery
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.families.registry import block_of
from locater.inputs.text import batches
from locater.measures import rank_residual
from locater_lab.engine.claims import Claim, Measurement, by_seed, half_range
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import model_folders, read_each

# ---- models, and what is cut out of them ----


LENGTH = 128  # tokens of a sample
TEXT_CHARACTERS = 400_000  # characters that samples are taken from
BRANCH_OUT = "no MLP, branch out"  # ALBERT's, without what the paper left in
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no MLP": {"no_mlp": "sublayer"},
    "no skip": {"no_skip": True},
    "neither": {"no_skip": True, "no_mlp": "sublayer"},
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", dict(vocab_size=28996)),
    "ALBERT": ("Albert", dict(
        vocab_size=30000, embedding_size=128, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        hidden_act="gelu_new", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )),
    "XLNet": ("XLNet", dict(vocab_size=32000, d_model=768, n_layer=12, n_head=12, d_inner=3072)),
}  # fmt: skip


def initial_model(name: str, seed: int, **changes: Any) -> nn.Module:
    """A model of the published configuration with random weights; nothing is downloaded."""
    try:
        import transformers
    except ImportError:
        raise LocaterError(
            "models at initialisation need the transformers package: pip install 'locater[hf]'"
        ) from None
    kind, settings = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**settings, **changes})
    pooler = {} if kind == "XLNet" else {"add_pooling_layer": False}
    model: nn.Module = getattr(transformers, f"{kind}Model")(config, **pooler)
    return model.eval().requires_grad_(False)


def word_rows(text: str, samples: int, length: int = LENGTH) -> Tensor:
    """Samples of `length` tokens from evenly spaced places of the text: words and marks by number, between two special
    tokens.

    >>> word_rows("a b a c, a b", 2, length=5).tolist()
    [[0, 2, 3, 2, 1], [0, 4, 2, 3, 1]]
    """
    all_words, size, numbers = split_words(text), length - 2, dict[str, int]()
    if len(all_words) < size:
        raise LocaterError(f"{len(all_words)} words of text for samples of {size}")
    starts = [i * (len(all_words) - size) // max(1, samples - 1) for i in range(samples)]
    return torch.tensor(
        [[0, *(2 + numbers.setdefault(w, len(numbers)) for w in all_words[at : at + size]), 1] for at in starts]
    )


def split_words(text: str) -> list[str]:
    """Words and punctuation marks, in small letters."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


@contextmanager
def cut_model(model: nn.Module, variant: str) -> Iterator[None]:
    """The model as a variant while the block runs. ALBERT's MLP is left as the paper left it, but for BRANCH_OUT."""
    settings = VARIANTS["no MLP"] if variant == BRANCH_OUT else VARIANTS[variant]
    albert = getattr(getattr(model, "config", None), "model_type", "") == "albert"
    if albert and "no_mlp" in settings:
        settings = (
            {**settings, "no_mlp": True}
            if variant == BRANCH_OUT
            else {k: v for k, v in settings.items() if k != "no_mlp"}
        )
    emptied = (
        [m for m in model.modules() if hasattr(m, "ffn_output")] if albert and variant in ("no MLP", "neither") else []
    )
    branches = [(m, m.ffn, m.ffn_output) for m in emptied]
    control = Surgery(**settings).attach(model) if settings else None
    try:
        for m in emptied:
            m.ffn, m.ffn_output = nn.Identity(), nn.Identity()
        yield
    finally:
        for m, ffn, output in branches:
            m.ffn, m.ffn_output = ffn, output
        if control is not None:
            control.detach()


@torch.no_grad()
def residuals_by_sample(model: nn.Module, inputs: list[dict[str, Tensor]]) -> Tensor:
    """Relative residual of every sample in front of the first layer and after each: (samples, states)."""
    device = next(model.parameters()).device
    by_batch = []
    for batch in inputs:
        states = model(**{k: x.to(device) for k, x in batch.items()}, output_hidden_states=True).hidden_states
        by_batch.append(torch.stack([rank_residual(x) for x in states], 1).cpu())
    return torch.cat(by_batch)


def variants_of(model: nn.Module, inputs: list[dict[str, Tensor]], more: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Residuals of every variant: (samples, states) each."""
    by_variant = {}
    for variant in (*VARIANTS, *more):
        with cut_model(model, variant):
            by_variant[variant] = residuals_by_sample(model, inputs)
    return by_variant


def trained_model(folder: Path) -> Any:
    """A trained model that Surgery knows its way around in."""
    model = load_model(str(folder)).requires_grad_(False)
    kind = model.config.model_type
    if block_of(model) is None:
        raise LocaterError(f"model type {kind}: Surgery does not know its blocks")
    return model


def is_causal(model: nn.Module) -> bool:
    """Whether its attention layers look back only."""
    return all(layer.causal for layer in attention_layers(model))


# ---- c: residual against depth ----


SAMPLES, DRAWS = {True: 2, False: 32}, {True: 4, False: 8}
LAYERS = 12
COLLAPSED = 0.05  # a residual below this counts as collapse
Curves = dict[str, dict[str, Tensor]]  # by model and variant: (draws, states), mean over samples


def _stated_curve(*values: float) -> dict[int, float]:
    """By layer; zero from where values end."""
    return dict(enumerate((*values, *[0.0] * (LAYERS + 1 - len(values)))))


STATED: dict[str, dict[str, dict[int, float]]] = {  # by model and variant, the mean residual after so many layers
    "BERT": {
        "full": _stated_curve(.597, .563, .535, .565, .537, .529, .493, .464, .439, .414, .406, .365, .345),
        "no MLP": _stated_curve(.607, .565, .559, .565, .562, .552, .529, .503, .496, .487, .472, .463, .449),
        "no skip": _stated_curve(.597, .017), "neither": _stated_curve(.612, .018),
    },
    "ALBERT": {
        "full": _stated_curve(.626, .670, .610, .561, .525, .463, .418, .385, .359, .337, .318, .289, .260),
        "no MLP": _stated_curve(.642, .642, .613, .546, .493, .449, .412, .379, .348, .321, .296, .275, .255),
        "no skip": _stated_curve(.566, .001), "neither": _stated_curve(.669, .002),
    },
    "XLNet": {
        "full": _stated_curve(.992, .972, .990, .977, .958, .891, .844, .860, .849, .822, .832, .830, .738),
        "no MLP": {0: .998, 12: .927}, "no skip": _stated_curve(1.02, .002), "neither": _stated_curve(1.0, .001),
    },
}  # fmt: skip
FIGURE = "figure of residuals by layer"


def _end_claim(number: int, model: str, variant: str) -> Claim:
    words = {"full": "the whole of", "no MLP": "with skips and without MLPs,"}
    return Claim(
        f"c{number}", f"At initialisation, {words[variant]} {model} keeps tokens apart at depth 12",
        f"relative residual after layer 12, {model}, {variant}", "about", STATED[model][variant][LAYERS], 0.1, where=FIGURE,
    )  # fmt: skip


DEPTH_CLAIMS = (
    *(
        Claim(
            f"c{number}", f"Tokens of {model} at initialisation are as alike at every depth as the figure shows, in all four variants",
            "largest distance of the mean relative residual from the figure's, layers 0 to 12, four variants", "at most", 0.1,
            where=FIGURE, bound="ours",
        )
        for number, model in enumerate(STATED, 1)
    ),
    Claim(
        "c4", "Without the skip around attention, two layers make all tokens equal",
        "relative residual after layer 2 at initialisation, largest of three models, MLPs in or out", "at most", 0.001,
        where=FIGURE, bound="ours",
    ),
    Claim(
        "c5", "Without skip and MLP one layer of BERT does nearly all of it",
        "relative residual after layer 1 at initialisation, BERT, neither skip nor MLP", "about", 0.018, 0.01, where=FIGURE,
    ),
    *(_end_claim(number, model, "full") for number, model in enumerate(STATED, 6)),
    *(_end_claim(number, model, "no MLP") for number, model in enumerate(STATED, 9)),
    Claim(
        "c12", "Skips keep the residual above a quarter through twelve layers at initialisation",
        "relative residual after layer 12 with skips, least of three models, MLPs in or out", "at least", 0.25, by="ours",
    ),
    Claim(
        "c13", "Models with skips are above those without at every depth",
        "least difference of relative residuals, with skip less without, layers 1 to 12 of three models", "at least", 0.1,
        where=FIGURE, bound="ours",
    ),
    Claim(
        "c14", "MLPs without skips do not slow the collapse at initialisation, against the second part of c21",
        "relative residual with MLPs less without them, no skips, largest over layers 1 to 12 of three models", "at most", 0.01,
        by="ours",
    ),
    Claim(
        "c15", "With skips, MLPs make tokens of BERT and XLNet more alike by layer 12",
        "relative residual after layer 12, full less no MLP, larger of BERT and XLNet", "at most", 0.0, by="ours",
    ),
    Claim(
        "c16", "What the paper left of ALBERT's MLP, activation and skip, is part of what keeps tokens apart",
        "relative residual after layer 12, as published less with the whole branch out", "at least", 0.1, by="ours",
    ),
    Claim(
        "c17", "Trained encoders collapse too without skips",
        "relative residual at the end without skips, largest of trained models without a mask, MLPs in or out", "at most", COLLAPSED,
        where=FIGURE, bound="ours",
    ),
    Claim(
        "c18", f"Trained encoders without skips take 3 to 7 layers to fall under {COLLAPSED:g}, not one or two",
        f"first layer under {COLLAPSED:g}, mean over trained models without a mask and both no-skip variants", "about", 5.0, 2.0,
        where=FIGURE, bound="ours",
    ),
    Claim(
        "c19", "Trained encoders with skips and MLPs do not collapse",
        "relative residual at the end of the whole model, least of trained models without a mask", "at least", 0.25,
        where=FIGURE, bound="ours",
    ),
    Claim(
        "c20", "A causal mask stops the collapse of trained models without skips: it is a result on attention in both directions",
        "relative residual at the end without skips, least of trained causal models, MLPs in or out", "at least", COLLAPSED, by="ours",
    ),
    Claim(
        "c21", "Skip connections alone and MLPs alone stop the output from degeneration at initialisation, which is one reading of the abstract",
        "relative residual after layer 12 with one of the two: the lesser, largest of three models", "at least", COLLAPSED,
        by="ours",
    ),
)  # fmt: skip


# --- at initialisation ---


def initial_curves(setting: Setting) -> Curves:
    """Every model, drawn several times, on the same samples."""
    device = "cuda" if torch.cuda.is_available() and not setting.quick else "cpu"
    rows = word_rows(setting.text[:TEXT_CHARACTERS], SAMPLES[setting.quick])
    inputs = [{"input_ids": part} for part in rows.split(4)]
    curves: dict[str, dict[str, list[Tensor]]] = {name: {} for name in CONFIGS}
    for name, seed in setting.each([(name, seed) for name in CONFIGS for seed in range(DRAWS[setting.quick])]):
        model = initial_model(name, seed).to(device)
        for variant, curve in variants_of(model, inputs, (BRANCH_OUT,) if name == "ALBERT" else ()).items():
            curves[name].setdefault(variant, []).append(curve.mean(0))
    return {name: {v: torch.stack(draws) for v, draws in variants.items()} for name, variants in curves.items()}


def measure_initial(curves: Curves) -> dict[str, Measurement]:
    """Claims c1 to c16, and c21."""
    kept, lost = ("full", "no MLP"), ("no skip", "neither")
    later, ends = range(1, LAYERS + 1), {m: {v: x[:, LAYERS] for v, x in own.items()} for m, own in curves.items()}
    gaps = {
        f"{m}, {a} less {b}, layer {t}": (curves[m][a] - curves[m][b])[:, t]
        for m in curves for a in kept for b in lost for t in later
    }  # fmt: skip
    slower = {f"{m}, layer {t}": (curves[m]["no skip"] - curves[m]["neither"])[:, t] for m in curves for t in later}
    either = {m: torch.minimum(end["no MLP"], end["no skip"]) for m, end in ends.items()}
    return {
        **{f"c{i}": _farthest(curves[m], STATED[m]) for i, m in enumerate(STATED, 1)},
        "c4": _extreme({f"{m}, {v}": curves[m][v][:, 2] for m in curves for v in lost}, 1),
        "c5": _over_draws(curves["BERT"]["neither"][:, 1]),
        **{f"c{i}": _over_draws(ends[m]["full"]) for i, m in enumerate(STATED, 6)},
        **{f"c{i}": _over_draws(ends[m]["no MLP"]) for i, m in enumerate(STATED, 9)},
        "c12": _extreme({f"{m}, {v}": ends[m][v] for m in curves for v in kept}, -1),
        "c13": _extreme(gaps, -1),
        "c14": _extreme(slower, 1),
        "c15": _extreme({m: ends[m]["full"] - ends[m]["no MLP"] for m in ("BERT", "XLNet")}, 1),
        "c16": _over_draws(ends["ALBERT"]["no MLP"] - ends["ALBERT"][BRANCH_OUT]),
        "c21": _extreme(either, 1),
    }


def _over_draws(values: Tensor, numbers: Mapping[str, Any] | None = None) -> Measurement:
    return by_seed(values.tolist(), numbers, "draws of weights")


def _extreme(quantities: Mapping[str, Tensor], sign: int) -> Measurement:
    """The largest (sign 1) or the least (-1) of several quantities (draws,), and which it was."""
    where = max(quantities, key=lambda name: sign * float(quantities[name].mean()))
    return _over_draws(quantities[where], {"where": where})


def _farthest(curves: Mapping[str, Tensor], stated: Mapping[str, Mapping[int, float]]) -> Measurement:
    """How far the mean curve is from the figure's where it is farthest."""
    cells = [(variant, layer, value) for variant, curve in stated.items() for layer, value in curve.items()]
    variant, layer, value = max(cells, key=lambda c: abs(float(curves[c[0]][:, c[1]].mean()) - c[2]))
    distance = curves[variant][:, layer] - value
    sign = 1.0 if float(distance.mean()) >= 0 else -1.0
    return _over_draws(sign * distance, {"variant": variant, "layer": layer, "stated": value})


def start_table(moments: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Mean and standard deviation by model and variant, and what the paper has beside them."""
    none: dict[int, float] = {}
    return {
        m: {v: {**x, "stated": [STATED[m].get(v, none).get(t) for t in range(LAYERS + 1)]} for v, x in variants.items()}
        for m, variants in moments.items()
    }


# --- trained models ---


def trained_curves(setting: Setting) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Curves of the available trained models on two halves of the text, and what was left out, with the reason."""
    text, samples = setting.text[:TEXT_CHARACTERS], 2 * SAMPLES[setting.quick]
    entries, left_out = read_each(
        model_folders(setting.models).items(), lambda name, folder: _trained_entry(name, folder, text, samples)
    )
    return list(entries.values()), left_out


def _trained_entry(name: str, folder: Path, text: str, samples: int) -> dict[str, Any]:
    model = trained_model(folder)
    inputs = batches(model, text, length=LENGTH, tokens=LENGTH * samples, batch=4)
    residuals = variants_of(model, inputs)
    halves = {variant: [part.mean(0).tolist() for part in rows.chunk(2)] for variant, rows in residuals.items()}
    return {"model": name, "causal": is_causal(model), "curves": halves}


def measure_trained(entries: list[dict[str, Any]]) -> dict[str, Measurement]:
    """Claims c17 to c20, each half of the text by itself."""
    both, causal = ([entry for entry in entries if entry["causal"] is mask] for mask in (False, True))
    lost = ("no skip", "neither")

    def ends(models: list[dict[str, Any]], variants: tuple[str, ...], half: int) -> list[float]:
        return [entry["curves"][v][half][-1] for entry in models for v in variants]

    measured = {}
    if both:
        measured["c17"] = _over_halves([max(ends(both, lost, half)) for half in range(2)])
        first = [[first_below(entry["curves"][v][half]) for entry in both for v in lost] for half in range(2)]
        measured["c18"] = _over_halves([sum(layers) / len(layers) for layers in first])
        measured["c19"] = _over_halves([min(ends(both, ("full",), half)) for half in range(2)])
    if causal:
        measured["c20"] = _over_halves([min(ends(causal, lost, half)) for half in range(2)])
    return measured


def first_below(curve: list[float], level: float = COLLAPSED) -> int:
    """The first layer whose residual is under the level; one more than there are where none is.

    >>> first_below([0.9, 0.3, 0.01, 0.2])
    2
    """
    return next((layer for layer, value in enumerate(curve) if value < level), len(curve))


def _over_halves(values: list[float]) -> Measurement:
    return half_range(values, "half the difference of two halves of the samples")


def trained_table(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the mean of both halves."""
    return [
        {**e, "means": {v: [(a + b) / 2 for a, b in zip(*x, strict=True)] for v, x in e["curves"].items()}}
        for e in entries
    ]


def measure_depth(setting: Setting) -> Results:
    """All of it."""
    curves = initial_curves(setting)
    entries, left_out = trained_curves(setting)
    moments = {
        m: {v: {"mean": x.mean(0).tolist(), "sd": x.std(0).tolist()} for v, x in variants.items()}
        for m, variants in curves.items()
    }
    tables = {
        "initial_encoders": start_table(moments),
        "initial_settings": {"samples": SAMPLES[setting.quick], "draws": DRAWS[setting.quick], "length": LENGTH},
        "trained_encoders": trained_table(entries),
        "trained_encoders_left_out": left_out,
    }
    return Results({**measure_initial(curves), **measure_trained(entries)}, tables)


DEPTH_STUDY = Study(
    "residual against depth",
    DEPTH_CLAIMS,
    measure_depth,
    needs="a trained model of the kind that the claim names",
    on_models=True,
)
