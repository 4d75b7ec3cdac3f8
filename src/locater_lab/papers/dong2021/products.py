"""Products of attention maps along paths: by how many decades each more layer takes them towards rank one, before and
after training. Study d.

As in the paper: k distinct layers in their order, one head drawn in each, and P = A_1 A_2 ... A_k of one sample. What
is left of P besides the closest matrix of rank one, over P, in the composite norm. Products are formed in float64,
where the paper's float32 ends near 1e-6. That is attention alone: values and skips play no part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.inputs.text import batches
from locater.measures import composite_norm, token_residual
from locater_lab.engine.claims import Claim, Measurement, by_seed, half_range
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import model_folders, read_each
from locater_lab.papers.dong2021.encoders import LENGTH, TEXT, initial, is_causal, trained_model, word_rows

REPEATS, DRAWS, SAMPLES = {True: 24, False: 100}, {True: 2, False: 4}, {True: 2, False: 8}
SIX = 6  # factors at which float32 and float64 are compared
FLOOR = 1e-12  # of float64 products: medians under it do not enter slopes
Medians = dict[int, float]  # by number of factors
FIGURE = "figure of products of attention maps"
STATED: dict[str, Medians] = {
    "initial": {1: 1.6e-1, 2: 3e-3, 3: 6e-5},  # then a plateau near 2e-6
    "trained": dict(enumerate((4e-1, 2e-1, 9e-2, 4e-2, 1.7e-2, 8e-3, 5e-3, 2e-3, 5e-4, 3e-4, 1.3e-4, 6e-5), 1)),
}  # medians of the paper's figure

CLAIMS = (
    Claim(
        "d1", "At initialisation every more attention map takes the product 1.5 to 2 decades nearer to rank one",
        "decades per layer of the median relative residual, BERT base at initialisation", "about", 1.75, 0.25, where=FIGURE,
    ),
    Claim(
        "d2", "A single attention map is far from rank one even at initialisation",
        "relative residual of one map, median, BERT base at initialisation", "about", 0.16, 0.05, where=FIGURE,
    ),
    Claim(
        "d3", "Trained attention mixes far more slowly: 0.3 to 0.4 decades per layer in BERT",
        "decades per layer of the median relative residual, mean of trained models without a mask", "about", 0.35, 0.15,
        where=FIGURE,
    ),
    Claim(
        "d4", "Training slows mixing by more than a decade per layer",
        "decades per layer, the same shapes at initialisation less trained, least of the models without a mask", "at least", 1.0,
        where=FIGURE, bound="ours",
    ),
    Claim(
        "d5", "The plateau of the figure from four factors on is float32, not attention",
        f"log10 of the median relative residual of {SIX} maps in float64, BERT base at initialisation", "at most", -8.0, by="ours",
    ),
    Claim(
        "d6", "Under a causal mask maps mix slowly from the start: no decade per layer at initialisation",
        "decades per layer of the median relative residual, largest of the causal shapes at initialisation", "at most", 0.5, by="ours",
    ),
)  # fmt: skip


# --- products ---


@torch.no_grad()
def attention_maps(model: Any, ids: Tensor) -> Tensor:
    """(layers, samples, heads, tokens, tokens), float32 as the model has them."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that returns them
    try:
        output = model(input_ids=ids.to(next(model.parameters()).device), output_attentions=True)
    finally:
        model.set_attn_implementation(implementation)
    maps = getattr(output, "attentions", None)
    if not maps or any(x is None for x in maps):
        raise LocaterError(f"{type(model).__name__} returns no attention maps")
    return torch.stack(list(maps)).cpu()


def chain(maps: Tensor, factors: int, repeats: int, seed: int = 0) -> Tensor:
    """Products of `factors` maps each: sample, layers and heads drawn evenly, layers in their order. (repeats, tokens,
    tokens).

    >>> eye = torch.eye(2).expand(3, 1, 2, 2, 2)
    >>> chain(eye, 3, 1).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    layers, samples, heads = maps.shape[:3]
    draws = random.Random(seed)
    products = []
    for _ in range(repeats):
        sample, product = draws.randrange(samples), torch.eye(maps.shape[-1], dtype=maps.dtype)
        for layer in sorted(draws.sample(range(layers), factors)):
            product = product @ maps[layer, sample, draws.randrange(heads)]
        products.append(product)
    return torch.stack(products)


def off_rank_one(products: Tensor) -> Tensor:
    """||P - its closest matrix of rank one|| over ||P||, composite norm."""
    return composite_norm(token_residual(products, centre="svd")) / composite_norm(products)


def off_rank_one_single(products: Tensor) -> Tensor:
    """The same with everything in float32, as the paper had it: this ends where float32 does."""
    U, s, Vh = torch.linalg.svd(products.float(), full_matrices=False)
    rest = products.float() - U[..., :, :1] * s[..., None, :1] * Vh[..., :1, :]
    return composite_norm(rest) / composite_norm(products)


def medians(maps: Tensor, repeats: int, seed: int = 0) -> Medians:
    """Median relative residual by number of factors, products in the precision of `maps`."""
    return {k: float(off_rank_one(chain(maps, k, repeats, seed)).median()) for k in range(1, len(maps) + 1)}


def decades(by_factors: Mapping[int, float], floor: float = FLOOR) -> float:
    """Slope of -log10 over the number of factors, by least squares, as far as medians are above the floor.

    >>> round(decades({1: 1e-1, 2: 1e-3, 3: 1e-5, 4: 1e-16}), 6)
    2.0
    """
    points = [(k, -math.log10(x)) for k, x in by_factors.items() if x > floor]
    if len(points) < 2:
        return math.nan
    middle = sum(k for k, _ in points) / len(points)
    return sum((k - middle) * y for k, y in points) / sum((k - middle) ** 2 for k, _ in points)


# --- models ---


def bert(setting: Setting, seed: int) -> dict[str, Any]:
    """BERT base at one draw of weights."""
    rows = word_rows(setting.text[:TEXT], SAMPLES[setting.quick])
    maps = attention_maps(initial("BERT", seed), rows)
    single = off_rank_one_single(chain(maps, SIX, REPEATS[setting.quick], seed))
    return {"medians": medians(maps.double(), REPEATS[setting.quick], seed), "float32": float(single.median())}


def pair(name: str, folder: Path, setting: Setting) -> dict[str, Any]:
    """A trained model on two halves of its samples, and its shape at initialisation, drawn twice."""
    from transformers import AutoModel

    model, tokens = trained_model(folder), 2 * LENGTH * SAMPLES[setting.quick]
    rows = batches(model, setting.text[:TEXT], length=LENGTH, tokens=tokens, batch=1024)[0]["input_ids"]
    halves = rows.chunk(2)
    entry: dict[str, Any] = {"model": name, "causal": is_causal(model)}
    entry["trained"] = [_medians(model, half, setting, number) for number, half in enumerate(halves)]
    starts = []
    for seed, half in enumerate(halves):
        torch.manual_seed(seed)
        starts.append(_medians(AutoModel.from_config(model.config).eval(), half, setting, seed))
    return {**entry, "initial": starts}


def _medians(model: nn.Module, rows: Tensor, setting: Setting, seed: int) -> Medians:
    return medians(attention_maps(model, rows).double(), REPEATS[setting.quick], seed)


# --- the study ---


def measure(setting: Setting) -> Results:
    """BERT base at several draws, then every trained model beside its own start."""
    draws = [bert(setting, seed) for seed in range(DRAWS[setting.quick])]
    by_name, left_out = read_each(
        model_folders(setting.models).items(), lambda name, folder: pair(name, folder, setting)
    )
    pairs = list(by_name.values())
    return Results(measures(draws, pairs), {"map_products": products_table(draws, pairs, left_out)})


def measures(draws: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]) -> dict[str, Measurement]:
    """Claims on BERT by its draws of weights, on trained models by halves of the text."""
    of_draws = "draws of weights"
    of_halves = "half the difference of two halves of the samples, each with its draw of initial weights"
    measured = {
        "d1": by_seed([decades(draw["medians"]) for draw in draws], of=of_draws),
        "d2": by_seed([draw["medians"][1] for draw in draws], of=of_draws),
        "d5": by_seed(
            [math.log10(draw["medians"][SIX]) for draw in draws], {"float32": [d["float32"] for d in draws]}, of_draws
        ),
    }
    both, causal = ([_slopes(e) for e in pairs if e["causal"] is mask] for mask in (False, True))
    if both:
        mean = [sum(s["trained"][half] for s in both) / len(both) for half in range(2)]
        slowed = [min(s["initial"][half] - s["trained"][half] for s in both) for half in range(2)]
        measured |= {"d3": half_range(mean, of_halves), "d4": half_range(slowed, of_halves)}
    if causal:
        measured["d6"] = half_range([max(s["initial"][half] for s in causal) for half in range(2)], of_halves)
    return measured


def _slopes(entry: Mapping[str, Any]) -> dict[str, list[float]]:
    return {state: [decades(by_factors) for by_factors in entry[state]] for state in ("initial", "trained")}


def products_table(
    draws: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Points (factors, log10 of the median) and decades per layer, of BERT, of the paper's figure, of trained models."""
    models = [
        {
            "model": e["model"],
            "mask": "causal" if e["causal"] else "none",
            "points": {state: _points(e[state]) for state in ("initial", "trained")},
            "decades": _slopes(e),
        }
        for e in pairs
    ]
    return {
        "bert": {"points": _points([d["medians"] for d in draws]), "decades": [decades(d["medians"]) for d in draws]},
        "paper": {state: _points([by_factors]) for state, by_factors in STATED.items()},
        "models": models,
        "float32": {"factors": SIX, "median": median(d["float32"] for d in draws)},
        "medians": [dict(d["medians"]) for d in draws],
        "left_out": dict(left_out),
    }


def _points(draws: Sequence[Mapping[int, float]]) -> list[tuple[int, float]]:
    return [(k, math.log10(max(1e-16, median(by_factors[k] for by_factors in draws)))) for k in draws[0]]


STUDY = Study(
    "products of attention maps",
    CLAIMS,
    measure,
    needs="a trained model of the kind that the claim names",
    on_models=True,
)
