"""How much of a trained model's accuracy sums of a few of its paths keep, by their length, on three tasks.

Six layers LN(x + heads), and an MLP in memorisation alone, whose published runs have one too. `task_data.py` has the
tasks. `classifier.py` has the model and says what becomes of a path: it computes its own attention, as in the paper, or,
`held`, keeps that of the whole model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from locater_papers.dong2021.classifier import DEPTH, Classifier, Data, Recipe, accuracy, drawn, guess, train
from locater_papers.dong2021.task_data import TASKS, Task, memorisation, sentences
from locater_papers.engine.claims import Claim, Measured
from locater_papers.engine.papers import Setting, Study
from locater_papers.engine.parts import device, every

PATHS, REPEATS = (5, 20), 5
FEW, MANY = (f"{count} paths" for count in PATHS)

HELD = f"{MANY}, attention held"


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


STUDY = Study(
    "paths of trained models", CLAIMS, measure, needs="the full setting, without --quick: minutes of training"
)
