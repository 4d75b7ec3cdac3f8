"""Heads on frozen features of images, each judged on images it has not seen: study e.

An image of Fashion-MNIST is 16 patches of 7 x 7. The frozen features of a patch are a constant, its place (two numbers)
and its first principal components. All heads give the mean over tokens of ten outputs, learn one-hot targets by least
squares, and have their penalty (the MLP: its width and stopping time) chosen on a validation split. A seed draws the
split, the components and the gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.errors import LocaterError
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.sahiner2022.convex_problem import design, split_solve

FILE = "fashion.npz"
PATCH, SIDE, CLASSES = 7, 28, 10
COMPONENTS = {True: 4, False: 9}
GATES = {True: 2, False: 8}
SIZES = {True: (600, 400, 1500), False: (8000, 2000, 10_000)}  # to learn from, to choose by, to judge by
SEEDS = {True: 8, False: 10}
STEPS = {True: 60, False: 400}
PENALTIES = (1.0, 3.0, 10.0)  # of attention heads
RIDGES = (1e-3, 1e-1, 1e1, 1e3)
WIDTHS, EPOCHS, BATCH, RATE = {True: (64,), False: (64, 256)}, {True: 120, False: 150}, 30, 1e-2  # of the MLP
HEADS = (
    "linear", "MLP", "linear attention", "gated attention", "linear attention, ridge", "gated attention, ridge", "linear on all tokens",
)  # fmt: skip

ATTENTION = ("linear attention", "gated attention")

CLAIMS = (
    Claim(
        "e1", "A convex attention head does better than a linear one, as seen here",
        "accuracy of the better of the two attention heads (chosen on validation) less that of the linear head", "at least", 0.0,
        where="abstract", bound="ours",
    ),
    Claim(
        "e2", "A convex attention head does better than an MLP, as seen here",
        "accuracy of the better of the two attention heads (chosen on validation) less that of the MLP", "at least", 0.0,
        where="abstract", bound="ours",
    ),
    Claim(
        "e3", "The nuclear norm does better than a ridge on the same lifted features",
        "accuracy of linear attention less that of ridge regression in Z", "at least", 0.0, by="ours",
    ),
    Claim(
        "e4", "Gates do better than linear attention",
        "accuracy of gated attention less that of linear attention", "at least", 0.0, by="ours",
    ),
    Claim(
        "e5", "A convex attention head does better than a linear head that reads all tokens side by side",
        "accuracy of the better attention head less that of this head", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class ImageSplit:
    """Features (images, tokens, channels) and classes, to learn from, to choose by and to judge by."""

    x: tuple[Tensor, Tensor, Tensor]
    labels: tuple[Tensor, Tensor, Tensor]

    @property
    def targets(self) -> Float[Tensor, "n classes"]:
        return torch.nn.functional.one_hot(self.labels[0], CLASSES).double() - 1 / CLASSES


def images(folder: Path | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """All images and classes; None where the folder has no such file."""
    if folder is None or not (folder / FILE).is_file():
        return None
    try:
        with np.load(folder / FILE, allow_pickle=False) as arrays:
            parts = [(arrays[f"{name}_images"], arrays[f"{name}_labels"]) for name in ("train", "test")]
    except (KeyError, ValueError, OSError, BadZipFile) as error:
        names = "train_images, train_labels, test_images and test_labels"
        raise LocaterError(f"{folder / FILE}: is no .npz archive with the arrays {names}") from error
    if any(x.shape[1:] != (SIDE, SIDE) for x, _ in parts):
        raise LocaterError(f"{folder / FILE}: images must be {SIDE} x {SIDE}, not {parts[0][0].shape[1:]}")
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def patches(pixels: Float[Tensor, "n side side"]) -> Float[Tensor, "n tokens pixels"]:
    """Squares of an image, row by row.

    >>> patches(torch.arange(784.0).reshape(1, 28, 28))[0, 1, :3].tolist()
    [7.0, 8.0, 9.0]
    """
    blocks = pixels.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return blocks.reshape(len(pixels), -1, PATCH * PATCH)


def draw_split(pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], seed: int, quick: bool) -> ImageSplit:
    """Images of a seed as frozen features; components are those of the images to learn from."""
    sizes = SIZES[quick]
    order = np.random.default_rng(seed).permutation(len(labels))[: sum(sizes)]
    raw = patches(torch.from_numpy(pixels[order]).double() / 255)
    learn = raw[: sizes[0]].flatten(0, 1)
    middle = learn.mean(0)
    _, S, Vh = torch.linalg.svd((learn - middle)[:20_000], full_matrices=False)
    size = S[: COMPONENTS[quick]] / min(len(learn), 20_000) ** 0.5
    parts = (raw - middle) @ Vh[: COMPONENTS[quick]].mT / size
    at = torch.linspace(-1, 1, SIDE // PATCH, dtype=torch.float64)
    places = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1).reshape(1, -1, 2).expand(len(raw), -1, -1)
    x = torch.cat([torch.ones_like(parts[..., :1]), places, parts], 2)
    classes = torch.from_numpy(labels[order].astype(np.int64))
    first, second, third = x.split(sizes)
    return ImageSplit((first, second, third), classes.split(sizes))


def accuracy(outputs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    return float((outputs.argmax(1) == labels).double().mean())


# --- heads: each returns accuracy on the split to choose by and on the split to judge by ---


def accuracies_of(outputs: list[Tensor], data: ImageSplit) -> tuple[float, float]:
    """Accuracies of outputs on the two splits that are not learned from."""
    first, second = (accuracy(x, y) for x, y in zip(outputs, data.labels[1:], strict=True))
    return first, second


def choose_best(results: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    """The first of the best on the split to choose by. The split to judge by has no say, where several are equal too.

    >>> choose_best([(0.5, 0.4), (0.7, 0.6), (0.7, 0.9)])
    (0.7, 0.6)
    """
    best = max(results, key=lambda pair: pair[0])
    return best[0], best[1]


def ridge_head(features: list[Tensor], data: ImageSplit) -> tuple[float, float]:
    """Least squares with a penalty on squares; features of the three parts."""
    learn = features[0]
    U, S, Vh = torch.linalg.svd(learn, full_matrices=False)
    inner = U.mT @ data.targets
    results = []
    for b in RIDGES:
        W = Vh.mT @ ((S / (S**2 + b))[:, None] * inner)
        results.append(accuracies_of([x @ W for x in features[1:]], data))
    return choose_best(results)


def pooled_design(x: Tensor, gates: Tensor | None) -> Tensor:
    """Phi of the mean over tokens (images, gates, pairs, channels), some images at a time; one over the number of tokens
    in sums over keys.
    """
    tokens = x.shape[1]
    some = [design(part, gates).unflatten(0, (-1, tokens)).mean(1) / tokens for part in x.split(250)]
    return torch.cat(some)


def convex_attention_head(features: list[Tensor], data: ImageSplit, steps: int) -> tuple[float, float, float]:
    """The convex head; third, the largest duality gap over the objective."""
    results, gaps = [], []
    for solution in split_solve(features[0], data.targets, PENALTIES, steps):
        Z = solution.Z.reshape(-1, CLASSES)
        results.append(accuracies_of([x.flatten(1) @ Z for x in features[1:]], data))
        gaps.append(float(solution.gap / solution.objective))
    return *choose_best(results), max(gaps)


def mlp_head(data: ImageSplit, seed: int, quick: bool) -> tuple[float, float]:
    """One hidden layer of ReLU on every token, outputs averaged; width and epoch chosen on the split to choose by."""
    results = []
    for width in WIDTHS[quick]:
        torch.manual_seed(seed)
        d = data.x[0].shape[2]
        model = torch.nn.Sequential(torch.nn.Linear(d, width), torch.nn.ReLU(), torch.nn.Linear(width, CLASSES))
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        x, y = data.x[0].float(), data.targets.float()
        order = torch.Generator().manual_seed(seed)
        for epoch in range(EPOCHS[quick]):
            for rows in torch.randperm(len(x), generator=order).split(BATCH):
                optimizer.zero_grad()
                (model(x[rows]).mean(1) - y[rows]).square().sum(1).mean().backward()
                optimizer.step()
            if epoch % 10 == 9:
                with torch.no_grad():
                    results.append(accuracies_of([model(part.float()).mean(1) for part in data.x[1:]], data))
    return choose_best(results)


def accuracies_of_heads(data: ImageSplit, seed: int, quick: bool) -> dict[str, tuple[float, ...]]:
    """Accuracies of every head."""
    d = data.x[0].shape[2]
    gates = draw_normal(GATES[quick], d, d, seed=seed)
    linear = [pooled_design(x, None) for x in data.x]
    gated = [pooled_design(x, gates) for x in data.x]
    return {
        "linear": ridge_head([x.mean(1) for x in data.x], data),
        "MLP": mlp_head(data, seed, quick),
        "linear attention": convex_attention_head(linear, data, STEPS[quick]),
        "gated attention": convex_attention_head(gated, data, STEPS[quick]),
        "linear attention, ridge": ridge_head([x.flatten(1) for x in linear], data),
        "gated attention, ridge": ridge_head([x.flatten(1) for x in gated], data),
        "linear on all tokens": ridge_head([x.flatten(1) for x in data.x], data),
    }


def measure(setting: Setting) -> Results:
    pictures = images(setting.data)
    if pictures is None:
        return Results({})
    gaps: list[float] = []
    scores: dict[str, list[float]] = {name: [] for name in (*HEADS, "better attention")}
    for seed in setting.each(list(range(SEEDS[setting.quick]))):
        results = accuracies_of_heads(draw_split(*pictures, seed, setting.quick), seed, setting.quick)
        gaps += [results[name][2] for name in ATTENTION]
        for name in HEADS:
            scores[name].append(results[name][1])
        scores["better attention"].append(choose_best([results[name][:2] for name in ATTENTION])[1])

    def less(a: str, b: str) -> list[float]:
        return [x - y for x, y in zip(scores[a], scores[b], strict=True)]

    measured = {
        "e1": by_seed(less("better attention", "linear")),
        "e2": by_seed(less("better attention", "MLP")),
        "e3": by_seed(less("linear attention", "linear attention, ridge")),
        "e4": by_seed(less("gated attention", "linear attention")),
        "e5": by_seed(less("better attention", "linear on all tokens")),
    }
    rows = [
        {"head": name, "accuracy": fmean(values), "spread": by_seed(values).spread} for name, values in scores.items()
    ]
    sizes = dict(zip(("learn", "choose", "judge"), SIZES[setting.quick], strict=True))
    table = {"rows": rows, "seeds": SEEDS[setting.quick], "channels": 3 + COMPONENTS[setting.quick], **sizes,
             "gates": GATES[setting.quick], "gap": max(gaps)}  # fmt: skip
    return Results(measured, {"frozen_heads": table})


STUDY = Study("heads on frozen features", CLAIMS, measure, needs=f"{FILE} (Fashion-MNIST): --data FOLDER")
