"""The three tasks of the paper: sorting, convex hull and memorisation. Their data, and the model and recipe for each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.data.text import read_text
from locater_papers.dong2021.classifier import Data, Recipe, Shape
from locater_papers.dong2021.encoders import words
from locater_papers.engine.papers import Setting

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
