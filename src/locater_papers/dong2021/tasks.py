"""Sorting, convex hull and memorisation: how much of a trained model's accuracy sums of a few of its paths keep, by
their length.

Six layers LN(x + heads), and an MLP in memorisation alone, whose published runs have one too. `classifier.py` has the
model and says what becomes of a path: it computes its own attention, as in the paper, or, `held`, keeps that of the
whole model.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locater.data.text import read_text
from locater_papers.dong2021.classifier import DEPTH, Classifier, Data, Recipe, Shape, accuracy, drawn, guess, train
from locater_papers.dong2021.encoders import words
from locater_papers.engine.arms_page import Entries, Part
from locater_papers.engine.claims import Claim, Measured
from locater_papers.engine.figures import Panel, Series, draw
from locater_papers.engine.papers import Setting, Study
from locater_papers.engine.parts import device, every

PATHS, REPEATS = (5, 20), 5
FEW, MANY = (f"{count} paths" for count in PATHS)
HELD = f"{MANY}, attention held"
VOCABULARY = 30_000  # of memorisation
Make = Callable[[Setting, int], tuple[Data, Data]]  # by seed: data to learn from, and to be judged on


@dataclass(frozen=True)
class Task:
    """A task and the model for it. `entire` and `chance` are the lines that the paper draws."""

    name: str
    make: Make
    shape: Shape
    recipe: Recipe
    published_rate: float
    entire: float
    chance: float
    seeds: Mapping[bool, int]  # quick or not; where there are none it is not run
    quick_epochs: int = 0
    published_fall: str = ""  # of the rate


def sorting(setting: Setting, seed: int) -> tuple[Data, Data]:
    """Eight digits; the class of token i is the value of rank i."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(10, (1200, 8), generator=generator)
    return Data(x[:1000], x[:1000].sort(-1).values), Data(x[1000:], x[1000:].sort(-1).values)


def convex_hull(setting: Setting, seed: int) -> tuple[Data, Data]:
    """Ten points of a square that is shifted at random; class 1 for those on the hull."""
    generator = torch.Generator().manual_seed(seed)
    x = 10 * torch.rand(10_300, 10, 2, generator=generator, dtype=torch.float64)
    x = x + 3.3 * torch.randn(len(x), 1, 2, generator=generator, dtype=torch.float64)
    held = Data(x.float(), on_hull(x).long())
    return held.part(slice(10_000)), held.part(slice(10_000, None))


def on_hull(points: Tensor) -> Tensor:
    """Which of the points (..., n, 2) are corners of their convex hull: those that see all others within half a turn.

    >>> on_hull(torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0]])).tolist()
    [True, True, True, False]
    """
    step = points.unsqueeze(-3) - points.unsqueeze(-2)  # (..., from, to, 2)
    n = points.shape[-2]
    others = ~torch.eye(n, dtype=torch.bool, device=points.device)
    turns = torch.atan2(step[..., 1], step[..., 0])[..., others].unflatten(-1, (n, n - 1)).sort(-1).values
    gaps = torch.cat([turns.diff(dim=-1), turns[..., :1] + 2 * math.pi - turns[..., -1:]], -1)
    return gaps.amax(-1) > math.pi


def memorisation(setting: Setting, seed: int, count: int = 500, length: int = 128) -> tuple[Data, Data]:
    """Sentences with a random class for every token; judged on the first 88 of those that were learnt, as published."""
    numbers: dict[str, int] = {}
    texts, most = sentences(setting)[0][:count], VOCABULARY - 1
    rows = [[1 + numbers.setdefault(w, len(numbers)) % most for w in words(text)[:length]] for text in texts]
    x = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, x.shape, generator=generator).masked_fill(x == 0, -1)
    return Data(x, y), Data(x[:88], y[:88])


def sentences(setting: Setting) -> tuple[list[str], str]:
    """RTE's pairs where there is a folder of data with them, else pieces of the documentation; and which it was."""
    found = [] if setting.data is None else sorted((setting.data / "rte").glob("train.tsv*"))
    if found:
        lines = [line.split("\t") for line in read_text(found[0]).splitlines()[1:]]
        return [f"{line[1]} {line[2]}" for line in lines if len(line) > 2], "RTE, words and punctuation"
    plain = re.findall(r"\S+", setting.text[:400_000])
    return [
        " ".join(plain[i : i + 55]) for i in range(0, len(plain), 55)
    ], "the documentation inside Python in pieces of 55 words; no RTE"


TASKS = (
    Task(
        "sorting", sorting, Shape(2, 48, 10, vocabulary=10, positions=8), Recipe(65, 30, 1e-3), 1e-5, 0.98, 0.10,
        seeds={True: 2, False: 4}, quick_epochs=30,
    ),
    Task(
        "convex hull", convex_hull, Shape(3, 84, 2), Recipe(70, 30, 1e-5, decay=1e-3, steady=True), 1e-5, 0.90, 0.54,
        seeds={False: 2}, published_fall=", times 0.91 at five epochs",
    ),
    Task(
        "memorisation", memorisation, Shape(2, 250, 2, vocabulary=VOCABULARY, mlp=True), Recipe(50, 8, 3e-4), 3e-4, 0.85, 0.50,
        seeds={False: 3}, published_fall=" falling to zero",
    ),
)  # fmt: skip


# --- runs
# ---------------------------------------------------------------------------------------------------------------


def by_length(model: Classifier, data: Data, count: int, seed: int, held: bool = False) -> list[float]:
    """Mean accuracy of sums of `count` paths at length 0 ... L, over fresh sets of them."""
    draws = random.Random(1000 * seed + count)
    maps = model.attention(data.x, data.real) if held else None
    found = []
    for length in range(DEPTH + 1):
        sets = [[drawn(length, model.shape.heads, draws) for _ in range(count)] for _ in range(REPEATS)]
        found.append(sum(accuracy(model.of_paths(data, paths, maps), data) for paths in sets) / REPEATS)
    return found


@torch.no_grad()
def taken_apart(model: Classifier, learn: Data, judged: Data, seed: int) -> dict[str, Any]:
    """Accuracy of the whole model, of its paths, and without reading."""
    curves = {f"{count} paths": by_length(model, judged, count, seed) for count in PATHS}
    curves[HELD] = by_length(model, judged, PATHS[-1], seed, held=True)
    return {"entire": accuracy(model(judged.x, judged.real), judged), "guess": guess(learn, judged), "curves": curves}


def recipe_of(task: Task, setting: Setting) -> Recipe:
    return replace(task.recipe, epochs=task.quick_epochs) if setting.quick else task.recipe


def part_of(setting: Setting, part: tuple[Task, int | None]) -> Any:
    """A run of a task by its seed, or, without one, as published."""
    task, seed = part
    return as_published(task, setting) if seed is None else run(task, setting, seed)


def run(task: Task, setting: Setting, seed: int) -> dict[str, Any]:
    """One model of a task, trained and taken apart."""
    learn, judged = (part.to(device(setting)) for part in task.make(setting, seed))
    return taken_apart(train(task.shape, learn, recipe_of(task, setting), seed), learn, judged, seed)


def as_published(task: Task, setting: Setting) -> Measured:
    """The published rate for the published epochs; the spread is that of the sequences it is judged on."""
    recipe = replace(task.recipe, rate=task.published_rate, steady=True)
    learn, judged = (part.to(device(setting)) for part in task.make(setting, 2))
    model = train(task.shape, learn, recipe, 2)
    each = (model(judged.x, judged.real).argmax(-1) == judged.y).double().mean(-1)
    numbers = {"rate": recipe.rate, "epochs": recipe.epochs, "guess": guess(learn, judged)}
    return Measured(
        float(each.mean()), 2 * float(each.std()) / len(each) ** 0.5, "2 standard errors over sequences", numbers
    )


# --- claims -----------------------------------------------------------------------------------------------------------

# the whole; paths of length 1, 5 of them
AT_LEAST = {"sorting": (0.95, 0.6), "convex hull": (0.88, 0.65), "memorisation": (0.80, 0.8)}


def _claims(task: Task, first: int) -> tuple[Claim, ...]:
    name, (whole, short) = task.name, AT_LEAST[task.name]
    return (
        Claim(f"f{first}", f"{name}: the whole model learns it", f"token accuracy (paper: {task.entire:g})", "at least", whole),
        Claim(
            f"f{first + 1}", f"{name}: a few paths of length 1 already do much of it",
            f"token accuracy of the sum of {FEW} of length 1", "at least", short,
        ),
        Claim(
            f"f{first + 2}", f"{name}: long paths are no better than chance",
            f"token accuracy of the sum of {FEW} of length {DEPTH} (paper's chance: {task.chance:g})",
            "at most", round(task.chance + 0.05, 2),
        ),
        Claim(
            f"f{first + 3}", f"{name}: short paths carry more than long ones",
            f"token accuracy at length 1 less the mean of lengths 3 to {DEPTH}, {FEW} and {MANY}", "at least", 0.05,
        ),
        Claim(f"f{first + 4}", f"{name}: more paths do better", f"token accuracy of {MANY} less {FEW}, length 1", "at least", 0.0),
    )  # fmt: skip


CLAIMS = (
    *(claim for number, task in enumerate(TASKS) for claim in _claims(task, 1 + 5 * number)),
    Claim(
        "f16", "Trained as published, Adam at 1e-5 for 65 epochs of 1,000 sequences, the model sorts",
        "token accuracy of the whole model at the published rate", "at least", 0.95,
    ),
    Claim(
        "f17", "Paths that keep the attention of the whole model, as in the decomposition, sort better than those that compute their own",
        f"token accuracy of {MANY} of length 1, attention held less recomputed, sorting", "at least", 0.05, by="ours",
    ),
)  # fmt: skip


def measure(setting: Setting) -> Mapping[str, Measured]:
    """Every task that the setting has epochs for."""
    plan = [(task, seed) for task in TASKS if setting.quick in task.seeds for seed in range(task.seeds[setting.quick])]
    *done, published = every(part_of, [*plan, (TASKS[0], None)], setting)
    runs: dict[str, list[dict[str, Any]]] = {}
    for (task, _), one in zip(plan, done, strict=True):
        runs.setdefault(task.name, []).append(one)
    found: dict[str, Measured] = {}
    for number, task in enumerate(TASKS):
        if task.name in runs:
            found |= task_measures(task, runs[task.name], 1 + 5 * number, setting)
    held = [one["curves"][HELD][1] - one["curves"][MANY][1] for one in runs[TASKS[0].name]]
    return {**found, "f16": published, "f17": _seeds(held)}


def task_measures(task: Task, runs: list[dict[str, Any]], first: int, setting: Setting) -> dict[str, Measured]:
    """The five claims on one task."""
    recipe = recipe_of(task, setting)
    rate = f"{recipe.rate:g}{'' if recipe.steady else ' falling to zero'} (published: {task.published_rate:g}{task.published_fall})"
    how = f"{len(runs)} models, {recipe.epochs} epochs, batches of {recipe.batch}, AdamW at {rate}"
    numbers: dict[str, Any] = {"runs": runs, "how": how, "entire": task.entire, "chance": task.chance}
    if task.make is memorisation:
        numbers["text"] = sentences(setting)[1]
    few, many = ([one["curves"][name] for one in runs] for name in (FEW, MANY))
    falls = [(a[1] + b[1]) / 2 - sum(a[3:] + b[3:]) / len(a[3:] + b[3:]) for a, b in zip(few, many, strict=True)]
    return {
        f"f{first}": _seeds([one["entire"] for one in runs], numbers),
        f"f{first + 1}": _seeds([curve[1] for curve in few]),
        f"f{first + 2}": _seeds([curve[-1] for curve in few]),
        f"f{first + 3}": _seeds(falls),
        f"f{first + 4}": _seeds([b[1] - a[1] for a, b in zip(few, many, strict=True)]),
    }


def _seeds(values: list[float], numbers: Mapping[str, Any] | None = None) -> Measured:
    held = torch.tensor(values, dtype=torch.float64)
    spread = 2 * float(held.std()) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return Measured(float(held.mean()), spread, f"2 standard errors over {len(values)} seeds", numbers or {})


# --- the page ---------------------------------------------------------------------------------------------------------


def section(entries: Entries) -> Part:
    """Lines of Markdown and figures by name."""
    held = {task.name: entries[f"f{1 + 5 * n}"] for n, task in enumerate(TASKS) if f"f{1 + 5 * n}" in entries}
    if not held:
        return [], {}
    lines = [
        "## f. What short and long paths carry", "", "![accuracy of sums of paths](figure:tasks)", "",
        "Token accuracy of sums of sampled paths by the number of attention layers on a path, mean over models and draws of paths. Paths",
        "compute attention from their own tokens, as in the paper; `attention held` keeps that of the whole model. Dashed: the whole",
        "model, and the most frequent class of each place, which needs no reading; the paper draws chance there. Both are in the table.",
        "",
    ]  # fmt: skip
    for name, entry in held.items():
        lines += [f"{name}: {entry['how']}" + (f"; {entry['text']}." if "text" in entry else "."), ""]
    lines += [
        "| task | whole model (paper) | without reading (paper's chance) | paths | "
        + " | ".join(map(str, range(DEPTH + 1)))
        + " |"
    ]
    lines += ["|---|---|---|---|" + "---|" * (DEPTH + 1)]
    for name, entry in held.items():
        whole, blind = (_mean([one[key] for one in entry["runs"]]) for key in ("entire", "guess"))
        for kind in (FEW, MANY, HELD):
            cells = " | ".join(f"{x:.2f}" for x in _curve(entry, kind))
            lines.append(
                f"| {name} | {whole:.3f} ({entry['entire']:g}) | {blind:.3f} ({entry['chance']:g}) | {kind} | {cells} |"
            )
    return lines, {"tasks": draw([_panel(name, entry) for name, entry in held.items()])}


def _panel(name: str, entry: Mapping[str, Any]) -> Panel:
    series = [
        Series(kind, list(enumerate(_curve(entry, kind))), "line", number)
        for number, kind in enumerate((FEW, MANY, HELD))
    ]
    for key, colour in (("entire", 3), ("guess", 4)):
        value = _mean([one[key] for one in entry["runs"]])
        series.append(Series("", [(0, value), (DEPTH, value)], "dashed", colour))
    return Panel(name, "length of the paths", "token accuracy", series, y_limits=(0, 1.4))  # the names are above 1


def _curve(entry: Mapping[str, Any], kind: str) -> list[float]:
    return [_mean(list(values)) for values in zip(*(one["curves"][kind] for one in entry["runs"]), strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


STUDY = Study(
    "paths of trained models", CLAIMS, measure, needs="the full setting, without --quick: minutes of training"
)
