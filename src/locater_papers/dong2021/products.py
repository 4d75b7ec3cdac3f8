"""By how many decades each more layer takes a product of attention maps towards rank one, before and after training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.data.text import batches
from locater_papers.dong2021.encoders import LENGTH, TEXT, initial, is_causal, trained_model, word_rows
from locater_papers.dong2021.map_products import Medians, attention_maps, chain, decades, medians, off_rank_one_single
from locater_papers.engine.claims import Claim, Measured, half_range
from locater_papers.engine.papers import Setting, Study
from locater_papers.engine.trained_heads import read_each, sources

REPEATS, DRAWS, SAMPLES = {True: 24, False: 100}, {True: 2, False: 4}, {True: 2, False: 8}
SIX = 6  # factors at which float32 and float64 are compared

CLAIMS = (
    Claim(
        "d1", "At initialisation every more attention map takes the product 1.5 to 2 decades nearer to rank one",
        "decades per layer of the median relative residual, BERT base at initialisation", "about", 1.75, 0.25,
    ),
    Claim(
        "d2", "A single attention map is far from rank one even at initialisation",
        "relative residual of one map, median, BERT base at initialisation", "about", 0.16, 0.05,
    ),
    Claim(
        "d3", "Trained attention mixes far more slowly: 0.3 to 0.4 decades per layer in BERT",
        "decades per layer of the median relative residual, mean of trained models without a mask", "about", 0.35, 0.15,
    ),
    Claim(
        "d4", "Training slows mixing by more than a decade per layer",
        "decades per layer, the same shapes at initialisation less trained, least of the models without a mask", "at least", 1.0,
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


def bert(setting: Setting, seed: int) -> dict[str, Any]:
    """BERT base at one draw of weights."""
    rows = word_rows(setting.text[:TEXT], SAMPLES[setting.quick])
    maps = attention_maps(initial("BERT", seed), rows)
    single = off_rank_one_single(chain(maps, SIX, REPEATS[setting.quick], seed))
    return {"medians": medians(maps.double(), REPEATS[setting.quick], seed), "float32": float(single.median())}


def pair(name: str, folder: Path, setting: Setting) -> dict[str, Any]:
    """A trained model on two halves of its samples, and its shape at initialisation, drawn twice."""
    from transformers import AutoModel

    model = trained_model(folder)
    rows = batches(model, setting.text[:TEXT], length=LENGTH, tokens=2 * LENGTH * SAMPLES[setting.quick], batch=1024)[
        0
    ]["input_ids"]
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


def measure(setting: Setting) -> Mapping[str, Measured]:
    """BERT base at several draws, then every trained model beside its own start."""
    draws = [bert(setting, seed) for seed in range(DRAWS[setting.quick])]
    pairs, left_out = read_each(sources(setting.models).items(), lambda name, folder: pair(name, folder, setting))
    return _measured(draws, list(pairs.values()), left_out)


def _measured(
    draws: list[dict[str, Any]], pairs: list[dict[str, Any]], left_out: dict[str, str]
) -> dict[str, Measured]:
    of_draws = "half the range over draws of weights"
    of_halves = "half the difference of two halves of the samples, each with its draw of initial weights"
    shown = {"bert": draws, "pairs": pairs, "left_out": left_out, "decades": {e["model"]: _slopes(e) for e in pairs}}
    floors = {"float32": [draw["float32"] for draw in draws]}
    found = {
        "d1": half_range([decades(draw["medians"]) for draw in draws], of_draws, shown),
        "d2": half_range([draw["medians"][1] for draw in draws], of_draws),
        "d5": half_range([math.log10(draw["medians"][SIX]) for draw in draws], of_draws, floors),
    }
    both, causal = ([_slopes(e) for e in pairs if e["causal"] is mask] for mask in (False, True))
    if both:
        mean = [sum(s["trained"][half] for s in both) / len(both) for half in range(2)]
        found["d3"] = half_range(mean, of_halves)
        found["d4"] = half_range(
            [min(s["initial"][half] - s["trained"][half] for s in both) for half in range(2)], of_halves
        )
    if causal:
        found["d6"] = half_range([max(s["initial"][half] for s in causal) for half in range(2)], of_halves)
    return found


def _slopes(entry: Mapping[str, Any]) -> dict[str, list[float]]:
    return {state: [decades(held) for held in entry[state]] for state in ("initial", "trained")}


STUDY = Study(
    "products of attention maps",
    CLAIMS,
    measure,
    needs="a trained model of the kind that the claim names",
    on_models=True,
)
