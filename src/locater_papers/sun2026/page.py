"""The report's own part: norms, the first position, trained models and the runs, from the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locater_papers.engine.arms import uniform_first
from locater_papers.engine.arms_page import (
    Entries,
    Part,
    Said,
    carried_in,
    failed,
    failed_said,
    in_sections,
    in_short,
    means_table,
    numbers_of,
    sinks_said,
)
from locater_papers.engine.figures import Panel, Series, draw
from locater_papers.engine.mechanism_runs import BASE
from locater_papers.engine.sink_runs import arm_means, sinks_section
from locater_papers.engine.strips import strips
from locater_papers.sun2026.metrics import LENGTH, THRESHOLD

UNIFORM = uniform_first(BASE.length)  # the first token's share of rows under uniform attention
NAMES = {
    "softmax": "plain (heads of 64)", "heads=32": "heads of 8", "heads=16": "heads of 16", "heads=2": "heads of 128",
    "norm=sandwich": "sandwich norms", "norm=post": "norm of the sum", "mlp=gelu": "GELU", "mlp=none": "no MLP", "decay=0.0": "no decay",
    "gated": "gate per head", "gated(per=element)": "gate per element",
}  # fmt: skip


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    return in_sections(
        document, ((_norms, ("b1",)), (_first, ("c1",)), (_models, ("d3",)), (_training, ()), (_sinks, ("f1",)))
    )


def lead(document: Mapping[str, Any]) -> list[str]:
    """What spikes and sinks are and what was seen of them, for a reader who knows nothing of the paper."""
    held = numbers_of(document)
    weight, spike = arm_means(held), arm_means(held, "spike_ratio")
    said: Said = (
        (("a4", "a5"), lambda v: f"A sink is a key that gets more than {THRESHOLD:g} of what queries give on average. The measure is sound "
         f"at {LENGTH} tokens ({v['a5']:.1%} of random heads pass) and means nothing on short texts: uniform attention passes up to "
         f"{v['a4']:.0f} tokens."),
        (("b1", "b5"), lambda v: "A spike is one huge entry of a token's hidden state. RMSNorm turns tokens with a spike into the same "
         f"vector: their cosine is {v['b1']:.3f} at 1000 medians and a width of 4096. How large a spike must be for that grows with the "
         f"root of the width: {held['b1']['needed']['4096']:.0f} medians at 4096, {held['b1']['needed']['64']:.0f} at 64. The usual "
         "criterion of 1000 is that of one width."),
        (("b8",), lambda v: f"Alike is not sparse: at that size {v['b8']:.0%} of the entries behind the norm are under 0.01."),
        (("c1", "c3"), lambda v: "At the first position causal softmax is a fixed linear map, whatever queries and keys are (error "
         f"{v['c1']:.0e}). With a gate, a sink logit or sigmoid weights it is not: a linear fit has R² = {v['c3']:.2f} at most."),
        (("d3", "d14"), lambda v: f"Of the small trained models at hand {v['d3']:.0%} have a massive activation, and their largest sink "
         f"ratio is {v['d14']:.2f}" + (": what the paper explains is not there at this size." if max(v["d3"], v["d14"]) == 0 else ".")),
        (("d3", "d4", "d8", "d9"), lambda v: f"A step up is there in miniature. In {held['d3']['stepping']} the first token comes to stand "
         f"out by a factor of {v['d4']:.1f} in a single MLP, which acts as its quadratic form there (cosine {v['d8']:.2f}) and not on "
         f"later tokens ({v['d9']:.2f})."),
        (("d6", "d13"), lambda v: f"It is the {'token' if v['d13'] > 0.5 else 'position'} that does it: put in the middle of the "
         f"text the same token has {v['d13']:.2f} of its size, and {v['d6']:.0%} of the text's tokens spike when put first, where "
         "the paper has 98 %."),
        (("e1", "e2"), lambda v: f"The plain model trained here, of {BASE.layers} layers and width {BASE.width}, has a sink ratio of "
         f"{v['e1']:.2f} and a largest entry of {v['e2']:.0f} "
         "medians."),
        (("e1", "e5"), lambda v: sinks_said(held, (f"heads of 8 change its share by {v['e3']:+.4f}, " if "e3" in v else "")
         + f"a gate per head changes its share by {v['e5']:+.4f}", BASE.length)),
        (("f1", "f2", "f5"), lambda v: "In one layer on a source where a head has nothing to add most of the time, the first token "
         f"is given {weight['softmax']:.2f}, with heads of 8 {weight['heads=8']:.2f}, with sandwich norms {weight['norm=sandwich']:.2f}, "
         f"with GELU {weight['mlp=gelu']:.2f}. The largest entry of the stream is {spike['softmax']:.0f} medians there."),
        (("e14",), lambda v: f"Over all arms, spikes and the first token's share have a rank correlation of {v['e14']:.2f}."),
    )  # fmt: skip
    return in_short(document, said)


def _sinks(found: Entries) -> Part:
    names = {
        "softmax": "plain (one head of 64)",
        "heads=2": "heads of 32",
        "heads=4": "heads of 16",
        "heads=8": "heads of 8",
    }
    return sinks_section(found, "f", NAMES | names)


def _norms(found: Entries) -> Part:
    curves, needed = found["b1"]["curves"], found["b1"]["needed"]
    widths = [width for width in curves if width != "1024"]
    first = Panel(
        "cosine of spike tokens after RMSNorm", "spike over the median |h|", "cosine",
        [s for n, width in enumerate(widths) for s in (
            Series(f"width {width}", [(e["medians"], e["predicted"]) for e in curves[width]], "line", n),
            Series("", [(e["medians"], e["cosine"]) for e in curves[width]], "dots", n))]
        + [Series("1000 medians", [(1000.0, 0.0), (1000.0, 1.0)], "dashed", 4)],
        x_scale="log", y_limits=(-0.05, 1.05), legend="top left",
    )  # fmt: skip
    second = Panel(
        "share of entries under 0.01 after RMSNorm", "spike over the median |h|", "share",
        [s for n, width in enumerate(widths) for s in (
            Series(f"width {width}", [(e["medians"], e["predicted_small"]) for e in curves[width]], "line", n),
            Series("", [(e["medians"], e["small"]) for e in curves[width]], "dots", n))],
        x_scale="log", y_limits=(-0.05, 1.05), legend="top left",
    )  # fmt: skip
    lines = [
        "## b. What a norm makes of a spike", "", "![norm](figure:norm)", "",
        "Tokens of normal noise with a spike in two channels of fixed ratio, whose size differs by up to 20 %. Lines are the formulas of",
        "b2 and b3, dots are measured. Two tokens become the same vector once the spike holds most of their length, and a length grows",
        "with the root of the width.", "",
        "| width | medians at which the cosine passes 0.99 |", "|---|---|", *(f"| {width} | {x:.0f} |" for width, x in needed.items()),
    ]  # fmt: skip
    return lines, {"norm": draw([first, second])}


def _first(found: Entries) -> Part:
    lines = [
        "## c. The first position", "",
        "Output of heads at the first token, fitted by one linear map of the token: R² = 1 says that the map is fixed. Size: of the output",
        "over that of the value.", "",
        "| mechanism | kind of map | R² | size |", "|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {name} | {r['kind']} | {r['R2']:.3f} | {r['size']:.2f} |" for name, r in found["c1"]["mechanisms"].items()
    ]
    lines += [
        "",
        "`centred` gives the first token nothing; `differential` has a norm of its own behind the difference.",
    ]
    return lines, {}


def _models(found: Entries) -> Part:
    held, left_out = found["d3"]["models"], found["d3"]["left_out"]
    panels = []
    for name, halves in held.items():
        one = halves[0]
        panels.append(
            Panel(
                name, "half-block (odd: attention, even: MLP)", "max |h|",
                [
                    Series("first token", list(enumerate(one["first"])), "line", 1),
                    Series("median of later tokens", list(enumerate(one["others"])), "line", 0),
                    Series("largest of all", list(enumerate(one["largest"])), "dashed", 4),
                ],
                y_scale="log", legend="bottom right",
            )
        )  # fmt: skip
    lines = [
        "## d. Trained models", "", "![stream](figure:stream)", "",
        "The largest entry of tokens along the stream. Step up: the half-block in which the first token gains most on later ones.", "",
        "| model | half-blocks | step up (factor) | step down (factor) | largest over median | sink ratio | largest alpha_1 |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, halves in held.items():
        one = halves[0]
        cells = f"{one['up']} ({one['factor']:.2f}) | {one['down']} ({one['fall']:.2f}) | {one['ratio']:.1f}"
        lines.append(f"| {name} | {one['halves']} | {cells} | {one['sink_ratio']:.2f} | {one['alpha']:.2f} |")
    lines += ["", *(f"Left out: {name} ({why})." for name, why in left_out.items())]
    own = held[found["d3"]["stepping"]][0]
    if "vocabulary" in own:
        lines += [
            "", f"Behind the step of {found['d3']['stepping']} the first token ({_kinds(own['first_tokens'])}) has "
            f"{own['in_two_channels']:.0%} of its energy in two channels, the most in channel {own['channel']}. The form of that channel "
            f"has {own['dominance']:.2f} of its squares in one eigenvalue; the median of all channels is {own['dominance_median']:.2f}, "
            f"the largest {own['dominance_largest']:.2f}. Put in the middle, the token stands out by {own['middle']:.1f}. Of "
            f"{own['words']} tokens of the text put first, one by one, {own['vocabulary']:.0%} spike; after RMSNorm their mean cosine is "
            f"{own['alike']:.2f}." + (" What steps up is lost little by little, not in one block." if own["fall"] > 0.5 else ""),
        ]  # fmt: skip
    return lines, {"stream": draw(panels)}


def _kinds(count: int) -> str:
    return "the same in every sequence" if count == 1 else f"{count} different ones"


def _training(found: Entries) -> Part:
    held = carried_in(found)
    if held is None:
        return [], {}
    arms = [{**arm, "arm": NAMES.get(arm["arm"], arm["arm"])} for arm in held["arms"]]
    columns = {"first_mass": ("first token", 3), "sink_rate": ("sink rate", 2), "sink_ratio": ("sink ratio", 2),
               "spike": ("largest entry", 1), "spike_ratio": ("over the median", 1)}  # fmt: skip
    lines = [
        "## e. What drives sinks and spikes", "",
        f"One causal model of {BASE.layers} layers and width {BASE.width}, each arm changed in one thing. The plain model and the gate per",
        "head are at the better of two learning rates, the norm of the sum at the better of two lower ones, other arms at the higher of",
        "the first two. Beside losses, means over seeds; verdicts wait",
        f"for all seeds of an arm. First token: its share of a row (uniform attention over {BASE.length} tokens: {UNIFORM:.3f}).", "",
        *means_table(arms, columns),
    ]  # fmt: skip
    lost = failed(arms, next(arm for arm in arms if arm["arm"] == NAMES["softmax"]))
    lines += ["", failed_said(lost) + " These arms are left out of the pictures."] if lost else []

    def rows(name: str) -> dict[str, list[float]]:
        found = {
            arm["arm"]: [end[name] for end in arm["ends"] if end[name] is not None]
            for arm in arms
            if arm["arm"] not in lost
        }
        return {name: values for name, values in found.items() if values}

    figures = {}
    for name, title, x, shown in (
        ("sinks", "first token's share of rows", "share", rows("first_mass")),
        ("spikes", "largest entry over the median", "largest |h| / median |h|", rows("spike_ratio")),
    ):
        if shown:
            lines += ["", f"![{name}](figure:{name})"]
            figures[name] = strips(title, x, shown)
    return lines, figures
