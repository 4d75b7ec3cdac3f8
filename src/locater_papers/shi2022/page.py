"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locater_papers.engine.arms_page import (
    Entries,
    Part,
    Said,
    Sections,
    arms_table,
    carried_in,
    in_sections,
    in_short,
    numbers_of,
)
from locater_papers.engine.figures import Panel, Series, draw


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    sections: Sections = (
        (_cosine, ("a1",)), (_bounds, ("b1", "b3", "b5", "b7", "b8")), (_theorem, ("c1", "c4")), (_stacks, ("d1",)), (_models, ("e2",)),
        (_fusion, ()),
    )  # fmt: skip
    return in_sections(document, sections)


def lead(document: Mapping[str, Any]) -> list[str]:
    """The answer in plain words; only what was measured."""
    found = numbers_of(document)
    more = {"depth": len(next(iter(found["d1"]["curves"].values()))) - 1.0} if "d1" in found else {}
    said: Said = (
        (("e1", "e2"), lambda v: "Do tokens of a transformer grow alike with depth? The paper says so of BERT, by their mean cosine. In "
         "the trained encoder "
         f"at hand they do (rank correlation with depth {v['e1']:.2f}); in trained causal models with norms in front not always (least "
         f"{v['e2']:.2f})."),
        (("a3", "a4", "a5"), lambda v: "Cosine is not rank. A shared vector takes it to 0.99 and costs no direction; tokens in one "
         "direction of either sign have "
         f"a cosine near 0. Cosine around the mean, the usual remedy, is blind to both: it moves by {v['a5']:.3f} between 1 direction "
         "and all."),
        (("c1", "c2", "c5", "c7"), lambda v: "The theorem on blocks with norms after the sums holds in every draw (largest share of "
         f"the bound {v['c1']:.3f}; {v['c2']:.2f} in the median at the usual size of weights). In blocks built to have v under 1 tokens "
         f"come closer at {v['c5']:.2f} of the rate v. As a gauge it misleads: over draws a larger v goes with tokens that come closer "
         f"(rank correlation {v['c7']:.2f})."),
        (("e5",), lambda v: f"In a trained BERT it promises nothing: the least v of a block is {v['e5']:,.0f}."),
        (("b3", "b4", "b7"), lambda v: f"Attention does not always bring tokens closer: λ is {v['b3']:.1f} for sharp maps and "
         f"{v['b4']:.2f} under a causal mask with "
         f"logits near 0. GELU, unlike ReLU, can push them apart, by a factor of up to {v['b7']:.3f}."),
        (("d1", "d2", "depth"), lambda v: f"The place of the norm matters: after {v['depth']:.0f} layers, tokens of drawn models have "
         f"a cosine of {v['d1']:.4f} with norms after the sums, and of {v['d2']:.2f} with norms in front."),
        (("f1", "f2", "f3"), lambda v: "Fusing all layers changes the report loss of a masked model by "
         f"{v['f1']:+.3f} (concat), {v['f2']:+.3f} (max) and {v['f3']:+.3f} (gate), as seen at this size."),
        (("f8", "f9"), lambda v: f"Norms after the sums change its last layer's cosine by {v['f8']:+.2f} and its loss by "
         f"{v['f9']:+.3f}, as seen at this size."),
    )  # fmt: skip
    return in_short(document, said, more)


def _cosine(found: Entries) -> Part:
    held = found["a1"]
    lines = [
        "## a. What the cosine of tokens sees", "",
        f"{held['tokens']} Gaussian tokens of width {held['width']}. Above, a vector that all of them share is added, so many times as "
        "large as",
        "their own part: cosine rises, and around the mean nothing is lost. Below, tokens lie in few directions: rank falls, and no "
        "cosine tells.", "",
        "| tokens | cosine | cosine around the mean | effective rank | effective rank around the mean |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in held["shared"]:
        lines.append(f"| shared vector {row['shared']:g} | {_readings(row)} |")
    for row in held["directions"]:
        lines.append(f"| {row['directions']} direction{'s' * (row['directions'] > 1)} | {_readings(row)} |")
    lines += [
        "", "Around the mean tokens sum to zero. Where they have one length, their mean cosine is then -1 / (n - 1), whatever their "
        "rank: it can only",
        "tell of lengths that differ. To see lost directions, read the effective rank.",
    ]  # fmt: skip
    return lines, {}


def _readings(row: Mapping[str, float]) -> str:
    return f"{row['cosine']:.3f} | {row['centred_cosine']:.3f} | {row['rank']:.1f} | {row['centred_rank']:.1f}"


def _bounds(found: Entries) -> Part:
    table = found["b3"]["lambda"]
    panel = Panel(
        "λ of softmax maps", "standard deviation of logits", "λ, mean of draws",
        [
            Series("no mask", [(row["logits"], row["free"]) for row in table], "line", 0),
            Series("causal", [(row["logits"], row["causal"]) for row in table], "line", 1),
            Series("1: tokens no farther apart", [(table[0]["logits"], 1.0), (table[-1]["logits"], 1.0)], "dashed", 4),
        ],
        x_scale="log", y_limits=(0, 4.5),
    )  # fmt: skip
    medians = ", ".join(
        f"{name} {found[key]['median']:.2f}"
        for key, name in (("b1", "attention"), ("b5", "weights"), ("b8", "LayerNorm"))
    )
    lines = [
        "## b. Part by part", "", "![λ of maps](figure:lambda)", "",
        f"Draws use this much of each bound, in the median: {medians}. Attention's is attained by tokens along one eigenvector, so it "
        "is the",
        f"largest factor, not a typical one. λ of {found['b3']['keys']} keys can reach {found['b3']['most']:.0f}: half of the queries "
        "copy one token and half another.", "",
        "| logits | λ, no mask (largest) | λ, causal (largest) |", "|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {r['logits']:g} | {r['free']:.3f} ({r['free_max']:.2f}) | {r['causal']:.2f} ({r['causal_max']:.2f}) |"
        for r in table
    ]
    lines += [
        "", f"GELU's steepest slope is {found['b7']['steepest']:.4f}, so d(GELU H) is at most that times d(H), and comes close to it "
        "where channels are near 1.4.",
    ]  # fmt: skip
    return lines, {"lambda": draw([panel])}


def _theorem(found: Entries) -> Part:
    c1, c4 = found["c1"], found["c4"]
    lines = [
        "## c. The theorem", "", "![built stacks](figure:theorem)", "",
        "v = (1 + s²)(1 + h s √λ) / (σ1 σ2), for blocks with norms after the sums. Gaussian weights by size (1 keeps a token's size), "
        "medians:", "",
        "| size of weights | v (least) | d after / d before | largest share of the bound | σ1 σ2 | rank correlation of v with column 3 |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in c1["by_size"]:
        cells = f"{r['kept']:.2f} | {r['share']:.3f} | {r['sigma']:.2f} | {r['within']:+.2f}"
        lines.append(f"| {r['size']:g} | {r['v']:.2f} ({r['least_v']:.2f}) | {cells} |")
    lines += [
        "", "Among weights of one size a smaller v does go with closer tokens; between sizes it is the other way round: v counts s as "
        "s³, and σ1 σ2 grows less.",
        "v under 1 needs sums in front of the norms that are as large as the weights allow: every head adds to each token in the "
        "token's own",
        f"direction. The figure has such blocks, {c4['heads']} heads that copy what they see, by {c4['s']:g}: independent tokens begin "
        "with v above 1, grow alike",
        "for other reasons, and pull v under 1 as they do.",
    ]  # fmt: skip
    panels = []
    for shared, steps in c4["stacks"].items():
        points = {name: [(float(n), step[name]) for n, step in enumerate(steps)] for name in ("v", "kept", "cosine")}
        panels.append(
            Panel(
                f"built blocks, shared vector {shared} at first", "block", "",
                [
                    Series("v", points["v"], "line", 1), Series("d after / d before", points["kept"], "line", 0),
                    Series("cosine before", points["cosine"], "dashed", 4),
                ],
                y_limits=(0, 1.3),
            )
        )  # fmt: skip
    return lines, {"theorem": draw(panels)}


NAMES = {
    "post": "norms after the sums",
    "post, causal": "the same, causal",
    "pre": "norms in front",
    "pre, causal": "the same, causal",
}


def _stacks(found: Entries) -> Part:
    held = found["d1"]
    panels = [
        Panel(
            f"what a sublayer adds: {gain} of a token's size", "layer", "mean cosine of tokens",
            [
                Series(name, list(enumerate(held["curves"][f"{key}, {gain}"])), "dashed" if "causal" in key else "line", "pre" in key)
                for key, name in NAMES.items()
            ],
            y_limits=(-0.05, 1.05),
        )
        for gain in ("0.3", "1")
    ]  # fmt: skip
    lines = [
        "## d. Norms after the sums and in front", "", "![depth](figure:stacks)", "",
        f"Drawn models, {held['tokens']} tokens of width {held['width']}, mean of {held['seeds']} draws. Not in the paper, which is "
        "about BERT. A norm after the sum",
        "scales the stream back, so that each layer has the same say; with norms in front the stream grows and later layers change less "
        "of it.",
        "A causal mask does not keep tokens apart: where layers add little they are more alike with it.",
    ]  # fmt: skip
    return lines, {"stacks": draw(panels)}


def _models(found: Entries) -> Part:
    held = found["e2"]
    panels = []
    for name, title in (
        ("cosine", "mean cosine"),
        ("centred_cosine", "mean cosine around the mean"),
        ("centred_rank", "effective rank around the mean"),
    ):
        series = [
            Series(entry["model"], list(enumerate(_mean(entry["curves"][name]))), "line", n)
            for n, entry in enumerate(held["models"])
        ]
        panels.append(
            Panel(
                f"trained models: {title}",
                "layer",
                title,
                series,
                y_limits=(-0.05, 0.65) if name != "centred_rank" else (0, 130),
            )
        )
    lines = [
        "## e. Trained models", "", "![trained models](figure:models)", "",
        f"{held['samples']} samples of {held['length']} tokens, special tokens left out. Where there is a norm at the end, the last "
        "point is after it.",
    ]  # fmt: skip
    lines += [f"Left out: {name} ({why})." for name, why in held["left_out"].items()]
    for entry in held["models"]:
        if entry["blocks"]:
            lines += [
                "", f"{entry['model']}, norms after the sums, block by block: v as the theorem has it with gains and GELU counted, the "
                "closer bound with",
                "each weight's own norm, and what happened.", "",
                "| block | v | closer bound | d after / d before | σ1 σ2 | s | √λ, largest head |", "|---|---|---|---|---|---|---|",
            ]  # fmt: skip
            for n, b in enumerate(entry["blocks"]):
                cells = f"{b['v']:,.0f} | {b['close']:,.0f} | {b['kept']:.2f} | {b['sigma']:.2f} | {b['s']:.1f} | {b['root']:.2f}"
                lines.append(f"| {n} | {cells} |")
    return lines, {"models": draw(panels)}


def _mean(halves: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*halves, strict=True)]


def _fusion(found: Entries) -> Part:
    held = carried_in(found)
    if held is None:
        return [], {}
    lines = [
        "## f. Fusion and the place of the norm, trained", "", "![cosine by depth](figure:fusion)", "",
        f"A masked language model of {held['layers']} layers, mechanisms at the better of two rates, variations at one. Figures by seed.",
        "Cosine and residual are of the last layer's tokens, in front of any fusion.",
        "Right: around the mean, where little is to be seen (study a).", "",
        *arms_table(held["arms"], {"loss": "report loss", "cosine": "cosine", "residual": "residual"}),
    ]  # fmt: skip
    panels = [
        Panel(
            f"masked models, {title}", "half-block (attention, MLP, ...)", title,
            [Series(arm, list(enumerate(x[name])), "line", n) for n, (arm, x) in enumerate(held["curves"].items()) if x[name]],
        )
        for name, title in (("cosine", "mean cosine"), ("centred_cosine", "cosine around the mean"))
        if any(x[name] for x in held["curves"].values())
    ]  # fmt: skip
    if not panels:
        return [line for line in lines if "figure:" not in line], {}
    return lines, {"fusion": draw(panels)}
