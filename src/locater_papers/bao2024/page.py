"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locater_papers.bao2024.runs_page import SECTIONS, answer
from locater_papers.engine.arms_page import Entries, Part, in_sections, numbers_of
from locater_papers.engine.figures import Cells, Panel, Series, draw


def page(document: Mapping[str, Any]) -> Part:
    """Lines of Markdown, with (figure:NAME) where a figure's link goes, and the figures by name."""
    own = ((_propagation, ("a1",)), (_softmax, ("b1",)), (_gaussian, ("g1",)), (_training, ("d1",)))
    return in_sections(document, (*own, *SECTIONS))


def lead(document: Mapping[str, Any]) -> list[str]:
    """What LocAteR buys, where the runs that tell are at hand."""
    found = numbers_of(document)
    return [*answer(found), ""] if {"d8", "e1"} <= found.keys() else []


def _propagation(found: Entries) -> Part:
    panels = []
    for rank, held in found["a1"]["profiles"].items():
        if rank not in ("1", "16", "128", 1, 16, 128):
            continue
        count = len(held["profile"])
        at = [i / (count - 1) for i in range(count)]
        series = [
            Series("simulated", list(zip(at, held["profile"], strict=True)), "dots", 4),
            Series("closed form", list(zip(at, held["closed"], strict=True)), "line", 1),
            Series("exact mixture", list(zip(at, held["mixture"], strict=True)), "dashed", 0),
        ]
        panels.append(
            Panel(
                f"rank {rank}, M = 4, T = 64",
                "position (1 is the query)",
                "propagation probability",
                series,
                y_limits=(0, 1.05),
            )
        )
    lines = [
        "## a. The propagation probability", "", "![profiles](figure:propagation)", "",
        "| rank | T | map | walks | error of the closed form | standard error | mixture, in standard errors |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for c in found["a1"]["cases"]:
        numbers = f"{c['closed_error']:.3f} | {c['standard_error']:.4f} | {c['mixture_sigmas']:.1f}"
        lines.append(f"| {c['rank']} | {c['length']} | {c['map']} | {c['walks']:,} | {numbers} |")
    if "a2" in found:
        a2 = found["a2"]
        lines += [
            "",
            f"a2: at position {a2['position']} of {a2['length']}, W gives {a2['W']:.3f} and -W {a2['minus_W']:.3f}, with equal",
        ]
        lines += ["trace, tr W^2 and norm: the third moment matters."]
    if "a4" in found:
        lines += [
            "",
            "a4: error over |g1| by rank: " + ", ".join(f"{k} {v:.4f}" for k, v in found["a4"]["ratios"].items()) + ".",
        ]
    return lines, {"propagation": draw(panels)}


def _softmax(found: Entries) -> Part:
    phase = found["b1"]["phase"]
    rows, columns = [f"{m:g}" for m in phase["M"]], [f"{v:g}" for v in phase["variation"]]
    cells = [
        Cells(title, "standard deviation / mean of the eigenvalues", "M, mean self-logit", columns, rows, phase[name])
        for title, name in (
            ("centre of the true softmax", "centre"), ("Λ, from two moments", "Lambda"),
            ("entropy ratio of the true softmax", "entropy_ratio"),
        )
    ]  # fmt: skip
    lines = ["## b. Concentration and the true softmax", "", "![phase diagram](figure:phase)", ""]
    lines += [
        "Centre: mean position of the weight, 1 nearest, -1 farthest. Random-walk tokens, 64 directions, 128 tokens, the last one asking."
    ]
    figures = {"phase": draw(cells)}
    if "b2" in found:
        held = ", ".join(f"{name}: {value:.2f}" for name, value in found["b2"]["by_mean"].items())
        lines += ["", f"b2: rank correlation of variance with the weight on the nearest eighth, by mean: {held}."]
    if {"b4", "b5", "b6"} <= found.keys():
        more, figures["collapse"] = _collapse(found)
        lines += more
    if "b7" in found:
        held = ", ".join(f"{name}: {value:.2f}" for name, value in found["b7"]["stable_rank_over_head_size"].items())
        lines += ["", f"b7: median stable rank over head size, by concentration: {held}."]
    return lines, figures


def _collapse(found: Entries) -> tuple[list[str], str]:
    panels = [
        Panel(
            title, "entropy ratio", "residual kept", _families(held["frontier"]), x_limits=(0, 1.02), y_limits=(0, 1.02)
        )
        for title, held in (("tokens of equal norm", found["b4"]), ("raw walk", found["b6"]))
    ]
    best = "; ".join(
        f"{where}: concentrated {found[key]['concentrated']:.3f}, mean zero {found[key]['mean zero']:.3f}"
        for where, key in (("tokens of equal norm", "b5"), ("raw walk", "b6"))
    )
    lines = [
        "", "![both collapses](figure:collapse)", "",
        "Rank collapse is the bottom right, entropy collapse the left; each curve runs over the scale of the map, averaged over seeds.",
        f"The smaller of the two numbers at its best: {best}.",
    ]  # fmt: skip
    return lines, draw(panels)


def _families(frontier: Mapping[str, list[list[float]]]) -> list[Series]:
    return [
        Series(name, [(entropy, kept) for kept, entropy in points], "line", number)
        for number, (name, points) in enumerate(frontier.items())
    ]


def _gaussian(found: Entries) -> Part:
    layers = found["g1"]["layers"]
    panels = []
    for model in dict.fromkeys(entry["model"] for entry in layers):
        own = [entry for entry in layers if entry["model"] == model]
        series = [
            Series(kind, [(e["layer"], e[kind]["distance"] / e[kind]["normal_distance"]) for e in own], "line", number)
            for number, kind in enumerate(("input", "query", "key", "logit"))
        ]
        panels.append(Panel(model, "layer", "distance from normal / expected", series, y_limits=(0, 11)))
    lines = ["## g. Are features Gaussian?", "", "![distance from normal](figure:normality)", ""]
    lines += [
        "| model | layer | mean's share | "
        + " | ".join(f"{k}: kurtosis, distance (normal)" for k in ("input", "query", "key", "logit"))
        + " |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for e in layers:
        kinds = (e[k] for k in ("input", "query", "key", "logit"))
        cells = " | ".join(f"{k['kurtosis']:.2f}, {k['distance']:.3f} ({k['normal_distance']:.3f})" for k in kinds)
        lines.append(f"| {e['model']} | {e['layer']} | {e['mean_share']:.2f} | {cells} |")
    if "g6" in found:
        lines += ["", "Entropy of heads on held-out text (rank correlation, mean error in nats):", ""]
        lines += ["| model | normal tokens with its mean and covariance | weights alone |", "|---|---|---|"]
        for model, a in found["g6"]["models"].items():
            pairs = (f"{a[f'{k}_entropy_spearman']:.2f}, {a[f'{k}_entropy_error']:.2f}" for k in ("predicted", "prior"))
            lines.append(f"| {model} | {' | '.join(pairs)} |")
    return lines, {"normality": draw(panels)}


def _training(found: Entries) -> Part:
    held, how = found["d1"]["runs"], found["d1"]["settings"]
    base = held["no penalty"]
    series = [
        Series(
            arm,
            [(r["loss"] - b["loss"], r["entropy"] - b["entropy"]) for r, b in zip(runs, base, strict=True)],
            "dots",
            number,
        )
        for number, (arm, runs) in enumerate((k, v) for k, v in held.items() if k != "no penalty")
    ]
    panel = Panel("against no penalty, one dot per seed", "change of validation loss", "change of entropy", series)
    lines = [
        "## d. Parts of the penalty: direction of effects", "", "![training](figure:training)", "",
        f"A character model, {how['steps']} steps at {how['rate']:g}, strength {how['strength']:g}. Loss and entropy in nats on "
        "held-out text; M, tr W^2 and Frobenius^2 are means over heads. Figures by seed.", "",
        "| run | loss | entropy | M | tr W^2 | Frobenius^2 |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for arm, runs in held.items():
        cells = (
            ", ".join(f"{r[name]:.3f}" for r in runs)
            for name in ("loss", "entropy", "M", "trace_of_square", "frobenius_sq")
        )
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines, {"training": draw([panel])}
