"""How much of a trained model's accuracy sums of a few of its paths keep, by their length, on three tasks: sorting,
convex hull and memorisation. Study f.

Six layers LN(x + heads), and an MLP in memorisation alone, whose published runs have one too. `path_classifier.py` has
the model and says what becomes of a path: it computes its own attention, as in the paper, or uses that of the whole
model (`frozen`).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from locater.inputs.text import read_text
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import device_of_study, map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.dong2021.path_classifier import (
    DEPTH,
    Classifier,
    ClassifierShape,
    LabelledTokens,
    TrainingRecipe,
    accuracy,
    draw_path,
    guess_accuracy,
    train_classifier,
)
from locater_lab.papers.dong2021.residual_by_depth import split_words

PATHS, REPEATS = (5, 20), 5
FEW, MANY = (f"{count} paths" for count in PATHS)
FROZEN = f"{MANY}, attention frozen"


# --- the tasks ---

VOCABULARY = 30_000  # of memorisation
DataMaker = Callable[
    [Setting, int], tuple[LabelledTokens, LabelledTokens]
]  # by seed: data to learn from, and to be judged on


@dataclass(frozen=True)
class PathTask:
    """A task and the model for it. `entire` and `chance` are the lines that the paper draws."""

    name: str
    make: DataMaker
    shape: ClassifierShape
    recipe: TrainingRecipe
    published_rate: float
    entire: float
    chance: float
    seeds: Mapping[bool, int]  # quick or not; where there are none it is not run
    quick_epochs: int = 0
    published_fall: str = ""  # of the rate


def sorting(setting: Setting, seed: int) -> tuple[LabelledTokens, LabelledTokens]:
    """Eight digits; the class of token i is the value of rank i."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(10, (1200, 8), generator=generator)
    return LabelledTokens(x[:1000], x[:1000].sort(-1).values), LabelledTokens(x[1000:], x[1000:].sort(-1).values)


def convex_hull(setting: Setting, seed: int) -> tuple[LabelledTokens, LabelledTokens]:
    """Ten points of a square that is shifted at random; class 1 for those on the hull."""
    generator = torch.Generator().manual_seed(seed)
    x = 10 * torch.rand(10_300, 10, 2, generator=generator, dtype=torch.float64)
    x = x + 3.3 * torch.randn(len(x), 1, 2, generator=generator, dtype=torch.float64)
    data = LabelledTokens(x.float(), on_hull(x).long())
    return data.part(slice(10_000)), data.part(slice(10_000, None))


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


def memorisation(
    setting: Setting, seed: int, count: int = 500, length: int = 128
) -> tuple[LabelledTokens, LabelledTokens]:
    """Sentences with a random class for every token; judged on the first 88 of those that were learnt, as published."""
    numbers: dict[str, int] = {}
    texts, most = sentences(setting)[0][:count], VOCABULARY - 1
    rows = [[1 + numbers.setdefault(w, len(numbers)) % most for w in split_words(text)[:length]] for text in texts]
    x = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, x.shape, generator=generator).masked_fill(x == 0, -1)
    return LabelledTokens(x, y), LabelledTokens(x[:88], y[:88])


def sentences(setting: Setting) -> tuple[list[str], str]:
    """RTE's pairs where there is a folder of data with them, else pieces of the documentation; and which it was."""
    files = [] if setting.data is None else sorted((setting.data / "rte").glob("train.tsv*"))
    if files:
        lines = [line.split("\t") for line in read_text(files[0]).splitlines()[1:]]
        return [f"{line[1]} {line[2]}" for line in lines if len(line) > 2], "RTE, words and punctuation"
    plain = re.findall(r"\S+", setting.text[:400_000])
    pieces = [" ".join(plain[i : i + 55]) for i in range(0, len(plain), 55)]
    return pieces, "the documentation inside Python in pieces of 55 words; no RTE"


TASKS = (
    PathTask(
        "sorting", sorting, ClassifierShape(2, 48, 10, vocabulary=10, positions=8), TrainingRecipe(65, 30, 1e-3), 1e-5, 0.98, 0.10,
        seeds={True: 2, False: 4}, quick_epochs=20,
    ),
    PathTask(
        "convex hull", convex_hull, ClassifierShape(3, 84, 2), TrainingRecipe(70, 30, 1e-5, decay=1e-3, steady=True), 1e-5, 0.90, 0.54,
        seeds={False: 2}, published_fall=", times 0.91 at five epochs",
    ),
    PathTask(
        "memorisation", memorisation, ClassifierShape(2, 250, 2, vocabulary=VOCABULARY, mlp=True), TrainingRecipe(50, 8, 3e-4), 3e-4, 0.85, 0.50,
        seeds={False: 3}, published_fall=" falling to zero",
    ),
)  # fmt: skip
# the whole; 5 paths of length 1
AT_LEAST = {"sorting": (0.95, 0.6), "convex hull": (0.88, 0.65), "memorisation": (0.80, 0.8)}
FIGURE = "figure of accuracy by path length"


def _claims(task: PathTask, first: int) -> tuple[Claim, ...]:
    name, (whole, short) = task.name, AT_LEAST[task.name]
    return (
        Claim(
            f"f{first}", f"{name}: the whole model learns it", f"token accuracy (paper: {task.entire:g})", "at least", whole,
            where=FIGURE, bound="ours",
        ),
        Claim(
            f"f{first + 1}", f"{name}: a few paths of length 1 already do much of it",
            f"token accuracy of the sum of {FEW} of length 1", "at least", short, where=FIGURE, bound="ours",
        ),
        Claim(
            f"f{first + 2}", f"{name}: long paths are no better than chance",
            f"token accuracy of the sum of {FEW} of length {DEPTH} (paper's chance: {task.chance:g})",
            "at most", round(task.chance + 0.05, 2), where=FIGURE, bound="ours",
        ),
        Claim(
            f"f{first + 3}", f"{name}: short paths carry more than long ones",
            f"token accuracy at length 1 less the mean of lengths 3 to {DEPTH}, {FEW} and {MANY}", "at least", 0.05,
            where=FIGURE, bound="ours",
        ),
        Claim(
            f"f{first + 4}", f"{name}: more paths do better", f"token accuracy of {MANY} less {FEW}, length 1",
            "at least", 0.0, where=FIGURE,
        ),
    )  # fmt: skip


CLAIMS = (
    *(claim for number, task in enumerate(TASKS) for claim in _claims(task, 1 + 5 * number)),
    Claim(
        "f16", "Trained as published, Adam at 1e-5 for 65 epochs of 1,000 sequences, the model sorts",
        "token accuracy of the whole model at the published rate", "at least", 0.95,
        by="ours",
    ),
    Claim(
        "f17", "Paths that use the attention of the whole model, as in the decomposition, sort better than those that compute their own",
        f"token accuracy of {MANY} of length 1, attention frozen less recomputed, sorting", "at least", 0.05, by="ours",
    ),
)  # fmt: skip


# --- one model ---


def accuracy_by_length(
    model: Classifier, data: LabelledTokens, count: int, seed: int, frozen: bool = False
) -> list[float]:
    """Mean accuracy of sums of `count` paths at length 0 ... L, over fresh sets of them."""
    draws = random.Random(1000 * seed + count)
    maps = model.attention(data.x, data.real) if frozen else None
    accuracies = []
    for length in range(DEPTH + 1):
        sets = [[draw_path(length, model.shape.heads, draws) for _ in range(count)] for _ in range(REPEATS)]
        accuracies.append(sum(accuracy(model.path_logits(data, paths, maps), data) for paths in sets) / REPEATS)
    return accuracies


@torch.no_grad()
def take_apart(model: Classifier, learn: LabelledTokens, judged: LabelledTokens, seed: int) -> dict[str, Any]:
    """Accuracy of the whole model, of its paths, and without reading."""
    curves = {f"{count} paths": accuracy_by_length(model, judged, count, seed) for count in PATHS}
    curves[FROZEN] = accuracy_by_length(model, judged, PATHS[-1], seed, frozen=True)
    return {
        "entire": accuracy(model(judged.x, judged.real), judged),
        "guess": guess_accuracy(learn, judged),
        "curves": curves,
    }


def recipe_of(task: PathTask, setting: Setting) -> TrainingRecipe:
    return replace(task.recipe, epochs=task.quick_epochs) if setting.quick else task.recipe


def part_of(setting: Setting, part: tuple[PathTask, int | None]) -> Any:
    """A run of a task by its seed, or, without one, as published."""
    task, seed = part
    return train_as_published(task, setting) if seed is None else run_task(task, setting, seed)


def run_task(task: PathTask, setting: Setting, seed: int) -> dict[str, Any]:
    """One model of a task, trained and taken apart."""
    learn, judged = (part.to(device_of_study(setting)) for part in task.make(setting, seed))
    return take_apart(train_classifier(task.shape, learn, recipe_of(task, setting), seed), learn, judged, seed)


def train_as_published(task: PathTask, setting: Setting) -> Measurement:
    """One model at the published rate for the published epochs; the interval is that of the sequences it is judged
    on.
    """
    recipe = replace(task.recipe, rate=task.published_rate, steady=True)
    learn, judged = (part.to(device_of_study(setting)) for part in task.make(setting, 2))
    model = train_classifier(task.shape, learn, recipe, 2)
    each = (model(judged.x, judged.real).argmax(-1) == judged.y).double().mean(-1)
    numbers = {"rate": recipe.rate, "epochs": recipe.epochs, "guess": guess_accuracy(learn, judged)}
    return replace(by_seed(each.tolist(), of="sequences of one model"), numbers=numbers)


# --- the study ---


def measure(setting: Setting) -> Results:
    """Every task that the setting has epochs for."""
    plan = [(task, seed) for task in TASKS if setting.quick in task.seeds for seed in range(task.seeds[setting.quick])]
    *done, published = map_parts(part_of, [*plan, (TASKS[0], None)], setting)
    runs: dict[str, list[dict[str, Any]]] = {}
    for (task, _), one in zip(plan, done, strict=True):
        runs.setdefault(task.name, []).append(one)
    rows = [task_row(task, runs[task.name], setting) for task in TASKS if task.name in runs]
    return Results({**measure_claims(runs), "f16": published}, {"path_accuracy": rows})


def measure_claims(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Measurement]:
    """Five claims on each task that was run, and f17."""
    measured: dict[str, Measurement] = {}
    for number, task in enumerate(TASKS):
        if task.name not in runs:
            continue
        first, own = 1 + 5 * number, runs[task.name]
        few, many = ([one["curves"][name] for one in own] for name in (FEW, MANY))
        falls = [(a[1] + b[1]) / 2 - fmean(a[3:] + b[3:]) for a, b in zip(few, many, strict=True)]
        measured |= {
            f"f{first}": by_seed([one["entire"] for one in own]),
            f"f{first + 1}": by_seed([curve[1] for curve in few]),
            f"f{first + 2}": by_seed([curve[-1] for curve in few]),
            f"f{first + 3}": by_seed(falls),
            f"f{first + 4}": by_seed([b[1] - a[1] for a, b in zip(few, many, strict=True)]),
        }
    gains = [one["curves"][FROZEN][1] - one["curves"][MANY][1] for one in runs[TASKS[0].name]]
    return {**measured, "f17": by_seed(gains)}


def task_row(task: PathTask, runs: list[dict[str, Any]], setting: Setting) -> dict[str, Any]:
    """How a task was run and what came out, for the page."""
    recipe = recipe_of(task, setting)
    fall = "" if recipe.steady else " falling to zero"
    rate = f"{recipe.rate:g}{fall} (published: {task.published_rate:g}{task.published_fall})"
    how = f"{len(runs)} models, {recipe.epochs} epochs, batches of {recipe.batch}, AdamW at {rate}"
    text = f"; {sentences(setting)[1]}" if task.make is memorisation else ""
    return {"task": task.name, "how": how + text, **task_means(task, runs)}


def task_means(task: PathTask, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over models, the paper's two lines, and every run."""
    curves = {
        kind: [fmean(at) for at in zip(*(one["curves"][kind] for one in runs), strict=True)]
        for kind in (FEW, MANY, FROZEN)
    }
    means = {key: fmean(one[key] for one in runs) for key in ("entire", "guess")}
    return {"curves": curves, **means, "paper": {"entire": task.entire, "chance": task.chance}, "runs": runs}


STUDY = Study(
    "paths of trained models", CLAIMS, measure, needs="the full setting, without --quick: minutes of training"
)
