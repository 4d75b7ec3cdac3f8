"""The report on h: the phase diagram of both collapses, what entropy buys, and whether LocAteR slows rank collapse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locater_papers.dong2021 import slowing
from locater_papers.engine.arms_page import Entries, Part
from locater_papers.engine.figures import Contour, Field, Panel, Series, draw

RANK, ENTROPY, LAMBDA = "#8c2f16", "#16406f", "#555"  # colours of the three lines of a phase diagram
NONE = (0.6, 26.0, "no such head")
SHARP = [(15.0, 2.0, "entropy"), (15.0, 1.5, "collapse")]
WORDS = {
    "equal norm": [(0.42, 0.9, "rank collapse"), (2.9, 8.0, "neither"), *SHARP, NONE, (0.5, 2.2, "Λ = 0.1")],
    "raw walk": [(0.8, 0.9, "rank collapse"), (10.0, 4.0, "neither"), NONE],
    "independent": [(0.42, 0.9, "rank collapse"), *SHARP, NONE],
    "equal norm, causal": [(0.9, 2.6, "neither"), *SHARP, NONE],
    "raw walk, causal": [(2.0, 3.4, "neither"), NONE],
    "independent, causal": [(0.36, 0.8, "rank collapse"), *SHARP, NONE],
}
MEANT: dict[str, Callable[[float], bool]] = {  # the sign of `_collapse`
    "rank collapse": lambda value: value < 0, "neither": lambda value: value == 0,
    "entropy": lambda value: value > 0, "collapse": lambda value: value > 0,
}  # fmt: skip
TITLES = {"equal norm": "walk, tokens of equal norm", "raw walk": "raw walk", "independent": "independent tokens"}


def bridge(found: Entries) -> Part:
    phase, rules, h8, h9 = found["h1"]["phase"], found["h6"]["rules"], found["h8"], found["h9"]
    panels = [
        _phase(phase, kind, causal) for causal in (False, True) for kind in ("equal norm", "raw walk", "independent")
    ]
    h10, both, free = found["h10"], max(found["h1"]["by_tokens"].values()), h8["by_tokens"].values()
    shares = "; ".join(f"{kind} {x:.0%}, causal {h8['causal'][kind]:.0%}" for kind, x in h8["by_tokens"].items())
    table = "; ".join(f"{name} {x:.2f}" for name, x in rules.items())
    octaves = [f"| {kind} | " + " | ".join(f"{x:.1f}" for x in held) + " |" for kind, held in h9["octaves"].items()]
    lines = [
        "## h. Two collapses, one map", "", "![phase diagram](figure:bridge)", "",
        "Every cell is a head with self-logit M and scale √F, values and output the identity, on tokens that the title names: red where it",
        "keeps less than half of the residual, blue where it keeps less than half of the entropy, green where it keeps both. Lines are the",
        "two boundaries, of symmetric maps (S/F = 1, drawn through, as the cells) and of maps that turn as much as they stretch (S/F = 0,",
        "dashed). Dotted: Λ = 0.1.", "",
        f"- Neither collapse: {min(free):.0%} to {max(free):.0%} of heads without a mask, by kind of tokens. Both: {both:.1%} at most.",
        f"- Three moments explain {_least(found['h3'], 'kept'):.1%} or more of the variance of the residual kept and",
        f"  {_least(found['h3'], 'entropy'):.1%} or more of that of the entropy, over spectra of four shapes.",
        f"- One number: balanced accuracy of its best interval is {table}. Two, scale F for entropy and k for rank",
        f"  (k at least {h10['k']:.2f}, F at most {h10['F']:.0f}): {h10['chosen_here']:.2f} where chosen; on other seeds, h10.",
        f"- {_opens(h9['correlation'])}:", "",
        "| octaves of scale without collapse, by M / sqrt(d F) | " + " | ".join(f"{c:g}" for c in h9["concentration"]) + " |",
        "|---" * (len(h9["concentration"]) + 1) + "|", *octaves, "",
        f"Share of the grid with neither: {shares}.", "",
        "![price](figure:price)", "",
        "Left, what attention keeps of the residual is paid for in entropy; the line is the bound of h2 for tokens equally far from",
        "their mean. Right, the window as in the table.",
    ]  # fmt: skip
    return lines, {"bridge": draw(panels, columns=3), "price": draw([_price(found["h2"]["points"]), _window(h9)])}


def _opens(correlation: Mapping[str, float]) -> str:
    """What concentration does to the window, by kind of tokens.

    >>> _opens({"raw walk": 0.9, "equal norm": 1.0, "independent": -0.6})
    'Concentration widens the window of raw walk and equal norm tokens, narrows that of independent tokens'
    >>> _opens({"raw walk": 0.1})
    'Concentration neither widens nor narrows the window of raw walk tokens'
    """
    ways = {
        "widens": lambda r: r >= 0.5,
        "narrows": lambda r: r <= -0.5,
        "neither widens nor narrows": lambda r: -0.5 < r < 0.5,
    }
    kinds = {way: " and ".join(kind for kind, r in correlation.items() if holds(r)) for way, holds in ways.items()}
    said = [f"{way} {{}} of {names} tokens" for way, names in kinds.items() if names]
    return "Concentration " + ", ".join(text.format("that" if n else "the window") for n, text in enumerate(said))


def _least(held: Mapping[str, Any], name: str) -> float:
    return min(float(by[name]) for by in held["by_tokens"].values())


def _phase(phase: Mapping[str, Any], kind: str, causal: bool) -> Field:
    name = f"{kind}{', causal' if causal else ''}"
    whole, turning = phase[f"{name}, S/F = 1"], phase[f"{name}, S/F = 0"]
    values = [
        [_collapse(k, e) for k, e in zip(*rows, strict=True)]
        for rows in zip(whole["kept"], whole["entropy"], strict=True)
    ]
    lines = [Contour(whole["Λ"], 0.1, LAMBDA, "dotted")]
    lines += [Contour(plane["kept"], 0.5, RANK, style) for plane, style in ((whole, "line"), (turning, "dashed"))]  # type: ignore[arg-type]
    lines += [Contour(plane["entropy"], 0.5, ENTROPY, style) for plane, style in ((whole, "line"), (turning, "dashed"))]  # type: ignore[arg-type]
    title = f"{TITLES[kind]}, {'causal mask' if causal else 'no mask'}"
    return Field(
        title,
        "√F, scale of the map",
        "M, self-logit",
        phase["size"],
        phase["M"],
        values,
        lines,
        _fitting(phase, values, name),
    )


def _fitting(
    phase: Mapping[str, Any], values: Sequence[Sequence[float | None]], name: str
) -> list[tuple[float, float, str]]:
    """Those words of a diagram whose cell is as they say."""

    def nearest(grid: Sequence[float], at: float) -> int:
        return min(range(len(grid)), key=lambda n: abs(math.log(grid[n] / at)))

    def fits(x: float, y: float, text: str) -> bool:
        value = values[nearest(phase["M"], y)][nearest(phase["size"], x)]
        if text == NONE[2]:
            return value is None
        return text.startswith("Λ") or (value is not None and MEANT[text](value))

    return [word for word in WORDS[name] if fits(*word)]


def _collapse(kept: float | None, entropy: float | None) -> float | None:
    """0 where neither happens; towards -1 as the residual goes, towards 1 as the entropy does."""
    if kept is None or entropy is None:
        return None
    rank, sharp = max(0.0, 1 - 2 * kept), max(0.0, 1 - 2 * entropy)
    return -rank if rank > sharp else sharp


def _price(points: Sequence[Sequence[float]]) -> Panel:
    lost = [10 ** (n / 10) for n in range(-30, 8)]
    return Panel(
        "residual kept against entropy lost", "log n - H, nats", "residual kept",
        [
            Series("a head each, equal norm", [(max(a, 1e-3), max(b, 1e-2)) for a, b in points], "dots", 0),
            Series("sqrt(2 (log n - H))", [(x, math.sqrt(2 * x)) for x in lost], "line", 1),
        ],
        x_scale="log", y_scale="log", x_limits=(1e-3, 6.0), y_limits=(1e-2, 4.0),
    )  # fmt: skip


def _window(h9: Mapping[str, Any]) -> Panel:
    at = h9["concentration"]
    return Panel(
        "the window between the collapses", "M / sqrt(d F): 0 mean zero, 1 a multiple of the identity", "octaves of scale",
        [Series(name, list(zip(at, held, strict=True)), "line", n) for n, (name, held) in enumerate(h9["octaves"].items())],
        y_limits=(0, 4.5),
    )  # fmt: skip


def slowing_section(found: Entries) -> Part:
    stacks, h11, h12, h13 = found["h11"]["stacks"], found["h11"], found["h12"], found["h13"]
    order = {
        "drawn": ("as drawn", "line", 4),
        "penalty, target 2": ("target 2", "line", 0), "mean zero, F of target 2": ("its F, mean 0", "dashed", 0),
        "penalty, target 8": ("target 8", "line", 1), "mean zero, F of target 8": ("its F, mean 0", "dashed", 1),
    }  # fmt: skip
    first = Panel(
        "drawn heads, penalty alone", "layer", "residual / size of tokens",
        [Series(said, seen(stacks[name]["shares"]), style, colour) for name, (said, style, colour) in order.items()],  # type: ignore[arg-type]
        y_scale="log", y_limits=(1e-17, 2.0), legend="bottom right",
    )  # fmt: skip
    arms = {"no penalty": 4, "LocAteR, target 2": 0, "LocAteR, target 8": 1}
    second = Panel(
        "models that sort, skips and MLPs cut", "layer", "residual / size of tokens",
        [Series(arm, seen(h13["models"][arm]["cut"]), "line", colour) for arm, colour in arms.items()]
        + [Series("whole model, no penalty", seen(h13["models"]["no penalty"]["whole"]), "dashed", 4)],
        y_scale="log", y_limits=(1e-17, 2.0),
    )  # fmt: skip
    accuracy = ", ".join(f"{arm}: {held['accuracy']:.3f}" for arm, held in h13["models"].items())
    moved = "; ".join(f"{name}: M {s['M']:.2f}, √F {s['size']:.2f}" for name, s in stacks.items())
    lines = [
        "### Does LocAteR slow rank collapse?", "", "![slowing](figure:slowing)", "",
        f"Left, a stack of attention and LayerNorm, tokens of equal norm: {moved}.",
        f"Right, models of 6 layers after {h13['steps']} steps; accuracy of the whole model: {accuracy}.",
        f"At target 2, decades gained by the penalty: {_range(h11['by_seed'])} after {slowing.SHOWN} layers of drawn heads,",
        f"{_range(h12['by_seed'])} over maps of the same F and mean zero; {_range(h13['by_seed'])} after {slowing.HALFWAY} layers",
        f"of trained models without skips and MLPs (target 8: {_range(h13['target 8'])}). {left(h13['models'])}",
    ]  # fmt: skip
    return lines, {"slowing": draw([first, second])}


def _range(values: Sequence[float]) -> str:
    """Over seeds.

    >>> _range([2.0, 1.0, 3.0])
    '+1.0 to +3.0'
    """
    return f"{min(values):+.1f} to {max(values):+.1f}"


def left(models: Mapping[str, Any]) -> str:
    """What is left at the end of trained models, cut and whole; float64 shows nothing of a share under 1e-16."""
    cut, whole = models["LocAteR, target 2"]["cut"], models["no penalty"]["whole"][-1]
    share = "under 1e-16" if cut[-1] < 1e-16 else f"{cut[-1]:.2g}"
    return f"After {len(cut) - 1} such layers what differs is {share} of the tokens' size, and {whole:.2f} in whole models."


def slows(*gains: float) -> str:
    """`slows it` where every gain is above 0.

    >>> slows(2.0, 1.0), slows(-2.0, -1.0), slows(2.0, -1.0)
    ('slows it', 'does not slow it', 'slows one of two')
    """
    above = sum(gain > 0 for gain in gains)
    return "slows it" if above == len(gains) else "slows one of two" if above else "does not slow it"


def seen(shares: Sequence[float]) -> list[tuple[float, float]]:
    """Until float64 has nothing left to show."""
    last = next((n for n, share in enumerate(shares) if share < 1e-16), len(shares) - 1)
    return [(float(n), max(share, 1e-17)) for n, share in enumerate(shares[: last + 1])]
