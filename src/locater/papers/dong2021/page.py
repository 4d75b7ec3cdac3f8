"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locater.papers.dong2021 import depth, products, slowing, tasks
from locater.papers.figures import Contour, Field, Panel, Series, draw

Entries = Mapping[str, Mapping[str, Any]]
Part = tuple[list[str], dict[str, str]]
RANK, ENTROPY, LAMBDA = "#8c2f16", "#16406f", "#555"  # colours of the three lines of a phase diagram


def page(document: Mapping[str, Any]) -> Part:
    """Lines of Markdown, with (figure:NAME) where a figure's link goes, and the figures by name."""
    found = {entry["id"]: entry["numbers"] for entry in document["claims"] if entry["measured"] is not None}
    lines, figures = list[str](), dict[str, str]()
    sections: tuple[tuple[Callable[[Entries], Part], tuple[str, ...]], ...] = (
        (_contraction, ("a1", "a3", "a4", "a6", "a8", "a9")), (_bounds, ("b1", "b6")), (depth.section, ()), (products.section, ()),
        (_lengths, ("e1", "e4")), (tasks.section, ()), (_circle, ("g1",)), (_bridge, ("h1", "h2", "h3", "h6", "h8", "h9", "h10")),
        (_slowing, ("h11", "h12", "h13")),
    )  # fmt: skip
    for section, needs in sections:
        if found.keys() >= set(needs):
            more, drawn = section(found)
            lines += ["", *more] if more else []
            figures |= drawn
    return lines, figures


def lead(document: Mapping[str, Any]) -> list[str]:
    """What collapses, how fast, and what stops it, for a reader who knows nothing of the paper; only what was measured."""
    value = {entry["id"]: entry["measured"] for entry in document["claims"] if entry["measured"] is not None}
    numbers = {entry["id"]: entry["numbers"] for entry in document["claims"]}
    said = (
        (("a1", "c4"), lambda v: "Attention averages tokens. Left alone it makes them equal: what differs between them falls to its "
         f"power of {v['a1']:.2f} in every layer. Without the skip around attention, encoders at initialisation keep "
         f"{v['c4']:.1g} of it after two layers."),
        (("c6", "c7", "c8"), lambda v: "The skip stops it: whole models keep "
         f"{v['c6']:.2f} (BERT), {v['c7']:.2f} (ALBERT) and {v['c8']:.2f} (XLNet) at layer 12."),
        (("a5", "a7"), lambda v: "MLPs and LayerNorm do not: with either of them alone, log10 of what is left after twelve layers is "
         f"{v['a5']:.0f} and {v['a7']:.0f}."),
        (("a8",), lambda v: f"A causal mask turns the fall into a factor of {v['a8']:.2f} a layer, whatever the weights: earlier tokens "
         "never see later ones. Nothing in the paper says so."),
        (("d1", "d3"), lambda v: f"Training slows mixing: a product of attention maps nears rank one by {v['d1']:.2f} decades a layer at "
         f"initialisation and by {v['d3']:.2f} in a trained encoder."),
        (("h1", "h3"), lambda v: "Its opposite, attention so sharp that every token copies one other, is the far end of the same axis: "
         f"{100 * v['h1']:.1f} % of heads have both faults, and three moments of the query-key map explain {100 * v['h3']:.0f} % of each "
         "or more."),
        (("h11", "h13"), lambda v: f"LocAteR, which holds the mean of that map, {_slows(v['h11'], v['h13'])}: a gain of "
         f"{v['h11']:.1f} decades after two layers of drawn heads, of {v['h13']:.1f} after three of a trained model whose skips are taken "
         f"out. {_left(numbers['h13']['models'])}"),
    )  # fmt: skip
    lines = [f"- {tell(value)}" for needs, tell in said if value.keys() >= set(needs)]
    return ["## In short", "", *lines, ""] if lines else []


def _slows(*gains: float) -> str:
    """`slows it` where every gain is above 0.

    >>> _slows(2.0, 1.0), _slows(-2.0, -1.0), _slows(2.0, -1.0)
    ('slows it', 'does not slow it', 'slows one of two')
    """
    above = sum(gain > 0 for gain in gains)
    return "slows it" if above == len(gains) else "slows one of two" if above else "does not slow it"


def _left(models: Mapping[str, Any]) -> str:
    """What is left at the end of trained models, cut and whole; float64 shows nothing of a share under 1e-16."""
    cut, whole = models["LocAteR, target 2"]["cut"], models["no penalty"]["whole"][-1]
    share = "under 1e-16" if cut[-1] < 1e-16 else f"{cut[-1]:.2g}"
    return f"After {len(cut) - 1} such layers what differs is {share} of the tokens' size, and {whole:.2f} in whole models."


# --- a ----------------------------------------------------------------------------------------------------------------


def _contraction(found: Entries) -> Part:
    orders, kinds = found["a1"]["orders"], found["a4"]["depth"]
    sizes = [math.sqrt(a * b) for a, b in zip(orders["sizes"], orders["sizes"][1:], strict=False)]
    names = {"free": "no mask", "causal": "causal mask"}
    first = Panel(
        "order of contraction of one layer", "how far apart tokens are", "slope of log residual",
        [Series(name, list(zip(sizes, orders[key], strict=True)), "line", n) for n, (key, name) in enumerate(names.items())],
        x_scale="log", x_limits=(0.003, 0.3), y_limits=(0, 3.5),
    )  # fmt: skip
    styles = {"attention": 0, "with MLPs": 1, "with LayerNorm": 2, "with skips": 3, "causal mask": 4}
    second = Panel(
        "share of the residual, float64", "layer", "residual / size of tokens",
        [Series(name, _seen(kinds[name]), "line", colour) for name, colour in styles.items()]
        + [Series("a whole block", _seen(kinds["a whole block"]), "dashed", 3)],
        y_scale="log", y_limits=(1e-17, 2.0),
    )  # fmt: skip
    exact, ends = found["a3"]["exact"], {name: shares[-1] for name, shares in kinds.items()}
    third = Panel(
        "residual of pure attention, exact", "layer", "log10 of the residual",
        [*_dotted("median of draws", list(enumerate(exact))), Series("three times the layer before", _tripled(exact), "dashed", 1)],
    )  # fmt: skip
    gains = ", ".join(f"{g:g}: {n:.1f}" for g, n in zip(found["a6"]["gains"], found["a6"]["layers"], strict=True))
    lines = [
        "## a. Cubic contraction", "", "![contraction](figure:contraction)", "",
        "16 tokens, width 8, Gaussian maps that keep a token's size. On the right tokens are held as shared part and residual, so that no",
        "rounding ends the fall: log10 of the residual is " + ", ".join(f"{x:.1f}" for x in exact) + " at layers 0, 1, 2 ...", "",
        f"Layers until the share is under 1e-6: {found['a9']['alone']:.1f} for attention alone; with MLPs by their gain, {gains}.",
        "MLPs that keep a token's size hasten the fall, because their shifts add to what tokens share; steeper ones slow it by less than",
        "a layer.", "",
        f"After 12 layers the share (geometric mean of draws) is {ends['with skips']:.2f} with skips and {ends['causal mask']:.1e} under a",
        f"causal mask, a factor of two a layer. In blocks with everything, norms after the sums, it is {ends['a whole block']:.1e}: what",
        "is added there is as large as the stream. A skip ends the doubly exponential fall, and no more than that.",
    ]  # fmt: skip
    return lines, {"contraction": draw([first, second, third])}


def _dotted(name: str, points: Sequence[tuple[float, float]]) -> list[Series]:
    return [Series(name, points, "line", 0), Series("", points, "dots", 0)]


def _seen(shares: Sequence[float]) -> list[tuple[float, float]]:
    """Until float64 has nothing left to show."""
    last = next((n for n, share in enumerate(shares) if share < 1e-16), len(shares) - 1)
    return [(float(n), max(share, 1e-17)) for n, share in enumerate(shares[: last + 1])]


def _tripled(exact: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(n + 1), 3 * x) for n, x in enumerate(exact[:-1]) if n >= 2]


# --- b ----------------------------------------------------------------------------------------------------------------


def _bounds(found: Entries) -> Part:
    crowds, b1 = found["b6"]["crowds"], found["b1"]
    panel = Panel(
        "a crowd around one key", "tokens", "residual after one layer",
        [
            Series(name, [(c["tokens"], c[key]) for c in crowds], style, colour)  # type: ignore[arg-type]
            for name, key, style, colour in (
                ("residual, at least", "residual", "line", 1), ("bound with 4", "stated", "line", 0),
                ("bound with sqrt(2 n)", "proved", "dashed", 4),
            )
        ],
        x_scale="log", y_scale="log",
    )  # fmt: skip
    share = Panel(
        "random draws: largest share of the bound", "tokens", "residual / bound",
        _dotted("", [(float(n), x) for n, x in b1["by_tokens"].items()]),
        y_scale="log", x_limits=(0, 22), y_limits=(1e-4, 1.0),
    )  # fmt: skip
    by_size = ", ".join(f"{size}: {x:.4f}" for size, x in b1["by_size"].items())
    lines = [
        "## b. The bounds", "", "![bounds](figure:bounds)", "",
        f"Random draws use little of what the bound allows, the less the more tokens there are: by distance of tokens, {by_size};",
        f"median {b1['median']:.1e}. The constant 4 is too small for inputs built for it. From {found['b6']['crossing']:,} tokens on, one",
        "key that all see and half of the tokens that see themselves as well exceed it: the largest column adds up what queries do to the",
        "busiest key.",
        "", "| tokens | residual, at least | bound with 4 | bound with sqrt(2 n) |", "|---|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {c['tokens']:,} | {c['residual']:.1f} | {c['stated']:.1f} | {c['proved']:.0f} |" for c in crowds]
    return lines, {"bounds": draw([panel, share])}


# --- e ----------------------------------------------------------------------------------------------------------------


def _lengths(found: Entries) -> Part:
    e1, e4 = found["e1"], found["e4"]
    first = Panel(
        "12 layers of 12 heads", "path length", "share of paths", _dotted("", list(enumerate(e1["bert"]))),
    )  # fmt: skip
    second = Panel(
        "6 trained layers of 2 heads", "path length", "share",
        [
            Series("of paths", list(enumerate(e4["shares"])), "dashed", 4), Series("of weight", list(enumerate(e4["weights"])), "line", 0),
            Series("of the residual predicted", list(enumerate(e4["contributions"])), "line", 1),
        ],
    )  # fmt: skip
    lines = [
        "## e. How long paths are", "", "![path lengths](figure:lengths)", "",
        "| model | layers | heads | mean length (stated) | most frequent | its share (stated) | share of the longest (stated) |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in e1["rows"]:
        s = r["stated"]
        modes = ", ".join(str(k) for k in r["modes"])
        shares = f"{r['at_mode']:.4f} ({s['at_mode']:.4f}) | {r['longest']:.4f} ({s['longest']:.4f})"
        lines.append(f"| {r['model']} | {r['layers']} | {r['heads']} | {r['mean']:.3f} ({s['mean']:.3f}) | {modes} | {shares} |")
    lines += [
        "", f"Weighed by what a trained model's skips carry ({e4['mean_skip']:.2f} of the stream a layer), the mean length is",
        f"{e4['mean_length']:.2f}, and paths through at most one layer have {e4['weights'][0] + e4['weights'][1]:.0%} of the weight.",
    ]  # fmt: skip
    return lines, {"lengths": draw([first, second])}


# --- g ----------------------------------------------------------------------------------------------------------------


def _circle(found: Entries) -> Part:
    held = found["g1"]["variants"]
    shown = {"merged": "attention, tokens merge", "apart": "attention, tokens stay apart"}
    pairs = [(title, held["attention"][kind]) for kind, title in shown.items()] + [("x + attention", held["x + attention"]["apart"])]
    panels: list[Panel] = [_walk(title, pair) for title, pair in pairs if pair]
    steps = [10.0 * n for n in range(len(held["attention"]["share_merged"]))]
    panels.append(
        Panel(
            "seeds whose tokens have merged", "step", "share",
            [Series(name, list(zip(steps, v["share_merged"], strict=True)), "line", n) for n, (name, v) in enumerate(held.items())],
            y_limits=(-0.05, 1.45), legend="top right",
        )
    )  # fmt: skip
    errors = ", ".join(f"{name}: {v['error']:.1f}" for name, v in held.items())
    lines = [
        "## g. Points on a circle", "", "![circle](figure:circle)", "",
        "Two points opposite on a circle, moved on by a layer that learnt to move them one step, 300 times, or until they",
        f"merge; of each kind a seed from its middle. Error of one step after training, in steps: {errors}.",
        "Whether tokens merge is a matter of the seed, unless the skip is around all of it.",
    ]  # fmt: skip
    return lines, {"circle": draw(panels)}


def _walk(title: str, pair: Sequence[Sequence[Sequence[float]]]) -> Panel:
    """Both tokens on the plane, from their start to where they end."""
    ends = [Series(name, [(path[at][0], path[at][1]) for path in pair], "dots", n) for name, at, n in (("start", 0, 4), ("end", -1, 2))]
    lines = [Series(f"token {n + 1}", [(p[0], p[1]) for p in path], "line", n) for n, path in enumerate(pair)]
    return Panel(title, "", "", [*lines, *ends], x_limits=(-0.56, 0.56), y_limits=(-0.56, 0.56), clip=True)


# --- h ----------------------------------------------------------------------------------------------------------------

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


def _bridge(found: Entries) -> Part:
    phase, rules, h8, h9 = found["h1"]["phase"], found["h6"]["rules"], found["h8"], found["h9"]
    panels = [_phase(phase, kind, causal) for causal in (False, True) for kind in ("equal norm", "raw walk", "independent")]
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
    ways = {"widens": lambda r: r >= 0.5, "narrows": lambda r: r <= -0.5, "neither widens nor narrows": lambda r: -0.5 < r < 0.5}
    kinds = {way: " and ".join(kind for kind, r in correlation.items() if holds(r)) for way, holds in ways.items()}
    said = [f"{way} {{}} of {names} tokens" for way, names in kinds.items() if names]
    return "Concentration " + ", ".join(text.format("that" if n else "the window") for n, text in enumerate(said))


def _least(held: Mapping[str, Any], name: str) -> float:
    return min(float(by[name]) for by in held["by_tokens"].values())


def _phase(phase: Mapping[str, Any], kind: str, causal: bool) -> Field:
    name = f"{kind}{', causal' if causal else ''}"
    whole, turning = phase[f"{name}, S/F = 1"], phase[f"{name}, S/F = 0"]
    values = [[_collapse(k, e) for k, e in zip(*rows, strict=True)] for rows in zip(whole["kept"], whole["entropy"], strict=True)]
    lines = [Contour(whole["Λ"], 0.1, LAMBDA, "dotted")]
    lines += [Contour(plane["kept"], 0.5, RANK, style) for plane, style in ((whole, "line"), (turning, "dashed"))]  # type: ignore[arg-type]
    lines += [Contour(plane["entropy"], 0.5, ENTROPY, style) for plane, style in ((whole, "line"), (turning, "dashed"))]  # type: ignore[arg-type]
    title = f"{TITLES[kind]}, {'causal mask' if causal else 'no mask'}"
    return Field(title, "√F, scale of the map", "M, self-logit", phase["size"], phase["M"], values, lines, _fitting(phase, values, name))


def _fitting(phase: Mapping[str, Any], values: Sequence[Sequence[float | None]], name: str) -> list[tuple[float, float, str]]:
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


def _slowing(found: Entries) -> Part:
    stacks, h11, h12, h13 = found["h11"]["stacks"], found["h11"], found["h12"], found["h13"]
    order = {
        "drawn": ("as drawn", "line", 4),
        "penalty, target 2": ("target 2", "line", 0), "mean zero, F of target 2": ("its F, mean 0", "dashed", 0),
        "penalty, target 8": ("target 8", "line", 1), "mean zero, F of target 8": ("its F, mean 0", "dashed", 1),
    }  # fmt: skip
    first = Panel(
        "drawn heads, penalty alone", "layer", "residual / size of tokens",
        [Series(said, _seen(stacks[name]["shares"]), style, colour) for name, (said, style, colour) in order.items()],  # type: ignore[arg-type]
        y_scale="log", y_limits=(1e-17, 2.0), legend="bottom right",
    )  # fmt: skip
    arms = {"no penalty": 4, "LocAteR, target 2": 0, "LocAteR, target 8": 1}
    second = Panel(
        "models that sort, skips and MLPs cut", "layer", "residual / size of tokens",
        [Series(arm, _seen(h13["models"][arm]["cut"]), "line", colour) for arm, colour in arms.items()]
        + [Series("whole model, no penalty", _seen(h13["models"]["no penalty"]["whole"]), "dashed", 4)],
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
        f"of trained models without skips and MLPs (target 8: {_range(h13['target 8'])}). {_left(h13['models'])}",
    ]  # fmt: skip
    return lines, {"slowing": draw([first, second])}


def _range(values: Sequence[float]) -> str:
    """Over seeds.

    >>> _range([2.0, 1.0, 3.0])
    '+1.0 to +3.0'
    """
    return f"{min(values):+.1f} to {max(values):+.1f}"
