"""Paths through a transformer: how long they are, and how little the long ones weigh (study e); products of attention
maps along them, and by how many decades each more layer takes these towards rank one, before and after training
(study d).

Products are made as in the paper: k distinct layers in their order, one head drawn in each, and P = A_1 A_2 ... A_k of
one sample. What is left of P besides the closest matrix of rank one, over P, in the composite norm. Products are formed
in float64, where the paper's float32 ends near 1e-6. That is attention alone: values and skips play no part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.inputs.text import batches
from locater.measures import composite_norm, token_residual
from locater.torch_private import attention_implementation
from locater_lab.engine.claims import Claim, Measurement, by_seed, half_range
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import model_folders, read_each
from locater_lab.papers.dong2021.residual_by_depth import (
    LENGTH,
    TEXT_CHARACTERS,
    initial_model,
    is_causal,
    trained_model,
    word_rows,
)
from locater_lab.theory import length_contributions, length_weights, path_counts, path_lengths

# ---- e: path lengths ----


@dataclass(frozen=True)
class StatedLengths:
    """A row of the published counts: mean to three digits, shares to four."""

    model: str
    depth: int
    heads: int
    mean: float
    modes: tuple[int, ...]
    at_mode: float
    longest: float


STATED_LENGTHS = (
    StatedLengths("DistilBERT", 6, 12, 5.538, (6,), 0.6186, 0.6186),
    StatedLengths("MobileBERT", 12, 4, 9.600, (10,), 0.2835, 0.0687),
    StatedLengths("DeiT-T", 12, 3, 9.000, (9,), 0.2581, 0.0317),
    StatedLengths("BERT-base, ViT-B", 12, 12, 11.077, (11, 12), 0.3827, 0.3827),
    StatedLengths("BERT-large, ViT-L", 24, 16, 22.588, (23,), 0.3501, 0.2334),
    StatedLengths("ViT-H", 32, 16, 30.118, (31,), 0.2874, 0.1437),
    StatedLengths("T5-3B", 24, 32, 23.273, (24,), 0.4778, 0.4778),
    StatedLengths("T5-11B", 24, 128, 23.814, (24,), 0.8296, 0.8296),
    StatedLengths("GPT-3", 96, 96, 95.010, (95, 96), 0.3698, 0.3698),
)
# alpha of a trained model of 6 layers, as its plotting code keeps them
SKIPS = (0.901, 0.905, 0.907, 0.889, 0.856, 0.778)
CONTRACTION_RATE, FIRST_RESIDUAL = 1.0491046, 400.0  # c and R_0 there
LISTED_SIZES = ((1, 1), (2, 3), (4, 2), (5, 3), (6, 2))  # (layers, heads) small enough to list every path

LENGTH_CLAIMS = (
    Claim(
        "e1", "Mean length, most frequent length's share and longest length's share of nine models, as counted",
        "largest distance of a printed figure from ours, in units of its last digit", "at most", 0.5,
        where="its notebook of path counts",
    ),
    Claim(
        "e2", "Which lengths are the most frequent: one, or two that tie",
        "models of nine whose most frequent lengths, compared as integers, are others than counted", "at most", 0.0,
        where="its notebook of path counts",
    ),
    Claim(
        "e3", "Of L layers with H heads and a skip, C(L, k) H^k paths have length k",
        f"largest difference from counting every path, {len(LISTED_SIZES)} small stacks", "at most", 0.0,
        where="path decomposition",
    ),
    Claim(
        "e4", "Most paths are long; the weight is on the short ones",
        "weight of paths through at most one attention layer, with the skip weights of a trained model of 6 layers",
        "at least", 0.5, where="weights of its plotting code", bound="ours",
    ),
)  # fmt: skip


def length_row(depth: int, heads: int) -> dict[str, Any]:
    """Mean, most frequent lengths, and the shares of these and of the longest.

    >>> length_row(12, 12)["modes"], round(length_row(12, 12)["at_mode"], 4)
    ([11, 12], 0.3827)
    """
    counts, shares = path_counts(depth, heads), path_lengths(depth, heads)
    top = max(counts)
    modes = [k for k, count in enumerate(counts) if count == top]
    mean = sum(k * count for k, count in enumerate(counts)) / sum(counts)
    return {"mean": mean, "modes": modes, "at_mode": float(shares[modes[0]]), "longest": float(shares[-1])}


def largest_distance(stated: StatedLengths) -> float:
    """Of the three printed figures from ours, the largest, in units of the last digit: 1/2 is rounding."""
    own = length_row(stated.depth, stated.heads)
    off = [abs(own["mean"] - stated.mean) / 1e-3]
    off += [abs(own[name] - getattr(stated, name)) / 1e-4 for name in ("at_mode", "longest")]
    return max(off)


def count_listed_paths(depth: int, heads: int) -> list[int]:
    """Paths per length, by writing down every one: a head or the skip in each layer.

    >>> count_listed_paths(3, 2)
    [1, 6, 12, 8]
    """
    counts = [0] * (depth + 1)
    for path in product(range(heads + 1), repeat=depth):
        counts[sum(choice < heads for choice in path)] += 1
    return counts


def measure_length(setting: Setting) -> Results:
    """Exact numbers: no spread."""
    exact = "none: exact"
    rows = [
        {"model": s.model, "layers": s.depth, "heads": s.heads, **length_row(s.depth, s.heads), "stated": vars(s)}
        for s in STATED_LENGTHS
    ]
    wrong = sum(tuple(r["modes"]) != s.modes for r, s in zip(rows, STATED_LENGTHS, strict=True))
    off = max(
        abs(a - b) for size in LISTED_SIZES for a, b in zip(count_listed_paths(*size), path_counts(*size), strict=True)
    )
    alpha = torch.tensor(SKIPS, dtype=torch.float64)
    weights = length_weights(alpha)
    contributions = length_contributions(alpha, FIRST_RESIDUAL, CONTRACTION_RATE)
    measured = {
        "e1": Measurement(max(largest_distance(s) for s in STATED_LENGTHS), 0.0, exact),
        "e2": Measurement(float(wrong), 0.0, exact),
        "e3": Measurement(float(off), 0.0, exact),
        "e4": Measurement(float(weights[:2].sum()), 0.0, exact),
    }
    trained = {
        "weights": weights.tolist(),
        "shares": path_lengths(len(SKIPS), 2).tolist(),
        "contributions": (contributions / contributions.sum()).tolist(),
        "mean_skip": float(alpha.mean()),
        "mean_length": float((1 - alpha).sum()),
    }
    tables = {"path_lengths": rows, "bert_path_lengths": path_lengths(12, 12).tolist(), "length_weights": trained}
    return Results(measured, tables)


LENGTH_STUDY = Study("path lengths", LENGTH_CLAIMS, measure_length)


# ---- d: products of attention maps ----


REPEATS, DRAWS, SAMPLES = {True: 24, False: 100}, {True: 2, False: 4}, {True: 2, False: 8}
SIX = 6  # factors at which float32 and float64 are compared
FLOOR = 1e-12  # of float64 products: medians under it do not enter slopes
Medians = dict[int, float]  # by number of factors
FIGURE = "figure of products of attention maps"
STATED_MEDIANS: dict[str, Medians] = {
    "initial": {1: 1.6e-1, 2: 3e-3, 3: 6e-5},  # then a plateau near 2e-6
    "trained": dict(enumerate((4e-1, 2e-1, 9e-2, 4e-2, 1.7e-2, 8e-3, 5e-3, 2e-3, 5e-4, 3e-4, 1.3e-4, 6e-5), 1)),
}  # medians of the paper's figure

PRODUCT_CLAIMS = (
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
    implementation = attention_implementation(model)
    model.set_attn_implementation("eager")  # the only one that returns them
    try:
        output = model(input_ids=ids.to(next(model.parameters()).device), output_attentions=True)
    finally:
        model.set_attn_implementation(implementation)
    maps = getattr(output, "attentions", None)
    if not maps or any(x is None for x in maps):
        raise LocaterError(f"{type(model).__name__} returns no attention maps")
    return torch.stack(list(maps)).cpu()


def draw_products(maps: Tensor, factors: int, repeats: int, seed: int = 0) -> Tensor:
    """Products of `factors` maps each: sample, layers and heads drawn evenly, layers in their order. (repeats, tokens,
    tokens).

    >>> eye = torch.eye(2).expand(3, 1, 2, 2, 2)
    >>> draw_products(eye, 3, 1).tolist()
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


def off_rank_one_in_float32(products: Tensor) -> Tensor:
    """The same with everything in float32, as the paper had it: this ends where float32 does."""
    U, s, Vh = torch.linalg.svd(products.float(), full_matrices=False)
    rest = products.float() - U[..., :, :1] * s[..., None, :1] * Vh[..., :1, :]
    return composite_norm(rest) / composite_norm(products)


def median_residuals(maps: Tensor, repeats: int, seed: int = 0) -> Medians:
    """Median relative residual by number of factors, products in the precision of `maps`."""
    return {k: float(off_rank_one(draw_products(maps, k, repeats, seed)).median()) for k in range(1, len(maps) + 1)}


def decades_per_factor(by_factors: Mapping[int, float], floor: float = FLOOR) -> float:
    """Slope of -log10 over the number of factors, by least squares, as far as medians are above the floor.

    >>> round(decades_per_factor({1: 1e-1, 2: 1e-3, 3: 1e-5, 4: 1e-16}), 6)
    2.0
    """
    points = [(k, -math.log10(x)) for k, x in by_factors.items() if x > floor]
    if len(points) < 2:
        return math.nan
    middle = sum(k for k, _ in points) / len(points)
    return sum((k - middle) * y for k, y in points) / sum((k - middle) ** 2 for k, _ in points)


# --- models ---


def measure_bert(setting: Setting, seed: int) -> dict[str, Any]:
    """BERT base at one draw of weights."""
    rows = word_rows(setting.text[:TEXT_CHARACTERS], SAMPLES[setting.quick])
    maps = attention_maps(initial_model("BERT", seed), rows)
    single = off_rank_one_in_float32(draw_products(maps, SIX, REPEATS[setting.quick], seed))
    return {"medians": median_residuals(maps.double(), REPEATS[setting.quick], seed), "float32": float(single.median())}


def measure_model(name: str, folder: Path, setting: Setting) -> dict[str, Any]:
    """A trained model on two halves of its samples, and its shape at initialisation, drawn twice."""
    from transformers import AutoModel

    model, tokens = trained_model(folder), 2 * LENGTH * SAMPLES[setting.quick]
    rows = batches(model, setting.text[:TEXT_CHARACTERS], length=LENGTH, tokens=tokens, batch=1024)[0]["input_ids"]
    halves = rows.chunk(2)
    entry: dict[str, Any] = {"model": name, "causal": is_causal(model)}
    entry["trained"] = [_medians(model, half, setting, number) for number, half in enumerate(halves)]
    starts = []
    for seed, half in enumerate(halves):
        torch.manual_seed(seed)
        starts.append(_medians(AutoModel.from_config(model.config).eval(), half, setting, seed))
    return {**entry, "initial": starts}


def _medians(model: nn.Module, rows: Tensor, setting: Setting, seed: int) -> Medians:
    return median_residuals(attention_maps(model, rows).double(), REPEATS[setting.quick], seed)


# --- the study ---


def measure_product(setting: Setting) -> Results:
    """BERT base at several draws, then every trained model beside its own start."""
    draws = [measure_bert(setting, seed) for seed in range(DRAWS[setting.quick])]
    by_name, left_out = read_each(
        model_folders(setting.models).items(), lambda name, folder: measure_model(name, folder, setting)
    )
    pairs = list(by_name.values())
    return Results(measure_claims(draws, pairs), {"map_products": products_table(draws, pairs, left_out)})


def measure_claims(draws: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]) -> dict[str, Measurement]:
    """Claims on BERT by its draws of weights, on trained models by halves of the text."""
    of_draws = "draws of weights"
    of_halves = "half the difference of two halves of the samples, each with its draw of initial weights"
    measured = {
        "d1": by_seed([decades_per_factor(draw["medians"]) for draw in draws], of=of_draws),
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
    return {state: [decades_per_factor(by_factors) for by_factors in entry[state]] for state in ("initial", "trained")}


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
        "bert": {
            "points": _points([d["medians"] for d in draws]),
            "decades": [decades_per_factor(d["medians"]) for d in draws],
        },
        "paper": {state: _points([by_factors]) for state, by_factors in STATED_MEDIANS.items()},
        "models": models,
        "float32": {"factors": SIX, "median": median(d["float32"] for d in draws)},
        "medians": [dict(d["medians"]) for d in draws],
        "left_out": dict(left_out),
    }


def _points(draws: Sequence[Mapping[int, float]]) -> list[tuple[int, float]]:
    return [(k, math.log10(max(1e-16, median(by_factors[k] for by_factors in draws)))) for k in draws[0]]


PRODUCT_STUDY = Study(
    "products of attention maps",
    PRODUCT_CLAIMS,
    measure_product,
    needs="a trained model of the kind that the claim names",
    on_models=True,
)
