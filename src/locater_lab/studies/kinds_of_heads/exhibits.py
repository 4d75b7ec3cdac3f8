"""What docs/kinds-of-heads.md shows: its models, and three figures of a head (spectrum, pattern, prediction).

The models are those in the package, the sentence encoder where it is installed, small ones that are trained here in a
minute or two, and folders of checkpoints that the command is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater_lab.engine.figures import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Panel, Series, draw, png_strip
from locater_lab.engine.trained_models import sentence_model
from locater_lab.train import Plan, run
from locater_lab.train.data import open_data

# ---- The models ----


DEMO = Path(str(files("locater") / "demo"))
DOCUMENTATION = "the documentation inside Python"
SEQUENCES = 96  # of a trained model's own held-out data: a third for statistics, the rest is measured


@dataclass(frozen=True)
class Exhibit:
    """A model of the gallery: what it is, what to look at, and what it is run on."""

    name: str  # of its files
    title: str
    origin: str
    look: str
    folder: Path
    label: str = DOCUMENTATION  # what the probe calls its data
    batches: tuple[dict[str, Tensor], ...] | None = None  # None: text
    tokenizer: str | None = None


@dataclass(frozen=True)
class ExhibitRecipe:
    """A small model that is trained for the gallery. `settings` are those of `locater train`."""

    title: str
    origin: str
    look: str
    settings: dict[str, Any]

    def plan(self, out: Path) -> Plan:
        return Plan(out=str(out), observe=0, evaluate=0, checkpoint=0, device="cpu", **self.settings)


RECIPES = {
    "copy": ExhibitRecipe(
        "Copy, one head",
        "One layer with one head. After three of 64 tokens the token before has to be copied; everywhere else the head has nothing to add.",
        "The head is a sink: where it has nothing to add it puts its weight on the first token. Compare `sink` with `predicted_sink`.",
        dict(
            task="copy", vocabulary=64, layers=1, heads=1, width=64, length=64, batch=32, steps=1000, rate=6e-3, positions="learned",
        ),
    ),
    "spare": ExhibitRecipe(
        "Copy, four heads",
        "The same task with four heads where one is enough, and a strong weight decay.",
        "Two heads are dead: near uniform, and the loss is the same without them. A scan sees how small their √F is.",
        dict(
            task="copy", vocabulary=64, layers=1, heads=4, width=64, length=64, batch=32, steps=1500, rate=6e-3, positions="learned", decay=1.0,
            floor=0.01,
        ),
    ),
    "chains": ExhibitRecipe(
        "Chains, two layers",
        "Two layers of attention alone. Every sequence has a rule of its own for which token follows which; the model has to find earlier places of the "
        "current token and look at what followed.",
        "An induction circuit: a head of layer 0 looks at the previous token, heads of layer 1 at what followed the same token before.",
        dict(
            task="ngram", vocabulary=64, concentration=0.01, layers=2, heads=4, width=64, length=64, batch=32, steps=1500, rate=1e-2, mlp="none",
            positions="learned", scale=0.3, decay=0.3, floor=0.01,
        ),
    ),
    "letters": ExhibitRecipe(
        "Letters, two layers",
        "Two blocks with rotary positions that read Python's documentation letter by letter.",
        "Local heads: most of the weight is within a few letters, and the prediction knows it, because the head itself turns queries and keys.",
        dict(layers=2, heads=4, width=64, length=128, batch=16, steps=800, rate=6e-3),
    ),
}  # fmt: skip


def packaged_models() -> list[Exhibit]:
    """The demo and its twin."""
    words = "A decoder of 6 layers x 4 heads with rotary positions, trained on the documentation inside Python in nine minutes"
    return [
        Exhibit(
            "demo",
            "Demo",
            f"{words}. It is part of the package.",
            "No faults and no roles: a small model that has read little text has soft heads. The first layer looks nearly everywhere, later ones mostly a few tokens back.",
            DEMO,
        ),
        Exhibit(
            "twin",
            "Demo's twin, with LocAteR",
            f"{words}, with the control LocAteR (target 2).",
            "M is 1.9 in every head, where the demo's lie between -0.3 and 0.3. The validation loss is 3.24 in place of 3.21.",
            DEMO / "twin",
            tokenizer=str(DEMO),
        ),
    ]


def installed_models() -> list[Exhibit]:
    """The sentence encoder that the tests use, where it is installed."""
    folder = sentence_model()
    if folder is None:
        return []
    return [
        Exhibit(
            "minilm",
            "all-MiniLM-L6-v2",
            "A sentence encoder of 6 layers x 12 heads, BERT's shape.",
            "A sharp previous-token head in layer 0, and a head in layer 1 that rests on the first token. Weights alone take nearly all heads for close to uniform.",
            folder,
        )
    ]


def trained_models(runs: Path, names: Sequence[str] = tuple(RECIPES)) -> Iterator[Exhibit]:
    """Models of `RECIPES`, each trained in a folder of its own below `runs`; one that is there already is not trained
    again.
    """
    for name in names:
        recipe = RECIPES[name]
        result = run(recipe.plan(runs / name))
        yield Exhibit(
            name,
            recipe.title,
            recipe.origin,
            recipe.look,
            Path(result.model),
            "its own data, held out",
            tuple({"input_ids": inputs} for inputs, _ in held_out(name, runs)),
        )


def held_out(name: str, runs: Path) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets that a trained model has not seen."""
    plan = RECIPES[name].plan(runs / name)
    return list(open_data(plan, runs / name, torch.device("cpu")).windows("report", SEQUENCES))


def given_models(folders: Sequence[Path]) -> list[Exhibit]:
    """Checkpoints in folders, or in folders of folders."""
    found = []
    for folder in folders:
        inside = [folder] if (folder / "config.json").is_file() else sorted(folder.glob("*/"))
        models = [path for path in inside if (path / "config.json").is_file()]
        if not models:
            raise LocaterError(
                f"{folder}: no checkpoint there (a folder with config.json, or a folder of such folders)"
            )
        found += [Exhibit(path.name, path.name, "Given by --models.", "", path) for path in models]
    return found


# ---- The figures: plain SVG, on white, so that they are legible on light and dark pages ----


SVG_FRAME = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
    f'font-family="system-ui, sans-serif" font-size="11" fill="#222"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
)
ACROSS, DOWN = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
INK = (33, 84, 145)  # of weight 1


def draw_spectrum(eigenvalues: Sequence[tuple[float, float]], M: float, F: float) -> str:
    """Eigenvalues of s W in the complex plane, both axes to one scale, their mean, and a circle: the root mean square of
    the singular values, which that of the eigenvalues would equal if W were normal.
    """
    size = len(eigenvalues)
    radius = math.sqrt(F / size)
    reach = 1.12 * max(radius, *(abs(part) for pair in eigenvalues for part in pair))
    wide = reach * ACROSS / DOWN
    turns = [2 * math.pi * step / 96 for step in range(97)]
    series = [
        Series("", [(-wide, 0.0), (wide, 0.0)], colour=4),
        Series("", [(0.0, -reach), (0.0, reach)], colour=4),
        Series("", [(radius * math.cos(turn), radius * math.sin(turn)) for turn in turns], "dashed", 2),
        Series("", eigenvalues, "dots"),
        Series("", [(M / size, 0.0)], "rings", 1),
    ]
    title = f"Spectrum: {size} eigenvalues of s W; M {M:.2f}, √F {math.sqrt(F):.2f}"
    limits = dict(x_limits=(-wide, wide), y_limits=(-reach, reach))
    return draw([Panel(title, "real part", "imaginary part", series, **limits)])  # type: ignore[arg-type]


def draw_pattern(weights: Tensor, title: str) -> str:
    """One map (T, T): a row per token that looks, a column per token that is looked at. White is 0, dark 1; roots of
    weights, so that small ones are seen.
    """
    shade = weights.clamp(0, 1).sqrt()[..., None]
    pixels = 255 + (torch.tensor(INK) - 255) * shade
    png = png_strip(pixels.round().to(torch.uint8)[None])
    size, T = DOWN, len(weights)
    left = LEFT + (ACROSS - size) / 2
    parts = [
        f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>',
        f'<image x="{left:g}" y="{TOP}" width="{size}" height="{size}" preserveAspectRatio="none" style="image-rendering: pixelated" '
        f'href="data:image/png;base64,{png}"/>',
        f'<rect x="{left:g}" y="{TOP}" width="{size}" height="{size}" fill="none" stroke="#bbb"/>',
        _text(left + size / 2, HEIGHT - 8, "token that is looked at"),
        f'<text transform="translate({left - 32:g} {TOP + size / 2:g}) rotate(-90)" text-anchor="middle">token that looks</text>',
    ]
    for at in range(0, T, 16):
        place = (at + 0.5) / T * size
        parts.append(_text(left + place, TOP + size + 14, str(at)))
        parts.append(_text(left - 5, TOP + place + 4, str(at), "end"))
    return "\n".join([SVG_FRAME, *parts, "</svg>", ""])


def draw_prediction(zones: Sequence[str], values: Mapping[str, Sequence[float | None]], title: str) -> str:
    """Where a head's weight lies: a group of bars per zone, a bar per series. None is a zone that a series cannot know."""
    group = ACROSS / len(zones)
    wide = group * 0.8 / len(values)

    def height(value: float) -> float:
        return value * DOWN

    parts = [f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = HEIGHT - BOTTOM - height(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:g}" x2="{WIDTH - RIGHT}" y2="{y:g}" stroke="#e4e4e4"/>')
        parts.append(_text(LEFT - 5, y + 4, f"{tick:g}", "end"))
    parts.append(f'<text transform="translate(13 {TOP + DOWN / 2:g}) rotate(-90)" text-anchor="middle">weight</text>')
    for number, zone in enumerate(zones):
        left = LEFT + number * group
        parts.append(_text(left + group / 2, HEIGHT - BOTTOM + 14, zone))
        for place, (colour, shares) in enumerate(zip(SERIES, values.values(), strict=True)):
            x, share = left + 0.1 * group + place * wide, shares[number]
            if share is None:
                parts.append(_text(x + wide / 2, HEIGHT - BOTTOM - 3, "?"))
                continue
            y = HEIGHT - BOTTOM - height(share)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{max(height(share), 0.6):.1f}" fill="{colour}"/>'
            )
    for number, (colour, name) in enumerate(zip(SERIES, values, strict=True)):
        x = LEFT + 8 + number * 105
        parts.append(f'<rect x="{x}" y="{HEIGHT - 17}" width="9" height="9" fill="{colour}"/>')
        parts.append(_text(x + 13, HEIGHT - 9, name, "start"))
    return "\n".join([SVG_FRAME, *parts, "</svg>", ""])


SERIES = (COLOURS[0], COLOURS[1], "#b9b9b9")


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
