"""Products of attention maps along paths: by how many decades each more layer takes them towards rank one, before and
after training.

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

from locater.data.text import batches
from locater.errors import LocaterError
from locater.measures import composite_norm, token_residual
from locater_papers.dong2021.encoders import LENGTH, TEXT, initial, is_causal, trained_model, word_rows
from locater_papers.engine.arms_page import Entries, Part
from locater_papers.engine.claims import Claim, Measured, half_range
from locater_papers.engine.figures import Panel, Series, draw
from locater_papers.engine.papers import Setting, Study
from locater_papers.engine.trained_heads import read_each, sources

REPEATS, DRAWS, SAMPLES = {True: 24, False: 100}, {True: 2, False: 4}, {True: 2, False: 8}
FLOOR = 1e-12  # of float64 products: medians under it do not enter slopes
BERT = "BERT base"
SIX = 6  # factors at which float32 and float64 are compared
STATED = {
    "initial": {1: 1.6e-1, 2: 3e-3, 3: 6e-5},  # then a plateau near 2e-6
    "trained": dict(enumerate((4e-1, 2e-1, 9e-2, 4e-2, 1.7e-2, 8e-3, 5e-3, 2e-3, 5e-4, 3e-4, 1.3e-4, 6e-5), 1)),
}  # medians of the paper's figure, by number of factors

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

Medians = dict[int, float]  # by number of factors


@torch.no_grad()
def attention_maps(model: Any, ids: Tensor) -> Tensor:
    """(layers, samples, heads, tokens, tokens), float32 as the model has them."""
    was = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that hands them out
    try:
        found = getattr(
            model(input_ids=ids.to(next(model.parameters()).device), output_attentions=True), "attentions", None
        )
    finally:
        model.set_attn_implementation(was)
    if not found or any(x is None for x in found):
        raise LocaterError(f"{type(model).__name__} hands out no attention maps")
    return torch.stack(list(found)).cpu()


def chain(maps: Tensor, factors: int, repeats: int, seed: int = 0) -> Tensor:
    """Products of `factors` maps each: sample, layers and heads drawn evenly, layers in their order. (repeats, tokens,
    tokens).

    >>> eye = torch.eye(2).expand(3, 1, 2, 2, 2)
    >>> chain(eye, 3, 1).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    layers, samples, heads = maps.shape[:3]
    draws = random.Random(seed)
    found = []
    for _ in range(repeats):
        sample, product = draws.randrange(samples), torch.eye(maps.shape[-1], dtype=maps.dtype)
        for layer in sorted(draws.sample(range(layers), factors)):
            product = product @ maps[layer, sample, draws.randrange(heads)]
        found.append(product)
    return torch.stack(found)


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


def decades(found: Mapping[int, float], floor: float = FLOOR) -> float:
    """Slope of -log10 over the number of factors, by least squares, as far as medians are above the floor.

    >>> round(decades({1: 1e-1, 2: 1e-3, 3: 1e-5, 4: 1e-16}), 6)
    2.0
    """
    points = [(k, -math.log10(x)) for k, x in found.items() if x > floor]
    if len(points) < 2:
        return math.nan
    middle = sum(k for k, _ in points) / len(points)
    return sum((k - middle) * y for k, y in points) / sum((k - middle) ** 2 for k, _ in points)


# --- models
# -------------------------------------------------------------------------------------------------------------


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


# --- the page
# -----------------------------------------------------------------------------------------------------------


def section(entries: Entries) -> Part:
    """Lines of Markdown and figures by name."""
    if "d1" not in entries:
        return [], {}
    held = entries["d1"]
    start = [entry["medians"] for entry in held["bert"]]
    lines = [
        "## d. Products of attention maps", "", "![products of attention maps](figure:products)", "",
        "Median over products of k maps, one head from each of k layers; dots are the paper's, of BERT. Decades per layer:", "",
        "| model | mask | at initialisation | trained |", "|---|---|---|---|",
        f"| {BERT} | none | {_of([decades(_keyed(m)) for m in start])} | not at hand (paper: 0.35) |",
    ]  # fmt: skip
    for entry in held["pairs"]:
        slopes = held["decades"][entry["model"]]
        mask = "causal" if entry["causal"] else "none"
        lines.append(f"| {entry['model']} | {mask} | {_of(slopes['initial'])} | {_of(slopes['trained'])} |")
    lines += ["", *(f"Left out: {name} ({why})." for name, why in held["left_out"].items())]
    if "d5" in entries:
        floor = median(entries["d5"]["float32"])
        lines += [f"In float32 the product of {SIX} maps of {BERT} ends at {floor:.1e}; in float64 it goes on falling."]
    return lines, {"products": draw([_start_panel(start), *(_pair_panel(entry) for entry in held["pairs"])])}


def _start_panel(start: Sequence[Mapping[Any, float]]) -> Panel:
    """BERT base, all draws as one line, beside the paper's two."""
    own = Series("at initialisation", _points([_keyed(m) for m in start]), "line", 0)
    dots = [Series(f"paper, {state}", _points([STATED[state]]), "dots", i) for i, state in enumerate(STATED)]
    return _panel(f"{BERT} at initialisation", [own, *dots])


def _pair_panel(entry: Mapping[str, Any]) -> Panel:
    states = (("at initialisation", "initial"), ("trained", "trained"))
    lines = [
        Series(name, _points([_keyed(m) for m in entry[state]]), "line", i) for i, (name, state) in enumerate(states)
    ]
    return _panel(f"{entry['model']}, {'causal' if entry['causal'] else 'no mask'}", lines)


def _panel(title: str, series: list[Series]) -> Panel:
    """All on one scale, that of BERT base unless a model is deeper."""
    deepest = max(12.0, *(x for each in series for x, _ in each.points))
    return Panel(
        title,
        "maps in the product",
        "log10 of the relative residual",
        series,
        x_limits=(0.5, deepest + 0.5),
        y_limits=(-16, 1),
    )


def _points(found: Sequence[Mapping[int, float]]) -> list[tuple[float, float]]:
    return [(float(k), math.log10(max(1e-16, median(m[k] for m in found)))) for k in found[0]]


def _keyed(found: Mapping[Any, float]) -> Medians:
    """Keys of JSON are strings."""
    return {int(k): x for k, x in found.items()}


def _of(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{(low + high) / 2:.2f} ± {(high - low) / 2:.2f}"


STUDY = Study(
    "products of attention maps",
    CLAIMS,
    measure,
    needs="a trained model of the kind that the claim names",
    on_models=True,
)
