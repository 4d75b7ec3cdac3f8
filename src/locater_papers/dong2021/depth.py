"""How alike tokens are at each depth, with attention skips and MLPs and without: at initialisation, and in trained
models.

Curves of the paper were read off its figures. Each is of one draw of weights: where our draws differ from each other,
so may theirs. `encoders.py` has the models and says how they are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.data.text import batches
from locater_papers.dong2021.encoders import (
    BRANCH_OUT,
    CONFIGS,
    LENGTH,
    TEXT,
    VARIANTS,
    initial,
    is_causal,
    trained_model,
    variants_of,
    word_rows,
)
from locater_papers.engine.arms_page import Entries, Part
from locater_papers.engine.claims import Claim, Measured, half_range
from locater_papers.engine.figures import Panel, Series, draw
from locater_papers.engine.papers import Setting, Study
from locater_papers.engine.trained_heads import read_each, sources

LAYERS = 12
SAMPLES, DRAWS = {True: 4, False: 32}, {True: 4, False: 8}
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


# --- at initialisation
# --------------------------------------------------------------------------------------------------

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


# --- trained models
# -----------------------------------------------------------------------------------------------------


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


# --- the page
# -----------------------------------------------------------------------------------------------------------


def section(entries: Entries) -> Part:
    """Lines of Markdown and figures by name."""
    lines: list[str] = []
    figures: dict[str, str] = {}
    if "c1" in entries:
        lines += _start_lines(entries["c1"])
        figures["depth"] = draw([_start_panel(m, entries["c1"]["curves"][m], m == "BERT") for m in STATED])
    if "c20" in entries:
        lines += _trained_lines(entries["c20"])
        figures["depth-trained"] = draw([_trained_panel(entry) for entry in entries["c20"]["trained"]])
    return lines, figures


def _line(name: str, variant: str, values: list[float]) -> Series:
    number = list(VARIANTS).index(variant)
    # it may lie on "no skip"
    return Series(name, list(enumerate(values)), "dashed" if variant == "neither" else "line", number)


def _start_panel(model: str, curves: Mapping[str, Mapping[str, list[float]]], named: bool) -> Panel:
    """Names in one panel are enough, and in the others they would cover lines."""
    lines = [_line(v if named else "", v, curves[v]["mean"]) for v in VARIANTS]
    if BRANCH_OUT in curves:
        lines.append(Series(BRANCH_OUT, list(enumerate(curves[BRANCH_OUT]["mean"])), "dashed", 4))
    dots = [Series("", sorted(STATED[model][v].items()), "dots", i) for i, v in enumerate(VARIANTS)]
    return Panel(
        f"{model} at initialisation; dots: the paper's",
        "layer",
        "relative residual",
        [*lines, *dots],
        y_limits=(0, 1.1),
    )


def _start_lines(held: Mapping[str, Any]) -> list[str]:
    how, curves = held["settings"], held["curves"]
    lines = [
        "## c. Residual against depth", "", "![residual against depth](figure:depth)", "",
        f"Relative residual, mean over {how['draws']} draws of weights and {how['samples']} samples of {how['length']} tokens (± standard "
        "deviation over draws), the paper's single draw in brackets. 0: all tokens are equal.", "",
        "| model | variant | layer 1 | layer 2 | layer 6 | layer 12 |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, variants in curves.items():
        for variant, curve in variants.items():
            stated = STATED[name].get(variant, {})
            cells = [
                f"{curve['mean'][t]:.3f} ± {curve['sd'][t]:.3f}" + (f" ({stated[t]:.3f})" if t in stated else "")
                for t in (1, 2, 6, 12)
            ]
            lines.append(f"| {name} | {variant} | {' | '.join(cells)} |")
    lines += [
        "", "no skip: attention's own is out, the MLP keeps its. no MLP: as the paper cut it, which for ALBERT leaves activation, skip and",
        f"norm of the MLP in; `{BRANCH_OUT}` takes all but the norm.",
    ]  # fmt: skip
    return lines


def _trained_panel(entry: Mapping[str, Any]) -> Panel:
    means = {v: [(a + b) / 2 for a, b in zip(*entry["curves"][v], strict=True)] for v in VARIANTS}
    mask = "causal" if entry["causal"] else "no mask"
    lines = [_line(v, v, values) for v, values in means.items()]
    return Panel(f"{entry['model']}, trained, {mask}", "layer", "relative residual", lines, y_limits=(0, 1.1))


def _trained_lines(held: Mapping[str, Any]) -> list[str]:
    names = [entry["model"] for entry in held["trained"]]
    lines = [
        "", "![trained models](figure:depth-trained)", "",
        f"Trained models at hand: {', '.join(names)}. Where there is a norm at the end, the last point is after it.",
    ]  # fmt: skip
    lines += [f"Left out: {name} ({why})." for name, why in held["left_out"].items()]
    return lines


STUDY = Study(
    "residual against depth", CLAIMS, measure, needs="a trained model of the kind that the claim names", on_models=True
)
