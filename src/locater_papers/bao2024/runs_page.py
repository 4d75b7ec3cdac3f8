"""The report's part on training runs: what LocAteR buys, through what, against whom, where else, and when training is
pushed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from locater_papers.engine.arms_page import Entries, Part
from locater_papers.engine.figures import Panel, Series, draw
from locater_papers.engine.strips import strips

HEAD = [
    "| arm | rate | report loss, by seed | against none | perplexity | entropy | M | Frobenius^2 |",
    "|---|---|---|---|---|---|---|---|",
]


def answer(found: Entries) -> list[str]:
    """The first thing to read: what LocAteR buys over no penalty, over two rivals, and through which of its parts."""
    arms = {arm["arm"]: arm for arm in [*found["d8"]["arms"], *found["e1"]["arms"]]}
    plain, ours = arms["none"], arms["LocAteR"]
    perplexity = [math.exp(mean(arm, "loss")) for arm in (plain, ours)]
    lines = [
        "## What LocAteR buys", "",
        f"Three seeds, every arm at its own best of three learning rates, {plain['device']}; losses in nats per token on text that chose "
        "nothing.", "",
        f"- Over no penalty: {effect(arms, 'LocAteR', 'none')}. Perplexity {perplexity[0]:.2f} becomes {perplexity[1]:.2f}.",
        f"- Over mimetic initialisation: {effect(arms, 'LocAteR', 'mimetic')}.",
        f"- Over QK-norm: {effect(arms, 'LocAteR', 'QK-norm')}.",
        f"- Through the mean alone: {effect(arms, 'mean only', 'none')}. Through the scale alone: {effect(arms, 'scale only', 'none')}.",
        f"- On top of mimetic initialisation: {effect(arms, 'mimetic + LocAteR', 'mimetic')}; on top of QK-norm: "
        f"{effect(arms, 'QK-norm + LocAteR', 'QK-norm')}.",
    ]  # fmt: skip
    if "e5" in found:
        best = found["e5"]["best"]
        lines.append(f"- The best of all arms is another: {best}, {effect(arms, best, 'none')} against none.")
    if "i1" in found:
        held = found["i1"]["survived"]
        lines.append(
            f"- Hot learning rates: the plain model fails beyond {min(held['none']):g}, with LocAteR it trains at {min(held['LocAteR']):g}."
        )
    return [*lines, "", "Brackets hold the range of the seeds."]


def effect(arms: Mapping[str, Mapping[str, Any]], of: str, against: str) -> str:
    """`-0.0083 nats (-0.0104 to -0.0055), entropy +0.20`."""
    a, b = arms[of]["ends"], arms[against]["ends"]
    change = [x["loss"] - y["loss"] for x, y in zip(a, b, strict=True)]
    entropy = mean(arms[of], "entropy") - mean(arms[against], "entropy")
    return f"{sum(change) / len(change):+.4f} nats ({min(change):+.4f} to {max(change):+.4f}), entropy {entropy:+.2f}"


def rivals(found: Entries) -> Part:
    arms = list({arm["arm"]: arm for arm in [*found["e1"]["arms"], *found.get("d8", {}).get("arms", [])]}.values())
    plain = next(arm for arm in arms if arm["arm"] == "none")
    shown = [
        arm
        for arm in arms
        if arm is not plain and len(arm["ends"]) == len(plain["ends"]) and mean(arm, "loss") < mean(plain, "loss") + 0.2
    ]
    figures = {
        f"arms-{name}": strips(
            f"{what} against none, each at its own best rate", "nats, a dot for each seed", changes(shown, plain, name)
        )
        for what, name in (("report loss", "loss"), ("entropy", "entropy"))
    }
    lines = [
        "## c, d, e. Arms on the same footing",
        "",
        "![report loss](figure:arms-loss)",
        "",
        "![entropy](figure:arms-entropy)",
        "",
        *table(arms, plain),
    ]
    lines += ["", "Select losses of the first seed by rate: " + "; ".join(tried(arm) for arm in arms) + "."]
    own = found.get("d8", {}).get("learned")
    if own:
        lines += [
            "",
            "The same with learned positions in place of rotary ones (a seed that is missing was not run yet):",
            "",
            *table(own, own[0]),
        ]
    return lines, figures


def curves(found: Entries) -> Part:
    held = found["d8"]["curves"]
    panels = []
    for what, name in (("report loss", "loss"), ("entropy", "entropy")):
        by_target, by_strength = (
            [line(*one, name, n) for n, one in enumerate(kept(held[kind]))] for kind in ("targets", "strengths")
        )
        panels.append(Panel(f"{what} by target", "target M", what, by_target))
        panels.append(Panel(f"{what} by strength", "strength", what, by_strength, "log", x_limits=(8e-4, 0.12)))
    lines = [
        "## d. Targets and strengths", "", "![curves](figure:curves)", "",
        f"At the plain arm's rate of {found['d8']['rate']:g}, means of two seeds.", "",
        "| penalty | | report loss, by seed | entropy | M | Frobenius^2 |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind, sign in (("targets", "target"), ("strengths", "strength")):
        for arm, points in held[kind].items():
            for point in points:
                lines.append(f"| {arm} | {sign} {point['x']:g} | {' | '.join(cells(point['ends']))} |")
    return lines, {"curves": draw(panels)}


def elsewhere(found: Entries) -> Part:
    lines = [
        "## f. Other tasks",
        "",
        "| arm | rate | report loss, by seed | accuracy | entropy | M |",
        "|---|---|---|---|---|---|",
    ]
    for arm in next(found[key]["arms"] for key in ("f1", "f2", "f3") if key in found):
        ends = arm["ends"]
        right = by_seed(ends, "accuracy", 4) if ends[0]["accuracy"] is not None else "-"
        shown = f"{by_seed(ends, 'loss', 4)} | {right} | {by_seed(ends, 'entropy', 2)} | {by_seed(ends, 'M', 2)}"
        lines.append(f"| {arm['arm']} | {arm['rate']:g} | {shown} |")
    return lines, {}


def entropy(found: Entries) -> Part:
    points, means = found["h1"]["points"], found["h1"]["means"]
    pushed = [
        Series(name, [(x["entropy"], x["loss"]) for x in ends], "dots", n)
        for n, (name, ends) in enumerate(points.items())
    ]
    moved = [
        Series(f"M = {p['x']:g}", [(x["entropy"], x["loss"]) for x in p["ends"]], "dots", n)
        for n, p in enumerate(means)
    ]
    panels = [
        Panel("entropy pushed, M held at 2", "entropy, nats", "report loss", pushed),
        Panel("M moved by the mean alone", "entropy, nats", "report loss", moved),
    ]
    lines = ["## h. Is it the entropy?", "", "![entropy](figure:entropy)", ""]
    lines += ["| | report loss, by seed | entropy | M | Frobenius^2 |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(cells(ends))} |" for name, ends in points.items()]
    lines += [f"| M = {p['x']:g}, mean only | {' | '.join(cells(p['ends']))} |" for p in means]
    return lines, {"entropy": draw(panels)}


def stability(found: Entries) -> Part:
    held = found["i1"]
    series = [
        Series(
            name,
            [(float(rate), sum(losses) / len(losses)) for rate, losses in by_rate.items()],
            "line" if n < 5 else "dashed",
            n,
        )
        for n, (name, by_rate) in enumerate(held["losses"].items())
    ]
    title = f"{held['steps']} steps, mean of two seeds"
    panel = Panel(title, "learning rate", "report loss", series, "log", x_limits=(5e-3, 0.12), y_limits=(4, 7.5))
    rates = list(next(iter(held["losses"].values())))
    lines = ["## i. Hot learning rates", "", "![stability](figure:stability)", ""]
    lines += [
        f"| | {' | '.join(f'{float(rate):g}' for rate in rates)} | survived up to |",
        "|---|" + "---|" * (len(rates) + 1),
    ]
    for name, by_rate in held["losses"].items():
        shown = " | ".join(", ".join("-" if x is None else f"{x:.2f}" for x in losses) for losses in by_rate.values())
        lines.append(f"| {name} | {shown} | {', '.join(f'{x:g}' for x in held['survived'][name])} |")
    lines += ["", "Report loss by seed; survived: within half a nat of the plain run at the coolest of these rates."]
    return lines, {"stability": draw([panel])}


SECTIONS = (
    (rivals, ("e1",)), (curves, ("d8",)), (elsewhere, ("f1",)), (entropy, ("h1",)), (stability, ("i1",)),
)  # fmt: skip


def mean(arm: Mapping[str, Any], name: str) -> float:
    return sum(float(x[name]) for x in arm["ends"]) / len(arm["ends"])


def by_seed(ends: Sequence[Mapping[str, Any]], name: str, digits: int) -> str:
    return ", ".join(f"{x[name]:.{digits}f}" if x[name] < 1e4 else f"{x[name]:.2g}" for x in ends)


def cells(ends: Sequence[Mapping[str, Any]]) -> list[str]:
    return [by_seed(ends, "loss", 4), *(by_seed(ends, name, 2) for name in ("entropy", "M", "F"))]


def table(arms: Sequence[Mapping[str, Any]], plain: Mapping[str, Any]) -> list[str]:
    lines = list(HEAD)
    for arm in arms:
        loss, *rest = cells(arm["ends"])
        pairs = list(zip(arm["ends"], plain["ends"], strict=False))  # the seeds that both have
        change = sum(x["loss"] - y["loss"] for x, y in pairs) / len(pairs)
        lines.append(
            f"| {arm['arm']} | {arm['rate']:g} | {loss} | {change:+.4f} | {math.exp(mean(arm, 'loss')):.2f} | {' | '.join(rest)} |"
        )
    return lines


def changes(arms: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], name: str) -> dict[str, list[float]]:
    return {arm["arm"]: [x[name] - y[name] for x, y in zip(arm["ends"], plain["ends"], strict=True)] for arm in arms}


def tried(arm: Mapping[str, Any]) -> str:
    shown = (
        f"{rate:g} {'failed' if x is None else f'{x:.3f}'}"
        for rate, x in zip(arm["rates"], arm["select_loss"], strict=True)
    )
    return f"{arm['arm']}: {', '.join(shown)}"


def kept(held: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Curves that fit the axes: raw tr W^2 is in the table."""
    return [(name, points) for name, points in held.items() if not name.startswith("raw")]


def line(arm: str, points: Sequence[Mapping[str, Any]], name: str, number: int) -> Series:
    return Series(arm, [(float(p["x"]), mean(p, name)) for p in points], "line", number)
