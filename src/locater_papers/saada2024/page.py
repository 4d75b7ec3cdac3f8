"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from locater_papers.engine.arms_page import (
    Entries,
    Part,
    Said,
    Sections,
    carried_in,
    in_sections,
    in_short,
    means_table,
    numbers_of,
)
from locater_papers.engine.figures import Panel, Series, draw


def lead(document: Mapping[str, Any]) -> list[str]:
    """What was asked and what was found, from what was measured."""
    found, more = numbers_of(document), dict[str, float]()
    if "b4" in found:
        more["deep"] = len(found["b4"]["depth"]["centred"])
    if "b6" in found:
        more["helped"] = found["b6"]["layers"]
    if "c2" in found:
        more["added"] = len(found["c2"]["rows"][0]["exponents"]) - 1
    said: Said = (
        (("a2", "a3"), lambda v: "A random attention map has one value at 1, because its rows sum to 1, and all others near 0: the second "
         f"eigenvalue is {v['a2']:.2f} σ / sqrt(T), the second singular value {v['a3']:.2f} times 2 σ / sqrt(T). The gap widens with T."),
        (("b1", "b2", "b6", "helped"), lambda v: "So tokens collapse as sequences grow: what the stable rank has over 1 falls as "
         f"{_power(v['b1'])} after one layer, and every layer adds {_power(v['b2'])}. With LayerNorm and skips "
         f"it is {v['b6']:.1g} at most after {v['helped']:.0f} layers."),
        (("b3", "b4", "b5", "deep"), lambda v: "Taking the outlier off, which is the same as centring values over tokens, stops it: "
         "the stable "
         f"rank then grows at least as {_power(v['b3'])}. It still falls with depth, to {v['b4']:.2f} of its size after {v['deep']:.0f} "
         "layers, as it does without any attention."),
        (("c2", "c3", "c4", "c5", "added"), lambda v: f"Gradients: with weights N(0, 1), {v['added']:.0f} more layers add "
         f"{_power(v['c2'])} with the outlier "
         f"and {_power(v['c3'])} without. That is a matter of the weights' size: with N(0, 1/T) they add {_power(v['c4'])} with it and "
         f"{_power(v['c5'])} without."),
        (("d1", "d3", "d5", "c6", "added"), lambda v: "Under a causal mask, of which the paper does not speak, no gap opens: the "
         "second eigenvalue "
         f"goes as {_power(v['d1'])}, and there is no collapse in width. Gradients grow as without a mask, and taking the prefix mean off "
         f"neither tames them ({v['added']:.0f} more layers add {_power(v['c6'])}) nor makes the rank grow ({_power(v['d5'])})."),
        (("e1", "e3"), lambda v: "Trained maps: in an encoder the second singular value is "
         f"{v['e1']:.2f} times that of a random map of the same unevenness; in causal models it is {v['e3']:.2f} of the first."),
        (("f1",), lambda v: f"Trained without the outlier, a masked language model changes its loss by {v['f1']:+.4f} nats, as "
         "seen at this size."),
        (("f2",), lambda v: f"Trained without the prefix mean, a causal language model changes its loss by {v['f2']:+.4f} nats, as seen at "
         "this size."),
    )  # fmt: skip
    return in_short(document, said, more)


def _power(exponent: float) -> str:
    """`T^-1.9`; never `T^-0.0`."""
    return f"T^{round(exponent, 1) + 0.0:.1f}"


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    sections: Sections = (
        (_gap, ("a1", "a6", "a9")), (_width, ("b1", "b2", "b4", "b6")), (_gradients, ("c2",)), (_masked, ("d1", "d3")), (_models, ()),
        (_training, ()),
    )  # fmt: skip
    return in_sections(document, sections)


def _gap(found: Entries) -> Part:
    a1, a6, a9 = found["a1"], found["a6"], found["a9"]
    radius = a1["cloud_tokens"] ** -0.5
    cloud = Panel(
        f"eigenvalues of a random map, {a1['cloud_tokens']} tokens", "real", "imaginary",
        [Series("eigenvalues", [(x, y) for x, y in a1["cloud"]], "dots", 0), Series("radius σ / sqrt(T)", _circle(radius), "line", 1)],
        x_limits=(-0.7, 1.1), y_limits=(-0.65, 0.65), legend="top right",
    )  # fmt: skip
    grown = a1["grown"]
    sizes = Panel(
        "first and second values", "tokens T", "size",
        [
            Series("s_1", [(g["tokens"], g["s_1"]) for g in grown], "line", 4),
            Series("s_2", [(g["tokens"], g["s_2"]) for g in grown], "dots", 0),
            Series("2 σ / sqrt(T)", [(g["tokens"], 2 * g["tokens"] ** -0.5) for g in grown], "dashed", 0),
            Series("λ_2, size", [(g["tokens"], g["lambda_2"]) for g in grown], "dots", 1),
            Series("σ / sqrt(T)", [(g["tokens"], g["tokens"] ** -0.5) for g in grown], "dashed", 1),
        ],
        x_scale="log", x_limits=(10, 2000), y_scale="log", y_limits=(0.004, 1.5), legend="bottom left",
    )  # fmt: skip
    lines = [
        "## a. The gap", "", "![the gap](figure:gap)", "",
        f"Softmax of independent normal logits, {a1['tokens']} tokens; σ is the standard deviation of entries over their mean. In units of",
        "the limits, so that 1 is what is stated:", "",
        "| σ | λ_2 sqrt(T) / σ | s_2 sqrt(T) / (2 σ) | s_1 | stable rank of the map | 1 + σ² |", "|---|---|---|---|---|---|",
        *(f"| {r['sigma']:g} | {r['lambda_2']:.3f} | {r['s_2']:.3f} | {r['s_1']:.4f} | {r['stable_rank']:.2f} | {1 + r['sigma'] ** 2:.2f} |"
          for r in a1["table"]), "",
        "At σ = 2 single entries of the log-normal stick out of the bulk: the limit is still far. The map itself does not tend to rank",
        "one; what it does to tokens does.", "",
        f"Key-query logits of variance 1 (weights N(0, 1), orthonormal tokens): s_2 sqrt(T) is {a6['means']['s_2']:.2f} where 2 σ is "
        f"{a6['means']['limit']:.2f}.",
        f"Independent logits of that variance have {a6['means']['independent_s_2']:.2f} at this length too: most of the excess is the",
        f"log-normal's tail. The tenth value tells them apart: {a6['means']['edge']:.2f} and {a6['means']['independent_edge']:.2f}.", "",
        "Differential attention, s_1 / s_2:", "",
        f"| λ | independent logits, σ = 1 | formula, 1 at the least | heads of {a9['head']} channels |", "|---|---|---|---|",
        *(f"| {r['lambda']:g} | {r['independent']:.2f} | {max(1.0, r['expected']):.2f} | {r['heads']:.2f} |" for r in a9["rows"]),
    ]  # fmt: skip
    return lines, {"gap": draw([cloud, sizes])}


def _circle(radius: float) -> list[tuple[float, float]]:
    return [(radius * math.cos(math.pi * n / 30), radius * math.sin(math.pi * n / 30)) for n in range(61)]


def _width(found: Entries) -> Part:
    b1, b4, b6 = found["b1"], found["b4"], found["b6"]
    depth = b4["depth"]
    fall, grow = _layers("with the outlier", b1["softmax"], 0), _layers("without", b1["centred"], 1)
    deep = Panel(
        f"against depth, {b4['tokens']} tokens", "layer", "stable rank",
        [
            Series(said, [(n + 1.0, x) for n, x in enumerate(depth[name])], "line", colour)
            for name, said, colour in (("softmax", "with the outlier", 1), ("centred", "without", 0), ("identity", "no attention", 4))
        ],
        y_scale="log", y_limits=(0.8, 100),
    )  # fmt: skip
    slopes, bare = (", ".join(f"{x:.2f}" for x in held["exponents"]) for held in (b1, found["b2"]))
    lines = [
        "## b. Rank collapse in width", "", "![width](figure:width)", "",
        "Stable rank of X Xᵀ after every layer of X ← A X W, orthonormal tokens at first. Exponents of T in stable rank - 1 with the",
        f"outlier, layers 1 to {len(b1['exponents'])}: {slopes}; with σ, which still grows at these lengths, divided out: {bare}.",
        "On the right, what is left without it falls with depth as a product of random weights does.",
        "",
        f"Stable rank - 1 after {b6['layers']} layers of {b6['tokens']} tokens, mean of draws:", "",
        "| stack | weights | with the outlier | without |", "|---|---|---|---|",
        *(f"| {r['stack']} | {WEIGHTS[r['weights']]} | {fmean(r['softmax']):.2g} | {fmean(r['centred']):.3g} |" for r in b6["rows"]),
    ]  # fmt: skip
    return lines, {"width": draw([fall, grow, deep])}


WEIGHTS = {"unit": "N(0, 1)", "usual": "N(0, 1/T)"}


def _layers(title: str, rows: Sequence[Mapping[str, Any]], add: int) -> Panel:
    """Stable rank - 1, or with add = 1 the stable rank, against T, a line for each layer; axes from one power of ten to
    another.
    """
    count = len(rows[0]["excess"])
    series = [
        Series(f"layer {n + 1}", [(r["tokens"], r["excess"][n] + add) for r in rows], "line", n) for n in range(count)
    ]
    values = [y for each in series for _, y in each.points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    what = "stable rank" if add else "stable rank - 1"
    limits = (10.0**low, 10.0 ** max(high, low + 1))
    return Panel(
        title, "tokens T", what, series, "log", (10, 1000), limits, "log", "top left" if add else "bottom left"
    )


def _gradients(found: Entries) -> Part:
    rows = found["c2"]["rows"]
    count = len(rows[0]["exponents"])
    lines = [
        "## c. Gradients", "",
        "Exponent of T in the norm of the derivative of the last layer by the first weights; 1/2 at one layer is that of an identity.", "",
        "| stack, weights N(0, 1) unless said | " + " | ".join(f"{n + 1} layers" if n else "1 layer" for n in range(count)) + " |",
        "|---" * (count + 1) + "|",
        *(f"| {r['stack']} | " + " | ".join(f"{x:.2f}" for x in r["exponents"]) + " |" for r in rows), "",
        "The outlier passes a signal on at its size, the bulk shrinks it by sqrt(T). Weights N(0, 1) multiply by sqrt(T): they explode",
        "with the first and balance the second. Weights N(0, 1/T), as most models have at first, keep the first and let the second vanish.",
    ]  # fmt: skip
    return lines, {}


def _masked(found: Entries) -> Part:
    d1, d3 = found["d1"], found["d3"]
    panels = [
        _layers("causal, with the outlier", d3["softmax"], 0),
        _layers("causal, prefix mean removed", d3["centred"], 1),
    ]
    lines = [
        "## d. Under a causal mask", "", "![causal](figure:causal)", "",
        "A causal map is triangular, so its eigenvalues are its diagonal: 1, and then what early tokens give to themselves, however long",
        "the sequence is. First tokens see few keys, and their rows stay uneven.", "",
        "| tokens | second eigenvalue | s_2 / s_1 |", "|---|---|---|",
        *(f"| {r['tokens']} | {r['lambda_2']:.2f} | {r['ratio']:.2f} |" for r in d1["rows"]),
    ]  # fmt: skip
    return lines, {"causal": draw(panels)}


def _models(found: Entries) -> Part:
    held = next((found[key] for key in ("e1", "e3") if key in found), None)
    if held is None:
        return [], {}
    lines = [
        "## e. Trained models", "",
        f"Maps of all heads on {held['tokens']} tokens of text; medians over heads, and 10 % to 90 % of them.", "",
        "| model | mask | s_2 / s_1 | s_2 over that of a random map as uneven | stable rank of the map |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for r in held["rows"]:
        mask = "causal" if r["causal"] else "none"
        ratio = f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        lines.append(f"| {r['model']} | {mask} | {ratio} | {r['random']:.2f} | {r['stable_rank']:.2f} |")
    return lines, {}


def _training(found: Entries) -> Part:
    held = carried_in(found)
    if held is None:
        return [], {}
    lines = [
        "## f. Training", "", "Gap, stable rank of maps and residual after the last block are means over seeds.", "",
        *means_table(held["arms"], {"gap": ("gap 1 - s_2 / s_1", 3), "stable_rank": ("stable rank", 3), "residual": ("residual", 3)}),
    ]  # fmt: skip
    series = [
        Series(name, [(n / 2, fmean(seed[n] for seed in seeds)) for n in range(len(seeds[0]))], "line", number)
        for number, (name, seeds) in enumerate(held["depth"].items())
        if seeds and seeds[0]
    ]
    if not series:
        return lines, {}
    panel = Panel("residual's share by depth", "layer", "residual / size of tokens", series)
    return [*lines[:2], "![training](figure:training)", "", *lines[2:]], {"training": draw([panel])}
