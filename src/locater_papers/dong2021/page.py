"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from locater_papers.dong2021 import depth_page, products_page, tasks_page
from locater_papers.dong2021.bridge_page import bridge, left, seen, slowing_section, slows
from locater_papers.engine.arms_page import Entries, Part, Said, Sections, in_sections, in_short
from locater_papers.engine.figures import Panel, Series, draw


def page(document: Mapping[str, Any]) -> Part:
    """Lines of Markdown, with (figure:NAME) where a figure's link goes, and the figures by name."""
    sections: Sections = (
        (_contraction, ("a1", "a3", "a4", "a6", "a8", "a9")), (_bounds, ("b1", "b6")), (depth_page.section, ()), (products_page.section, ()),
        (_lengths, ("e1", "e4")), (tasks_page.section, ()), (_circle, ("g1",)), (bridge, ("h1", "h2", "h3", "h6", "h8", "h9", "h10")),
        (slowing_section, ("h11", "h12", "h13")),
    )  # fmt: skip
    return in_sections(document, sections)


def lead(document: Mapping[str, Any]) -> list[str]:
    """What collapses, how fast, and what stops it, for a reader who knows nothing of the paper; only what was
    measured.
    """
    numbers = {entry["id"]: entry["numbers"] for entry in document["claims"]}
    said: Said = (
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
        (("h11", "h13"), lambda v: f"LocAteR, which holds the mean of that map, {slows(v['h11'], v['h13'])}: a gain of "
         f"{v['h11']:.1f} decades after two layers of drawn heads, of {v['h13']:.1f} after three of a trained model whose skips are taken "
         f"out. {left(numbers['h13']['models'])}"),
    )  # fmt: skip
    return in_short(document, said)


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
        [Series(name, seen(kinds[name]), "line", colour) for name, colour in styles.items()]
        + [Series("a whole block", seen(kinds["a whole block"]), "dashed", 3)],
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
        lines.append(
            f"| {r['model']} | {r['layers']} | {r['heads']} | {r['mean']:.3f} ({s['mean']:.3f}) | {modes} | {shares} |"
        )
    lines += [
        "", f"Weighed by what a trained model's skips carry ({e4['mean_skip']:.2f} of the stream a layer), the mean length is",
        f"{e4['mean_length']:.2f}, and paths through at most one layer have {e4['weights'][0] + e4['weights'][1]:.0%} of the weight.",
    ]  # fmt: skip
    return lines, {"lengths": draw([first, second])}


# --- g ----------------------------------------------------------------------------------------------------------------


def _circle(found: Entries) -> Part:
    held = found["g1"]["variants"]
    shown = {"merged": "attention, tokens merge", "apart": "attention, tokens stay apart"}
    pairs = [(title, held["attention"][kind]) for kind, title in shown.items()] + [
        ("x + attention", held["x + attention"]["apart"])
    ]
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
    ends = [
        Series(name, [(path[at][0], path[at][1]) for path in pair], "dots", n)
        for name, at, n in (("start", 0, 4), ("end", -1, 2))
    ]
    lines = [Series(f"token {n + 1}", [(p[0], p[1]) for p in path], "line", n) for n, path in enumerate(pair)]
    return Panel(title, "", "", [*lines, *ends], x_limits=(-0.56, 0.56), y_limits=(-0.56, 0.56), clip=True)
