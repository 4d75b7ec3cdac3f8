"""docs/performance.md and its picture, from the results of the benchmarks: `python benchmarks/run.py --page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lines import LINES, Device, Line

from locater_lab.engine.figures import Panel, Series, draw

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "images" / "performance-length.svg"
HEADINGS: dict[Device, str] = {"gpu": "On a GPU", "cpu": "On a CPU"}
DRAWN = {  # in attention.json: the name in the legend, and the style
    "flash forward": ("SDPA flash, forward", "dashed", 4),
    "cudnn forward": ("SDPA cuDNN, forward", "dashed", 3),
    "attention with statistics": ("output and statistics", "line", 1),
    "statistics": ("statistics", "line", 0),
    "statistics, extended": ("statistics, extended", "line", 2),
}
TOKENS = "tokens, in units of 1,024"
LIMITS = (0.0, 2.0)  # of ratios: room for the legend above 1
INTRO = """# Performance

What Locater costs, next to something you know: a plain forward pass, SDPA, another tool. Every line is a ratio or a time from one run, in which contenders take turns, and the
results are kept as JSON with the machine named; each figure links to them. The page is made from those files by `python benchmarks/run.py --page`.

    make bench                      # all benchmarks for the CPU: a table beside the last results
    make bench DEVICE=gpu           # those for a GPU
    python benchmarks/run.py --only checkpoint live --keep

A `-` under "measured" was not measured yet.
"""
LENGTHS = """## Cost over the number of tokens

Statistics of attention (log-sum-exp, entropy, largest logit; extended adds weight on the first token, distance and others) next to attention itself, 32 heads, bfloat16, causal.
Both grow with the square of the length; the ratio falls until the card is busy, and then stays.

![time and ratio over the number of tokens](images/performance-length.svg)

Memory stays linear: {memory} at {tokens} tokens, where the matrix of weights would take {matrix}. [Every figure](results/kernels.md).
"""


def write_page(results: dict[str, Any]) -> list[Path]:
    """Write both files; returns their paths."""
    PAGE.write_text(page(results), encoding="utf-8")
    PICTURE.write_text(picture(results["attention"]), encoding="utf-8")
    return [PAGE, PICTURE]


def page(results: dict[str, Any]) -> str:
    """The page."""
    parts = [INTRO]
    for device, heading in HEADINGS.items():
        lines = LINES[device]
        parts += [f"## {heading}\n", machines(lines, results), *_table(lines, results), ""]
        if device == "gpu":
            parts.append(lengths(results["attention"]))
    return "\n".join([*parts, *_obstacles(results)]).rstrip() + "\n"


def machines(lines: tuple[Line, ...], results: dict[str, Any]) -> str:
    """What the lines were measured on."""
    named: dict[str, None] = {}
    for line in lines:
        if (found := results.get(line.results)) is not None:
            named[_machine(found)] = None
    return f"Measured on {'; '.join(named)}.\n"


def _machine(results: dict[str, Any]) -> str:
    machine = results.get("machine", results.get("gpu"))
    if isinstance(machine, dict):
        return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
    words = str(machine).split(", load")[0]
    return f"{words}, torch {results['torch']}"


def _table(lines: tuple[Line, ...], results: dict[str, Any]) -> Iterator[str]:
    yield "| what | against | aim | measured | aim met |"
    yield "|---|---|---|---|---|"
    for line in lines:
        value = line.value(results.get(line.results))
        met = {True: "yes", False: "[no](#what-stands-in-the-way)", None: "-"}[line.met(value)]
        figure = "-" if value is None else f"[{line.words(value)}](../benchmarks/results/{line.results}.json)"
        yield f"| {line.what} | {line.against} | {line.aim_words()} | {figure} | {met} |"


def _obstacles(results: dict[str, Any]) -> Iterator[str]:
    """What stands in the way of each aim that is not met."""
    yield "## What stands in the way\n"
    missed = [(line, line.value(results.get(line.results))) for lines in LINES.values() for line in lines]
    rows = [(line, value) for line, value in missed if line.met(value) is False]
    if not rows:
        yield "Every aim is met."
    for line, value in rows:
        assert line.obstacle is not None, (
            f"{line.what}: {line.words(value)} misses {line.aim_words()}, and no line says why"
        )
        against = "" if line.against == "-" else f", against {line.against}"
        found = results[line.results]
        words = " ".join(_sentence(x) for x in (line.obstacle(found), found.get("note")) if x)
        yield f"- **{line.what}**{against}: {line.words(value)}, aim {line.aim_words()}. {words}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def _cases(attention: dict[str, Any], size: int) -> list[dict[str, Any]]:
    cases = [x for x in attention["cases"] if x["D"] == size and x["dtype"] == "bfloat16" and x["causal"]]
    return sorted((x for x in cases if x.get("batch", 1) == 1), key=lambda case: int(case["T"]))


def lengths(attention: dict[str, Any]) -> str:
    """The section on the number of tokens."""
    long = _cases(attention, 128)[-1]
    matrix = attention["heads"] * long["T"] ** 2 * 2 / 1e9
    return LENGTHS.format(
        memory=f"{long['peak_MB']['statistics, extended']:.0f} MB", tokens=f"{long['T']:,}", matrix=f"{matrix:,.0f} GB"
    )


def picture(attention: dict[str, Any]) -> str:
    """Milliseconds, and their ratio to the flash forward pass, over T, for two sizes of heads."""
    panels = []
    for size in (64, 128):
        cases = _cases(attention, size)
        times, ratios = [], []
        for name, (legend, style, colour) in DRAWN.items():
            points = [(x["T"] / 1024, x["ms"][name]) for x in cases if name in x["ms"]]
            if not points:
                continue
            times.append(Series(legend, points, style, colour))  # type: ignore[arg-type]
            flash = {x["T"] / 1024: x["ms"]["flash forward"] for x in cases if "flash forward" in x["ms"]}
            shares = [(T, ms / flash[T]) for T, ms in points if T in flash]
            ratios.append(Series(legend, shares, style, colour))  # type: ignore[arg-type]
        axis: dict[str, Any] = {"x_scale": "log", "x_ticks": sorted({T for series in times for T, _ in series.points})}
        panels += [
            Panel(f"heads of {size}: time", TOKENS, "ms", times, y_scale="log", legend="top left", **axis),
            Panel(
                f"heads of {size}: share of flash", TOKENS, "ratio", ratios, y_limits=LIMITS, legend="top right", **axis
            ),
        ]
    return draw(panels, columns=2)
