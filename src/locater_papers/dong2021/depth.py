"""How alike tokens are at each depth, with attention skips and MLPs and without: at initialisation, and in trained
models.

`encoders.py` has the models and says how they are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.data.text import batches
from locater_papers.dong2021.depth_claims import CLAIMS, COLLAPSED, LAYERS, STATED
from locater_papers.dong2021.encoders import (
    BRANCH_OUT,
    CONFIGS,
    LENGTH,
    TEXT,
    initial,
    is_causal,
    trained_model,
    variants_of,
    word_rows,
)
from locater_papers.engine.claims import Measured, half_range
from locater_papers.engine.papers import Setting, Study
from locater_papers.engine.trained_heads import read_each, sources

SAMPLES, DRAWS = {True: 4, False: 32}, {True: 4, False: 8}
Curves = dict[str, dict[str, Tensor]]  # by model and variant: (draws, states), mean over samples


def at_start(setting: Setting) -> Curves:
    """Every model, drawn several times, on the same samples."""
    device = "cuda" if torch.cuda.is_available() and not setting.quick else "cpu"
    rows = word_rows(setting.text[:TEXT], SAMPLES[setting.quick])
    held = [{"input_ids": part} for part in rows.split(4)]
    found: dict[str, dict[str, list[Tensor]]] = {name: {} for name in CONFIGS}
    for name, seed in setting.each([(name, seed) for name in CONFIGS for seed in range(DRAWS[setting.quick])]):
        model = initial(name, seed).to(device)
        for variant, curve in variants_of(model, held, (BRANCH_OUT,) if name == "ALBERT" else ()).items():
            found[name].setdefault(variant, []).append(curve.mean(0))
    return {name: {variant: torch.stack(curves) for variant, curves in held.items()} for name, held in found.items()}


def start_measures(curves: Curves) -> dict[str, Measured]:
    """Claims c1 to c16."""
    later = range(1, LAYERS + 1)
    found = {f"c{i}": _farthest(curves[m], STATED[m]) for i, m in enumerate(STATED, 1)}
    found["c4"] = _extreme({f"{m}, {v}": curves[m][v][:, 2] for m in curves for v in ("no skip", "neither")}, 1)
    found["c5"] = _draws(curves["BERT"]["neither"][:, 1])
    found |= {f"c{i}": _draws(curves[m]["full"][:, LAYERS]) for i, m in enumerate(STATED, 6)}
    found |= {f"c{i}": _draws(curves[m]["no MLP"][:, LAYERS]) for i, m in enumerate(STATED, 9)}
    found["c12"] = _extreme({f"{m}, {v}": curves[m][v][:, LAYERS] for m in curves for v in ("full", "no MLP")}, -1)
    pairs = [(kept, lost) for kept in ("full", "no MLP") for lost in ("no skip", "neither")]
    found["c13"] = _extreme(
        {
            f"{m}, {a} less {b}, layer {t}": (curves[m][a] - curves[m][b])[:, t]
            for m in curves
            for a, b in pairs
            for t in later
        },
        -1,
    )
    found["c14"] = _extreme(
        {f"{m}, layer {t}": (curves[m]["no skip"] - curves[m]["neither"])[:, t] for m in curves for t in later}, 1
    )
    found["c15"] = _extreme({m: (curves[m]["full"] - curves[m]["no MLP"])[:, LAYERS] for m in ("BERT", "XLNet")}, 1)
    found["c16"] = _draws((curves["ALBERT"]["no MLP"] - curves["ALBERT"][BRANCH_OUT])[:, LAYERS])
    return found


def _draws(values: Tensor, numbers: Mapping[str, Any] | None = None, absolute_from: float | None = None) -> Measured:
    """Mean over draws of weights; or how far the mean is from a value."""
    mean = float(values.mean())
    spread = 2 * float(values.std()) / len(values) ** 0.5
    value = mean if absolute_from is None else abs(mean - absolute_from)
    return Measured(value, spread, "2 standard errors over draws of weights", numbers or {})


def _extreme(found: Mapping[str, Tensor], sign: int) -> Measured:
    """The largest (sign 1) or the least (-1) of several quantities (draws,), and which it was."""
    where = max(found, key=lambda name: sign * float(found[name].mean()))
    return _draws(found[where], {"where": where})


def _farthest(curves: Mapping[str, Tensor], stated: Mapping[str, Mapping[int, float]]) -> Measured:
    """Where the mean curve is farthest from the figure's."""
    cells = [(variant, layer, value) for variant, held in stated.items() for layer, value in held.items()]
    variant, layer, value = max(cells, key=lambda c: abs(float(curves[c[0]][:, c[1]].mean()) - c[2]))
    return _draws(curves[variant][:, layer], {"variant": variant, "layer": layer, "stated": value}, absolute_from=value)


def trained(setting: Setting) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Curves of the trained models at hand on two halves of the text, and what was left out, with the reason."""
    text, samples = setting.text[:TEXT], 2 * SAMPLES[setting.quick]
    found, left_out = read_each(
        sources(setting.models).items(), lambda name, folder: _trained_one(name, folder, text, samples)
    )
    return list(found.values()), left_out


def _trained_one(name: str, folder: Path, text: str, samples: int) -> dict[str, Any]:
    model = trained_model(folder)
    held = batches(model, text, length=LENGTH, tokens=LENGTH * samples, batch=4)
    halves = {
        variant: [part.mean(0).tolist() for part in found.chunk(2)]
        for variant, found in variants_of(model, held).items()
    }
    return {"model": name, "causal": is_causal(model), "curves": halves}


def trained_measures(entries: list[dict[str, Any]]) -> dict[str, Measured]:
    """Claims c17 to c20, each half of the text by itself."""
    found = {}
    both = [entry for entry in entries if not entry["causal"]]
    causal = [entry for entry in entries if entry["causal"]]
    lost = ("no skip", "neither")

    def ends(held: list[dict[str, Any]], variants: tuple[str, ...], half: int) -> list[float]:
        return [entry["curves"][v][half][-1] for entry in held for v in variants]

    if both:
        found["c17"] = _halves([max(ends(both, lost, half)) for half in range(2)])
        first = [[first_below(entry["curves"][v][half]) for entry in both for v in lost] for half in range(2)]
        found["c18"] = _halves([sum(held) / len(held) for held in first])
        found["c19"] = _halves([min(ends(both, ("full",), half)) for half in range(2)])
    if causal:
        found["c20"] = _halves([min(ends(causal, lost, half)) for half in range(2)])
    return found


def first_below(curve: list[float], level: float = COLLAPSED) -> int:
    """The first layer whose residual is under the level; one more than there are where none is.

    >>> first_below([0.9, 0.3, 0.01, 0.2])
    2
    """
    return next((layer for layer, value in enumerate(curve) if value < level), len(curve))


def _halves(values: list[float]) -> Measured:
    return half_range(values, "half the difference of two halves of the samples")


def measure(setting: Setting) -> Mapping[str, Measured]:
    """All of it; the curves are with the first claim of each part."""
    curves = at_start(setting)
    entries, left_out = trained(setting)
    found = {**start_measures(curves), **trained_measures(entries)}
    table = {
        m: {v: {"mean": x.mean(0).tolist(), "sd": x.std(0).tolist()} for v, x in held.items()}
        for m, held in curves.items()
    }
    how = {"samples": SAMPLES[setting.quick], "draws": DRAWS[setting.quick], "length": LENGTH}
    more: dict[str, dict[str, Any]] = {
        "c1": {"curves": table, "settings": how},
        "c20": {"trained": entries, "left_out": left_out},
    }
    return {
        key: Measured(x.value, x.spread, x.spread_of, {**x.numbers, **more.get(key, {})}) for key, x in found.items()
    }


STUDY = Study(
    "residual against depth", CLAIMS, measure, needs="a trained model of the kind that the claim names", on_models=True
)
